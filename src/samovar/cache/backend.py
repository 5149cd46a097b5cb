"""Which cache is meant by a name, and how is it put on a pipeline and taken off?

A backend is anything with the four methods of `CacheBackend`; one's own is made known by
`register_cache_backend` and is then chosen like ours: by name, or by the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from ..arch import find_anatomy, find_denoisers
from ..arch.modules import unwrapped
from ..errors import ModelError, SettingError, nearest
from ..files import read_json
from ..hooks import Handle, PipelineHook, Run, hook_pipeline
from .config import TeaCacheConfig
from .decision import Agree
from .extractors import extractor_for
from .stats import CacheStats
from .teacache import HOOK_NAME, TeaCacheHook, apply_teacache_hook, remove_teacache_hook

ENVIRONMENT_VARIABLE = "DIFFUSION_CACHE_BACKEND"
Settings = Mapping[str, Any] | None
Hooks = dict[str, tuple[torch.nn.Module, TeaCacheHook]]
"""The denoisers of a pipeline by name."""


@runtime_checkable
class CacheBackend(Protocol):
    """A way of caching, on any pipelines."""

    def enable(self, pipeline: Any) -> None:
        """Put it on a pipeline, or on a denoiser alone."""

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        """Begin a run of so many steps."""

    def disable(self, pipeline: Any) -> None:
        """Take it off; the pipeline is then what it was."""

    def stats(self) -> Any:
        """What was done in the most recent run."""


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

    def __init__(self, config: TeaCacheConfig | Settings = None, agree: Agree | None = None) -> None:
        self.config = TeaCacheConfig.read(config)
        self._agree = agree
        self._hooks: dict[int, tuple[Any, Hooks]] = {}
        """By the identity of the pipeline, which is held."""
        self._watches: dict[int, Handle] = {}
        """The hooks on these pipelines, by the same identity."""
        self._adopted: list[Handle] = []
        """The hooks on pipelines that share a denoiser with these."""
        self._latest: tuple[Hooks, Hashable] | None = None
        """Where the most recent run was and what its request is; None as long as no pipeline has told."""

    def enable(self, pipeline: Any) -> None:
        if id(pipeline) in self._hooks:
            raise SettingError(f"The cache is on this {type(pipeline).__name__} already. Disable it first.")
        denoisers = _denoisers(pipeline)
        hooks: Hooks = {}
        there = self._modules()  # Pipelines may share a denoiser, and then its cache.
        try:
            for name, module in denoisers.items():
                hook = there.get(module) or apply_teacache_hook(module, self.config, self._agree)
                hook.branches.adopt = self._adopt
                hooks[name] = module, hook
            if pipeline not in denoisers.values():
                self._watches[id(pipeline)] = hook_pipeline(pipeline, HOOK_NAME, _RunWatch(hooks, self._note))
        except BaseException:
            for module, _ in hooks.values():
                if module not in there:
                    remove_teacache_hook(module)
            raise
        self._hooks[id(pipeline)] = pipeline, hooks

    def _adopt(self, pipeline: Any) -> None:
        """Watch the runs of a pipeline that was found to share a denoiser with one that has the cache."""
        known = {module: name for _, hooks in self._hooks.values() for name, (module, _) in hooks.items()}
        there, parts = self._modules(), find_denoisers(pipeline).values()
        shared = {known[module]: (module, there[module]) for module in map(unwrapped, parts) if module in there}
        self._adopted.append(hook_pipeline(pipeline, HOOK_NAME, _RunWatch(shared, self._note)))

    def _modules(self) -> dict[torch.nn.Module, TeaCacheHook]:
        return {module: hook for _, hooks in self._hooks.values() for module, hook in hooks.values()}

    def refresh(self, pipeline: Any, num_inference_steps: int) -> None:
        hooks = self._of(pipeline)
        for module, hook in hooks.values():
            hook.refresh(module, num_inference_steps)
        if hooks:
            self._note(hooks, None)

    def disable(self, pipeline: Any) -> None:
        _, hooks = self._hooks.pop(id(pipeline), (None, None))
        if hooks is None:
            return
        for module, _ in hooks.values():
            if module not in self._modules():
                remove_teacache_hook(module)
        self._watches.pop(id(pipeline), Handle()).detach()
        while self._adopted and not self._hooks:
            self._adopted.pop().detach()
        if self._latest is not None and self._latest[0] is hooks:
            self._latest = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, everything is computed as if there were no cache; what was learnt of the models is kept."""
        before = [(hook, hook.is_paused) for hook in self._modules().values()]
        for hook, _ in before:
            hook.is_paused = True
        try:
            yield
        finally:
            for hook, was_paused in before:  # Inside another pause it goes on.
                hook.is_paused = was_paused

    def stats(self) -> PipelineStats:
        if self._latest is not None:
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


def _denoisers(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The denoisers of a pipeline, if all of them can be cached."""
    if isinstance(pipeline, torch.nn.Module) and extractor_for(unwrapped(pipeline)) is not None:
        return {type(unwrapped(pipeline)).__name__: pipeline}
    denoisers = find_denoisers(pipeline)
    for name, module in denoisers.items():
        bare = unwrapped(module)
        if extractor_for(bare) is None and not find_anatomy(bare).stacks:
            raise ModelError(
                f"{name!r}, a {type(module).__name__}, has no stack of blocks, so its steps cannot be cached. Declare "
                "one (samovar.register_declaration), or register an extractor (samovar.cache.register_extractor)."
            )
    return denoisers


# ------------------------------------------------------------------------------------------------ by name

Factory = Callable[[Settings], CacheBackend]

RECOMMENDED: Mapping[str, Any] = {
    "rel_l1_thresh": 0.4, "forecast": "linear", "forecast_of": "output", "forecast_damping": 0.9
}  # fmt: skip
"""What "forecast" adds to plain TeaCache."""


def _tea_cache(settings: Settings) -> CacheBackend:
    return TeaCacheBackend(settings)


def _forecast(settings: Settings) -> CacheBackend:
    return TeaCacheBackend({**RECOMMENDED, **(settings or {})})


def _cache_dit(settings: Settings) -> CacheBackend:
    from .cache_dit import CacheDitBackend

    return CacheDitBackend(settings)


CACHE_BACKENDS: dict[str, Factory] = {"cache_dit": _cache_dit, "forecast": _forecast, "tea_cache": _tea_cache}
"""What makes a backend of its settings, by name."""


def register_cache_backend(name: str, factory: Factory) -> None:
    """Let a backend of one's own be chosen by name; `factory` makes it of its settings."""
    if not isinstance(name, str) or not callable(factory):
        raise SettingError(f"register_cache_backend takes a name and a function, not {name!r} and {factory!r}.")
    if name in ("", "none"):
        raise SettingError(f"A cache backend named {name!r} could never be chosen: it means no cache. Rename it.")
    CACHE_BACKENDS[name] = factory


def make_cache_backend(name: str | None = None, settings: Settings | str | Path = None) -> CacheBackend | None:
    """The backend of a name, or that of the environment if none is named; None for "none" or if neither is there.

    Settings may be a file, as `samovar tune` saves them; it says which backend they are for, unless `name` does."""
    if isinstance(settings, (str, Path)):
        name, settings = _read_saved(Path(settings), name)
    if settings is not None and not isinstance(settings, Mapping):
        raise SettingError(
            f"cache_config={settings!r}; a mapping such as {{'rel_l1_thresh': 0.2}}, or a file with one, was expected."
        )
    chosen = name if name is not None else os.environ.get(ENVIRONMENT_VARIABLE)
    if chosen is not None and not isinstance(chosen, str):
        raise SettingError(f"cache_backend={chosen!r}; a name such as 'tea_cache' was expected.")
    if not chosen or chosen == "none":
        if settings:
            raise SettingError(
                f"cache_config={dict(settings)!r} was given, but no cache. Choose one: cache_backend='tea_cache'."
            )
        return None
    if chosen not in CACHE_BACKENDS:
        source = "cache_backend" if name is not None else ENVIRONMENT_VARIABLE
        raise SettingError(f"{source}={chosen!r} is no cache backend. {nearest(chosen, [*CACHE_BACKENDS, 'none'])}")
    backend = CACHE_BACKENDS[chosen](settings)
    if not isinstance(backend, CacheBackend):
        raise SettingError(
            f"The cache backend {chosen!r} is a {type(backend).__name__}, which lacks some of enable, refresh, disable "
            "and stats."
        )
    return backend


def _read_saved(file: Path, name: str | None) -> tuple[str | None, Any]:
    """Which backend a file is for, and its settings: under `cache_config`, or all that is in it."""
    file = file.expanduser()
    if not file.is_file():
        raise SettingError(
            f"cache_config={str(file)!r} is no file. Give one that `samovar tune` saved, or settings by name such as "
            "{'rel_l1_thresh': 0.2}."
        )
    content = read_json(file)
    saved = content.get("cache_backend")
    if name is not None and saved is not None and name != saved:
        raise SettingError(f"{str(file)!r} is for cache_backend={saved!r}, not for {name!r}. Leave out cache_backend.")
    rest = {key: value for key, value in content.items() if key != "cache_backend"}
    return name if name is not None else saved, content.get("cache_config", rest)
