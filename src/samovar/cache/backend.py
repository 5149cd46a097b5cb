"""Which cache does a name stand for, and how is it attached to a pipeline?

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

from ..arch import find_anatomy, find_denoisers
from ..arch.modules import unwrapped
from ..core.errors import ModelError, SettingError, nearest
from ..core.files import is_file_name, naming, read_settings
from ..hooks import Handle, PipelineHook, Run, current_run, hook_pipeline
from ..hooks.handle import for_now
from .config import AutoConfig, CacheConfig, TeaCacheConfig
from .extractors import extractor_for, takes_blocks
from .hook import HOOK_NAME, TeaCacheHook, apply_teacache_hook
from .signal import Agree
from .stats import CacheStats
from .tuned import TunedFor

ENVIRONMENT_VARIABLE = "DIFFUSION_CACHE_BACKEND"
"""Names the cache where no other is named, as in vllm-omni."""
OLDER_VARIABLE = "DIFFUSION_CACHE_ADAPTER"
"""Likewise, where that is not set."""
CacheSetting = str | Path | CacheConfig | Mapping[str, Any] | bool | None
Hooks = dict[str, tuple[torch.nn.Module, TeaCacheHook]]
"""The denoisers of a pipeline by name."""


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


class TeaCacheBackend:
    """TeaCache on all denoisers of a pipeline."""

    def __init__(self, config: CacheConfig | Mapping[str, Any] | None = None, agree: Agree | None = None) -> None:
        self.config = config if isinstance(config, AutoConfig) else TeaCacheConfig.read(config)
        self._agree = agree
        self._hooks: dict[int, tuple[Any, Hooks]] = {}
        """By the identity of the pipeline, which is held."""
        self._latest: tuple[Hooks, Hashable] | None = None
        """The hooks and the request of the most recent run; None before any pipeline has run."""

    def enable(self, pipeline: Any) -> Handle:
        if id(pipeline) in self._hooks:
            raise SettingError(
                f"This {type(pipeline).__name__} has this cache already. Take it off first: samovar.detach(pipe).",
                param="cache",
            )
        denoisers, attached = _denoisers(pipeline, self.config), self._modules()
        hooks: Hooks = {}
        with contextlib.ExitStack() as undo:
            for name, module in denoisers.items():  # Pipelines that share a denoiser share its cache.
                hook = attached.get(module) or apply_teacache_hook(module, self.config, self._agree)
                undo.callback(self._release, module, hook)
                hooks[name] = module, hook
            if pipeline not in denoisers.values():
                undo.enter_context(hook_pipeline(pipeline, HOOK_NAME, _RunWatch(hooks, self._note)))
            self._hooks[id(pipeline)] = pipeline, hooks
            undo.callback(self._forget, pipeline)
            return Handle(undo.pop_all())

    def _modules(self) -> dict[torch.nn.Module, TeaCacheHook]:
        return {module: hook for _, hooks in self._hooks.values() for module, hook in hooks.values()}

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        hooks = self._of(pipeline)
        for module, hook in hooks.values():
            hook.refresh(module, num_inference_steps)
        if hooks:
            self._note(hooks, None)

    def _forget(self, pipeline: Any) -> None:
        _, hooks = self._hooks.pop(id(pipeline))
        if self._latest is not None and self._latest[0] is hooks:
            self._latest = None

    def _release(self, module: torch.nn.Module, hook: TeaCacheHook) -> None:
        """Take the hook off a denoiser that no other pipeline with this cache uses."""
        if module not in self._modules():
            hook.detach()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, everything is computed as if there were no cache; what was learnt of the models is kept."""
        with contextlib.ExitStack() as undo:
            for hook in self._modules().values():  # Inside another pause that one goes on.
                undo.enter_context(for_now(hook, is_paused=True))
            yield

    def stats(self) -> PipelineStats:
        """Of the run that the caller is part of, or else of the most recent one."""
        run = current_run()
        if run is not None and (own := self._of(run.pipeline)):
            hooks, request = own, run.request
        elif self._latest is not None:
            hooks, request = self._latest
        else:
            hooks, request = {name: hook for _, hooks in self._hooks.values() for name, hook in hooks.items()}, None
        found = {name: hook.stats(request) for name, (_, hook) in hooks.items()}
        return PipelineStats({name: stats for name, stats in found.items() if stats.branches})

    def _of(self, pipeline: Any) -> Hooks:
        return self._hooks.get(id(pipeline), (None, {}))[1]

    def _note(self, hooks: Hooks, request: Hashable) -> None:
        self._latest = hooks, request


class _RunWatch(PipelineHook):
    """Notes where a run begins, and lets its states go when it ends, however it ends."""

    def __init__(self, hooks: Hooks, note: Callable[[Hooks, Hashable], None]) -> None:
        self._hooks = hooks
        self._note = note

    def start_run(self, run: Run) -> None:
        self._note(self._hooks, run.request)

    def end_run(self, run: Run) -> None:
        for module, hook in self._hooks.values():
            hook.end_run(module, run.request)


def _denoisers(pipeline: Any, config: CacheConfig) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline, if all of them can be cached."""
    if isinstance(config, AutoConfig) or config.forecast_of == "output":  # They look at nothing inside of a denoiser.
        return find_denoisers(pipeline)
    if isinstance(pipeline, torch.nn.Module) and not _takes_blocks(unwrapped(pipeline), config):
        return {type(unwrapped(pipeline)).__name__: pipeline}
    denoisers = find_denoisers(pipeline)
    for name, module in denoisers.items():
        bare = unwrapped(module)
        if _takes_blocks(bare, config) and not find_anatomy(bare).stacks:
            raise ModelError(
                f"{name!r}, a {type(module).__name__}, has no stack of blocks, so its steps cannot be cached. Declare "
                "one (samovar.register_declaration), or register an extractor (samovar.cache.register_extractor)."
            )
    return denoisers


def _takes_blocks(module: torch.nn.Module, config: TeaCacheConfig) -> bool:
    return takes_blocks(extractor_for(module, config.transformer_type))


# ------------------------------------------------------------------------------------------------ by name

Factory = Callable[[Mapping[str, Any]], CacheBackend]

AUTO, TEA_CACHE = "auto", "tea_cache"


def _cache_dit(settings: Mapping[str, Any]) -> CacheBackend:
    from .cache_dit import CacheDitBackend

    return CacheDitBackend(settings)


CACHE_BACKENDS: dict[str, Factory] = {"cache_dit": _cache_dit}
"""Backends other than TeaCache: each builds itself from its settings."""


def register_cache_backend(name: str, factory: Factory) -> None:
    """Make your own backend available by name; `factory` builds it from its settings."""
    if not isinstance(name, str) or not callable(factory):
        raise SettingError(f"register_cache_backend takes a name and a function, not {name!r} and {factory!r}.")
    if name in ("", "none", AUTO, TEA_CACHE):
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
        named, source = os.environ.get(ENVIRONMENT_VARIABLE) or os.environ.get(OLDER_VARIABLE) or "none", "cache"
        if cache is None:
            cache, source = named, ENVIRONMENT_VARIABLE
        if isinstance(cache, bool):
            cache = AUTO if cache else "none"
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
            backend = AUTO if "tolerance" in settings else TEA_CACHE if named == "none" else named
        return cls._named(backend, settings, source)

    @classmethod
    def _named(cls, backend: Any, settings: Mapping[str, Any], source: str) -> CacheChoice | None:
        if backend == "none":
            if settings:
                raise SettingError(
                    f"cache: settings {settings!r} were given for the cache 'none'. Choose one, such as 'tea_cache'.",
                    param="cache",
                )
            return None
        if not isinstance(backend, str):
            raise SettingError(f"cache: backend={backend!r}; expected a name such as 'tea_cache'.", param="cache")
        if backend == AUTO:
            return cls(backend, AutoConfig.read(settings))
        if backend == TEA_CACHE:
            return cls(backend, TeaCacheConfig.read(settings))
        if backend not in CACHE_BACKENDS:
            hint = nearest(backend, [*cache_names(), "none"])
            raise SettingError(f"{source}={backend!r} is not a cache backend. {hint}", param="cache")
        return cls(backend, settings)

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
