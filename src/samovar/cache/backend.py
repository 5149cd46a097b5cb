"""Cache backends by name, and how one is attached to a pipeline.

A backend is anything with the three methods of `CacheBackend`. Register your own with `register_cache_backend`; it is
then chosen by name like ours.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..arch import find_denoisers
from ..core.errors import SettingError, nearest
from ..core.files import is_file_name, naming, read_settings
from ..hooks import Handle, PipelineHook, Run, current_run, hook_pipeline
from ..hooks.handle import for_now
from .config import AutoConfig, CacheConfig, TeaCacheConfig
from .hook import HOOK_NAME, TeaCacheHook, apply_teacache_hook
from .signal import Agree
from .stats import CacheStats
from .tuned import TunedFor

ENVIRONMENT_VARIABLE = "DIFFUSION_CACHE_BACKEND"
"""Names the cache where no other is named, as in vllm-omni."""
OLDER_VARIABLE = "DIFFUSION_CACHE_ADAPTER"
"""Likewise, where that is not set."""
CacheSetting = str | Path | CacheConfig | Mapping[str, Any] | bool | None


@runtime_checkable
class CacheBackend(Protocol):
    """A way of caching, for any number of pipelines."""

    def enable(self, pipeline: Any) -> Handle:
        """Attach to a pipeline, or to a single denoiser."""

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Begin a run with this number of steps."""

    def stats(self) -> Any:
        """What was computed and skipped in the most recent run."""


@dataclass(frozen=True)
class PipelineStats:
    """The most recent run of a pipeline."""

    denoisers: Mapping[str, CacheStats]
    """By name, those that ran."""

    @property
    def computed(self) -> int:
        """Computed forwards of all denoisers and branches."""
        return sum(stats.computed for stats in self.denoisers.values())

    @property
    def skipped(self) -> int:
        return sum(stats.skipped for stats in self.denoisers.values())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: stats.to_dict() for name, stats in self.denoisers.items()}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {stats}" for name, stats in self.denoisers.items()) or "nothing has run yet"


class _Watch(PipelineHook):
    """The cache on one pipeline: notes where a run begins, and lets its states go when it ends, however it ends."""

    def __init__(self, pipeline: Any, backend: TeaCacheBackend) -> None:
        self.pipeline, self._backend = pipeline, backend
        self.hooks: dict[str, tuple[torch.nn.Module, TeaCacheHook]] = {}
        """The denoisers by name."""

    def start_run(self, run: Run) -> None:
        self._backend.latest = self, run.request

    def end_run(self, run: Run) -> None:
        for module, hook in self.hooks.values():
            hook.end_run(module, run.request)


class TeaCacheBackend:
    """TeaCache on all denoisers of a pipeline."""

    def __init__(self, config: CacheConfig | Mapping[str, Any] | None = None, agree: Agree | None = None) -> None:
        self.config = config if isinstance(config, AutoConfig) else TeaCacheConfig.read(config)
        self.latest: tuple[_Watch, Hashable] | None = None
        """The pipeline and the request of the most recent run; None before any has run."""
        self._agree = agree
        self._watches: dict[int, _Watch] = {}
        """By the identity of the pipeline."""

    def enable(self, pipeline: Any) -> Handle:
        if id(pipeline) in self._watches:
            raise SettingError(
                f"This {type(pipeline).__name__} has this cache already. Take it off first: samovar.detach(pipe).",
                param="cache",
            )
        denoisers, attached, watch = find_denoisers(pipeline), self._attached(), _Watch(pipeline, self)
        with contextlib.ExitStack() as undo:
            for name, module in denoisers.items():  # Pipelines that share a denoiser share its cache.
                hook = attached.get(module) or apply_teacache_hook(module, self.config, self._agree)
                undo.callback(self._release, module, hook)
                watch.hooks[name] = module, hook
            if pipeline not in denoisers.values():
                undo.enter_context(hook_pipeline(pipeline, HOOK_NAME, watch))
            self._watches[id(pipeline)] = watch
            undo.callback(self._watches.pop, id(pipeline))
            return Handle(undo.pop_all())

    def _attached(self) -> dict[torch.nn.Module, TeaCacheHook]:
        return dict(pair for watch in self._watches.values() for pair in watch.hooks.values())

    def _release(self, module: torch.nn.Module, hook: TeaCacheHook) -> None:
        """Take the hook off a denoiser that no other pipeline with this cache uses."""
        if module not in self._attached():
            hook.detach()

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        watch = self._watches.get(id(pipeline))
        if watch is not None:
            for module, hook in watch.hooks.values():
                hook.refresh(module, num_inference_steps)
            self.latest = watch, None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, everything is computed as if there were no cache; what was learnt of the models is kept."""
        with contextlib.ExitStack() as undo:
            for hook in self._attached().values():  # Inside another pause that one goes on.
                undo.enter_context(for_now(hook, is_paused=True))
            yield

    def stats(self) -> PipelineStats:
        """Of the run that the caller is part of, or else of the most recent one."""
        run, watches, request = current_run(), list(self._watches.values()), None
        own = None if run is None else self._watches.get(id(run.pipeline))
        if run is not None and own is not None:
            watches, request = [own], run.request
        elif self.latest is not None and self.latest[0] in watches:
            watches, request = [self.latest[0]], self.latest[1]
        found = {name: hook.stats(request) for watch in watches for name, (_, hook) in watch.hooks.items()}
        return PipelineStats({name: stats for name, stats in found.items() if stats.branches})


# ------------------------------------------------------------------------------------------------ by name

Factory = Callable[[Mapping[str, Any]], CacheBackend]

AUTO, TEA_CACHE, NONE = "auto", "tea_cache", "none"


def _cache_dit(settings: Mapping[str, Any]) -> CacheBackend:
    from .cache_dit import CacheDitBackend

    return CacheDitBackend(settings)


CACHE_BACKENDS: dict[str, Factory] = {"cache_dit": _cache_dit}
"""Backends other than TeaCache: each builds itself from its settings."""


def register_cache_backend(name: str, factory: Factory) -> None:
    """Make your own backend available by name; `factory` builds it from its settings."""
    if not isinstance(name, str) or not callable(factory):
        raise SettingError(f"register_cache_backend takes a name and a function, not {name!r} and {factory!r}.")
    if name in ("", NONE, AUTO, TEA_CACHE):
        raise SettingError(f"A cache backend cannot be named {name!r}: that name has a meaning already. Rename it.")
    CACHE_BACKENDS[name] = factory


def cache_names() -> list[str]:
    """Every cache that can be chosen by name."""
    return sorted((AUTO, TEA_CACHE, *CACHE_BACKENDS))


@dataclass(frozen=True)
class CacheChoice:
    """A cache and its settings, checked; `build` makes the backend."""

    backend: str
    settings: CacheConfig | Mapping[str, Any]
    tuned_for: TunedFor | None = None
    """The model that it was tuned for, if it is from a file that says so."""

    @classmethod
    def read(cls, cache: CacheSetting) -> CacheChoice | None:
        """The choice that a setting stands for; None for no cache."""
        if isinstance(cache, (AutoConfig, TeaCacheConfig)):
            return cls(AUTO if isinstance(cache, AutoConfig) else TEA_CACHE, cache)
        if is_file_name(cache):
            with naming(cache):
                choice = cls.read(read_settings(cache, "cache"))  # type: ignore[arg-type]
            return None if choice is None else replace(choice, tuned_for=TunedFor.read(cache))
        named = os.environ.get(ENVIRONMENT_VARIABLE) or os.environ.get(OLDER_VARIABLE) or NONE
        if cache is None:
            return cls._of(named, {}, ENVIRONMENT_VARIABLE)
        if isinstance(cache, bool):
            cache = AUTO if cache else NONE
        given = {"backend": cache} if isinstance(cache, str) else cache
        if not isinstance(given, Mapping):
            raise SettingError(
                f"cache={cache!r}; expected a name such as 'tea_cache', a TeaCacheConfig, a mapping such as "
                "{'rel_l1_thresh': 0.2} or a file with one.",
                param="cache",
            )
        settings = {name: value for name, value in given.items() if name != "backend"}
        backend = given.get("backend")
        if backend is None:
            backend = AUTO if "tolerance" in settings else TEA_CACHE if named == NONE else named
        return cls._of(backend, settings, "cache")

    @classmethod
    def _of(cls, name: Any, settings: Mapping[str, Any], source: str) -> CacheChoice | None:
        problem = None
        if not isinstance(name, str):
            problem = f"cache: backend={name!r}; expected a name such as 'tea_cache'."
        elif name == NONE and settings:
            problem = f"cache: settings {settings!r} were given for the cache 'none'. Choose one, such as 'tea_cache'."
        elif name not in (NONE, *cache_names()):
            problem = f"{source}={name!r} is not a cache backend. {nearest(name, [*cache_names(), NONE])}"
        if problem is not None:
            raise SettingError(problem, param="cache")
        if name == AUTO:
            return cls(name, AutoConfig.read(settings))
        if name == TEA_CACHE:
            return cls(name, TeaCacheConfig.read(settings))
        return None if name == NONE else cls(name, settings)

    def build(self, agree: Agree | None = None) -> CacheBackend:
        """The backend. `agree` makes all ranks take the same decisions."""
        if isinstance(self.settings, (AutoConfig, TeaCacheConfig)):
            return TeaCacheBackend(self.settings, agree)
        backend = CACHE_BACKENDS[self.backend](self.settings)
        if not isinstance(backend, CacheBackend):
            raise SettingError(
                f"The cache backend {self.backend!r} is a {type(backend).__name__}, which lacks enable, refresh or "
                "stats.",
                param="cache",
            )
        return backend


def make_cache_backend(cache: CacheSetting = None) -> CacheBackend | None:
    """The backend that a setting of `attach(cache=...)` stands for; None for no cache."""
    choice = CacheChoice.read(cache)
    return None if choice is None else choice.build()
