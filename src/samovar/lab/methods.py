"""What can go on a pipeline to make it faster or smaller: fewer steps, a cache, quantised weights."""

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

Report = Callable[[], Mapping[str, Any]]
"""Returns what there is to say of the last call, as plain JSON values: `computed`, the share of its forwards that were
computed, if it is not all."""


@dataclass(frozen=True, eq=False)
class Method:
    """One point of a curve."""

    name: str
    family: str
    """The curve it belongs to."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    attached: Callable[[Any], AbstractContextManager[Report]] = lambda pipeline: nullcontext(dict)
    """Attaches it to a pipeline for as long as the context lasts."""
    steps: int | None = None
    """Number of steps, if other than the exact image's."""
    is_adaptive: bool = False
    """Whether it decides by the image, so that each image is a call of its own."""
    quantization: QuantizationSetting = None
    """How components are quantised that take the place of the exact ones."""

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
    backend: str, settings: Mapping[str, Any], name: str | None = None, tuned_for: TunedFor | None = None
) -> Method:
    """A cache."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Report]:
        if tuned_for is not None:
            tuned_for.check(pipeline)
        with attach(pipeline, cache={"backend": backend, **settings}) as handle:
            yield lambda: _report(handle.stats().cache)

    is_scheduled = "schedule" in settings
    words = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "forecast_weights")
    family = f"samovar {'schedule' if is_scheduled else backend}"
    whole = {"backend": backend, **settings}
    return Method(name or f"{backend} {words}".strip(), family, whole, attached, is_adaptive=not is_scheduled)


def _report(stats: Any) -> dict[str, Any]:
    if not isinstance(stats, PipelineStats):  # Another library's cache counts nothing.
        return {}
    every = stats.computed + stats.skipped
    return {"computed": stats.computed / every if every else 1.0}


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
    settings = cache if isinstance(cache, Mapping) else {}
    return cached(choice.backend, {k: v for k, v in settings.items() if k != "backend"}, tuned_for=tuned_for)
