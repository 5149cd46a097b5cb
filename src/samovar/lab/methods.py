"""What can go on a pipeline to make it faster? Fewer steps, a cache of Samovar, or somebody else's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache import CacheChoice, PipelineStats, TunedFor
from ..compose import attach
from ..core.errors import SettingError
from ..core.files import is_file_name, read_settings
from ..engine.quantize import QuantizationSetting

Notes = Callable[[], Any]
"""Returns a method's notes on the last run, as plain JSON values."""
OUTLIERS = "outliers"
"""The cache setting for outliers, and the key in a cache's notes that tells which images were outliers."""


@dataclass(frozen=True, eq=False)
class Method:
    """One point of a curve."""

    name: str
    family: str
    """The curve it belongs to."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    attached: Callable[[Any], AbstractContextManager[Notes]] = lambda pipeline: nullcontext(lambda: None)
    """Attaches it to a pipeline for as long as the context lasts."""
    steps: int | None = None
    """Number of steps, if other than the exact image's."""
    is_adaptive: bool = False
    """Whether it decides by the images, so that a batch is decided as one."""
    quantization: QuantizationSetting = None
    """How components are quantised that take the place of the exact ones."""
    is_peer: bool = False
    """Whether it is somebody else's, which may fail on a model that it does not know."""

    @property
    def key(self) -> str:
        """Unique for its settings; a name leaves out long ones, such as weights."""
        if not self.settings:
            return self.name
        plain_values = json.loads(json.dumps(self.settings, default=str))  # The same after saving and loading.
        text = json.dumps(plain_values, sort_keys=True)
        return f"{self.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


EXACT = Method("exact", "exact")
PLAIN = "plain steps"
QUANTISED = "quantised weights"
"""The family of methods that save memory, not steps."""


def plain(steps: int) -> Method:
    """Fewer steps and no cache: the baseline that any cache must beat."""
    return Method(f"plain {steps} steps", PLAIN, {"steps": steps}, steps=steps)


def quantised(setting: QuantizationSetting) -> Method:
    """Quantised weights, every step computed."""
    kinds = setting if isinstance(setting, Mapping) else {"": setting}
    words = ", ".join(f"{part} {Path(str(kind)).name}".strip() for part, kind in kinds.items())
    plain_setting = {part: str(kind) for part, kind in kinds.items()}
    return Method(f"{words} weights", QUANTISED, {"quantization": plain_setting}, quantization=setting)


def cached(
    backend: str,
    settings: Mapping[str, Any],
    name: str | None = None,
    family: str | None = None,
    tuned_for: TunedFor | None = None,
) -> Method:
    """One of Samovar's caches."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        if tuned_for is not None:
            tuned_for.check(pipeline)
        with attach(pipeline, cache={"backend": backend, **settings}) as handle:
            yield lambda: _notes(handle.stats().cache)

    short = {key: "more" if key == OUTLIERS else value for key, value in settings.items() if key != "forecast_weights"}
    words = ", ".join(f"{key}={value}" for key, value in short.items())
    return Method(
        name or f"{backend} {words}".strip(),
        family or f"samovar {backend}",
        {"backend": backend, **settings},
        attached,
        is_adaptive="schedule" not in settings or OUTLIERS in settings,
    )


def _notes(stats: Any) -> dict[str, Any] | None:
    """Masks of computed steps by denoiser and branch, and by image what differs between the images of a batch."""
    if not isinstance(stats, PipelineStats):
        return None
    found = {name: denoiser.branches for name, denoiser in stats.denoisers.items()}
    masks = {f"{name} {branch}": of.mask for name, branches in found.items() for branch, of in branches.items()}
    outliers = next((denoiser.outliers for denoiser in stats.denoisers.values() if denoiser.outliers), ())
    return masks | ({OUTLIERS: list(outliers)} if outliers else {})


def read_method(cache: str | Path | Mapping[str, Any]) -> Method:
    """The method of a setting for `attach(cache=...)`."""
    tuned_for = TunedFor.read(cache)
    if is_file_name(cache):
        cache = read_settings(cache, "cache")  # type: ignore[arg-type]
    choice = CacheChoice.read(cache)
    if choice is None:
        raise SettingError(
            f"cache={cache!r} means no cache: exact images are always made. Leave it out.", param="cache"
        )
    settings = cache.items() if isinstance(cache, Mapping) else ()
    own = {name: value for name, value in settings if name != "backend"}
    return cached(choice.backend, own, tuned_for=tuned_for)
