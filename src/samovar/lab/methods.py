"""What can be put on a pipeline to make it faster, and how is it taken off again?"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cache import CacheChoice, PipelineStats
from ..compose import attach
from ..errors import SettingError
from ..files import is_file_name, read_settings

Notes = Callable[[], Any]
"""What a method says of the last run, as plain JSON values."""
OUTLIERS = "outliers"
"""Among its notes: of each picture, whether it is one of those for which more is computed."""


@contextlib.contextmanager
def _nothing(pipeline: Any) -> Iterator[Notes]:
    yield lambda: None


@dataclass(frozen=True, eq=False)
class Method:
    """One point of a curve."""

    name: str
    family: str
    """Which curve it belongs to."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    attached: Callable[[Any], AbstractContextManager[Notes]] = _nothing
    """Puts it on a pipeline for as long as the context lasts."""
    steps: int | None = None
    """Other than the exact picture's."""
    is_adaptive: bool = False
    """Whether it looks at the pictures to decide, so that a batch decides as one."""
    is_peer: bool = False
    """Whether it is somebody else's, which may fail on a model that it does not know."""

    @property
    def key(self) -> str:
        """Tells it apart from all others: a name leaves out what is long, such as weights."""
        if not self.settings:
            return self.name
        plain_values = json.loads(json.dumps(self.settings, default=str))  # Saved and loaded again it is the same.
        text = json.dumps(plain_values, sort_keys=True)
        return f"{self.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


EXACT = Method("exact", "exact")


def plain(steps: int) -> Method:
    """Fewer steps, and nothing else: what any cache must beat."""
    return Method(f"plain {steps} steps", "plain steps", {"steps": steps}, steps=steps)


def ours(backend: str, settings: Mapping[str, Any], name: str | None = None, family: str | None = None) -> Method:
    """A cache of Samovar, by its name."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        with attach(pipeline, cache={"backend": backend, **settings}) as on_it:
            yield lambda: _said(on_it.stats().cache)

    named = {key: "more" if key == OUTLIERS else value for key, value in settings.items() if key != "forecast_weights"}
    words = ", ".join(f"{key}={value}" for key, value in named.items())
    return Method(
        name or f"{backend} {words}".strip(),
        family or f"samovar {backend}",
        {"backend": backend, **settings},
        attached,
        is_adaptive="schedule" not in settings or OUTLIERS in settings,
    )


def _said(stats: Any) -> dict[str, Any] | None:
    """Which steps were computed, by denoiser and branch, and which pictures were hard, where a cache of ours tells."""
    if not isinstance(stats, PipelineStats):
        return None
    found = {name: denoiser.branches for name, denoiser in stats.denoisers.items()}
    masks = {f"{name} {branch}": of.mask for name, branches in found.items() for branch, of in branches.items()}
    hard = next((denoiser.outliers for denoiser in stats.denoisers.values() if denoiser.outliers), ())
    return {**masks, OUTLIERS: list(hard)} if hard else masks


def read_method(cache: str | Path | Mapping[str, Any]) -> Method:
    """The method of a setting for `attach(cache=...)`. Settings without a backend are those of "forecast"."""
    if is_file_name(cache):
        cache = read_settings(cache, "cache")  # type: ignore[arg-type]
    settings: dict[str, Any] = dict(cache) if isinstance(cache, Mapping) else {"backend": cache}
    backend = settings.pop("backend", "forecast")
    if CacheChoice.read({"backend": backend, **settings}) is None:
        raise SettingError(f"cache={backend!r} is no cache, and the exact images are made anyway.", param="cache")
    return ours(backend, settings)
