"""One `attach` for everything on a pipeline, and off again.

Everything is checked before anything is changed, and a failure half-way is undone. What one feature must know about
another is passed on here: a cache asks all ranks before it decides, and the offload planner knows what will be skipped.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Unpack

import torch

from ..arch import find_denoisers
from ..arch.modules import unwrapped
from ..cache import AutoConfig, CacheBackend, CacheSetting, TeaCacheBackend, tolerating
from ..core.aliases import ALIASES, AliasArguments, resolve
from ..core.errors import SettingError
from ..core.files import check_names
from ..graphs import GraphsHook, ReplayStats, apply_graphs
from ..hooks import Handle, role_by_name
from ..offload import OffloadConfig, Offloaded, OffloadStats, prepare_offload
from ..parallel import (
    Agreement,
    ParallelMesh,
    apply_cfg_parallel,
    enable_sequence_parallel_for_model,
    make_mesh,
    sharding_of,
)
from .attention import AttentionHook, apply_attention
from .config import AttachConfig, CompileSetting, OffloadSetting, ParallelSetting
from .explain import Explanation, explain
from .peers import Peer, check_peers
from .regional import Regions, compile_regions, find_regions, keep_compiled
from .vae import Way, divide_vaes, find_vaes

_logger = logging.getLogger(__name__)
_ENTRY = "_samovar_attached"
"""Where a pipeline keeps what `attach` put on it, so that `detach(pipe)` finds it."""
NOTHING = (
    "attach() was asked for nothing, so nothing is on this %s. Say what you want, such as tolerance='high' to skip "
    "steps, gpu_memory='12GiB' to keep weights off the GPU, or compile='graphs'."
)
_INPUTS = ("input_ids", "pixel_values", "input_features", "input_values")
"""What encoders are called with."""


@dataclass(frozen=True)
class AttachedStats:
    """What each feature did; None for features that are not attached. Print it, or read the fields."""

    cache: Any = None
    """The `stats()` of the cache for the most recent run."""
    offload: OffloadStats | None = None
    graphs: Mapping[str, ReplayStats] = field(default_factory=dict)
    """By denoiser: what was replayed."""
    sharding: Mapping[str, str] = field(default_factory=dict)
    """By denoiser: the source of the plan that splits its sequence. Empty before the first forward."""

    def __str__(self) -> str:
        found = {"cache": self.cache, "offload": self.offload} | {f"graphs: {n}": one for n, one in self.graphs.items()}
        found |= {f"parallel: {name}": f"split by the plan {source}" for name, source in self.sharding.items()}
        texts = (f"{name}: {stats}".replace("\n", "\n  ") for name, stats in found.items() if stats is not None)
        return "\n".join(texts) or "nothing to report"

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; without what is not attached."""
        return {name: _plain(stats) for name, stats in vars(self).items() if stats}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return value.to_dict() if hasattr(value, "to_dict") else value


class _Handles(list["Attached"]):
    """What is attached to one pipeline. A copy of the pipeline has none of it, in memory or in a file."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, ()


class Attached(Handle):
    """The features on a pipeline; `detach` takes them off."""

    def __init__(self, pipe: Any, config: AttachConfig) -> None:
        super().__init__()
        self.config = config
        self.cache: CacheBackend | None = None
        self.offloaded: Offloaded | None = None
        self.mesh: ParallelMesh | None = None
        self.denoisers: dict[str, torch.nn.Module] = {}
        self.regions: Regions = {}
        self.graphs: dict[str, GraphsHook] = {}
        self.attention: dict[str, AttentionHook] = {}
        self.vaes: list[torch.nn.Module] = []
        self.way = Way(bool(config.vae_tiling), bool(config.vae_slicing), bool(config.vae_channels_last))
        """How VAEs decode."""
        self.peers: list[Peer] = []
        self.pipe = pipe
        self._cache_handle = Handle()
        self._final: AttachedStats | None = None
        self._check()
        with contextlib.ExitStack() as undo:
            self._apply(undo)
            self._undo = undo.pop_all()

    @property
    def features(self) -> tuple[str, ...]:
        """The parameters of `attach` that attached something."""
        config = self.config
        there = {
            "cache": config.cache,
            "offload": config.offload,
            "parallel": config.num_ranks > 1,
            "compile": config.compiles or config.graphs,
            "attention": config.attention,
            **{f"vae_{name}": is_on for name, is_on in self.way._asdict().items()},
        }
        return tuple(name for name, value in there.items() if value is not None and value is not False)

    def __repr__(self) -> str:
        features = "detached" if self.is_detached else ", ".join(self.features) or "nothing"
        return f"<Attached to {type(self.pipe).__name__}: {features}>"

    def _check(self) -> None:
        """All checks and decisions that change nothing."""
        config, features = self.config, self.features
        _refuse_twice(self.pipe, features)
        if any(self.way):
            self.vaes = find_vaes(self.pipe, self.way)
        if any(name != "offload" and not name.startswith("vae_") for name in features):
            self.denoisers = find_denoisers(self.pipe)
            wanted = {*features} if config.compiles else {*features} - {"compile"}
            self.peers = check_peers(self.denoisers, wanted)
        if config.num_ranks > 1:
            self.mesh = make_mesh(config.parallel)
        if config.cache is not None:
            for denoiser in self.denoisers.values():
                _check_denoiser(denoiser)
            if config.cache.tuned_for is not None:
                config.cache.tuned_for.check(self.pipe)
            self.cache = config.cache.build(None if self.mesh is None else Agreement(self.mesh))
        if config.compiles:
            self.regions = find_regions(self.denoisers)
        if config.offload is not None:
            self.offloaded = self._planned(config.offload)

    def _planned(self, offload: OffloadConfig) -> Offloaded:
        """An offload; where no plan is within the budget, one for VAEs that decode in parts, if they may."""
        refused, vaes = None, find_vaes(self.pipe, self.way)
        for way in self.way.smaller(vaes, self.config.vae_tiling, self.config.vae_slicing):
            try:
                with divide_vaes(vaes, way._replace(channels_last=False)):
                    planned = prepare_offload(self.pipe, offload)
            except SettingError as error:
                refused = refused or error
                if error.param != "gpu_memory":
                    raise
            else:
                if way is not self.way:
                    self.way, self.vaes = way, vaes
                    _logger.warning("%s, since gpu_memory is not enough otherwise.", way.chosen)
                return planned
        assert refused is not None
        raise refused

    def _apply(self, undo: contextlib.ExitStack) -> None:
        """Hooks have an order of their own, so this order only matters for cost: offload, which moves all weights,
        comes last, when nothing else can be refused any more."""
        config = self.config
        for name, denoiser in self.denoisers.items():
            if self.mesh is not None:
                undo.enter_context(apply_cfg_parallel(denoiser, self.mesh))
                undo.enter_context(enable_sequence_parallel_for_model(denoiser, config.parallel))
            if config.attention is not None:
                self.attention[name] = undo.enter_context(apply_attention(denoiser, config.attention))
            if config.graphs is not None:
                self.graphs[name] = undo.enter_context(apply_graphs(denoiser, config.graphs, self._no_graphs(name)))
        undo.enter_context(divide_vaes(self.vaes, self.way))
        if self.cache is not None:
            self._enable_cache(self.cache)
            undo.callback(lambda: self._cache_handle.detach())
        if config.compile_cache is not None:
            undo.callback(keep_compiled(config.compile_cache))
        undo.callback(compile_regions(self.regions, config.compiler))
        if self.offloaded is not None:
            self.offloaded.start()
            undo.callback(self.offloaded.detach)
        if self.features:
            vars(self.pipe)[_ENTRY] = _Handles((*_handles(self.pipe), self))
            undo.callback(self._forget)

    def _no_graphs(self, name: str) -> str | None:
        """Why there is no room for the graphs of a denoiser, if there is none."""
        plan = None if self.offloaded is None else self.offloaded.plan
        known = {} if plan is None or plan.budget_bytes is None else {one.name: one for one in plan.components}
        has_room = name not in known or known[name].placement == "streams" or known[name].graph_bytes
        return None if has_room else "gpu_memory has no room for graphs beside its weights"

    def _forget(self) -> None:
        vars(self.pipe)[_ENTRY] = _Handles(handle for handle in _handles(self.pipe) if handle is not self)
        if not vars(self.pipe)[_ENTRY]:
            del vars(self.pipe)[_ENTRY]

    def detach(self) -> None:
        """Take everything off: the pipeline is what it was before. `stats()` keeps the last figures."""
        with self._undo:  # Also if a cache cannot tell its figures.
            self._final = self.stats()

    @property
    def is_detached(self) -> bool:
        return self._final is not None

    def stats(self) -> AttachedStats:
        """What each feature did."""
        if self._final is not None:
            return self._final
        found = {name: sharding_of(denoiser) for name, denoiser in self.denoisers.items()} if self.mesh else {}
        return AttachedStats(
            None if self.cache is None else self.cache.stats(),
            None if self.offloaded is None else self.offloaded.stats(),
            {name: hook.stats() for name, hook in self.graphs.items()},
            {name: sharding.source for name, sharding in found.items() if sharding is not None},
        )

    def explain(self) -> Explanation:
        """What is attached where, in which order, and why. Print it, or take `to_dict()`."""
        return explain(self)

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Compute every step of the runs inside, whatever the cache would skip."""
        with contextlib.ExitStack() as undo:
            if isinstance(self.cache, TeaCacheBackend):
                undo.enter_context(self.cache.paused())
            elif self.cache is not None:
                self._cache_handle.detach()
                undo.callback(self._enable_cache, self.cache)
            yield

    def tolerating(self, tolerance: float | str | None) -> contextlib.AbstractContextManager[None]:
        """Within this tolerance, whatever the settings of the cache "auto" say; None changes nothing."""
        choice = self.config.cache
        if tolerance is not None and (choice is None or not isinstance(choice.settings, AutoConfig)):
            raise SettingError("A tolerance is for the cache 'auto', which is not attached.", param="tolerance")
        return tolerating(tolerance)

    def _enable_cache(self, cache: CacheBackend) -> None:
        handle = cache.enable(self.pipe)
        if not isinstance(handle, Handle):
            raise SettingError(
                f"enable() of {type(cache).__name__} returned {handle!r}; expected a samovar.hooks.Handle, so that the "
                "cache can be detached.",
                param="cache",
            )
        self._cache_handle = handle


def attach(
    pipe: Any,
    cache: Literal["auto", "tea_cache", "cache_dit", "none"] | CacheSetting = None,
    *,
    tolerance: Literal["exact", "high", "fast"] | float | str | None = None,
    offload: Literal["auto", "model", "layerwise", "none"] | OffloadSetting = None,
    parallel: Literal["ulysses", "ring", "gathered", "none"] | ParallelSetting = None,
    compile: Literal["graphs", "inductor"] | CompileSetting = False,
    attention: Literal["cudnn", "flash", "flash3", "sage"] | str | None = None,
    compile_cache: str | Path | None = None,
    vae_tiling: bool | None = None,
    vae_slicing: bool | None = None,
    vae_channels_last: bool = False,
    gpu_memory: str | int | None = None,
    host_memory: str | int | None = None,
    exclude: str | Sequence[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    batch: int | None = None,
    replace: bool = False,
    **aliases: Unpack[AliasArguments],
) -> Attached:
    """Attach features to a pipeline, or to a single denoiser. Take them off with `detach()`, or use `with`.

    Every setting is a name, a settings object, a mapping of settings, or a file that holds one.

    Args:
        pipe: A diffusers pipeline, any object that holds denoisers, or a denoiser. With several ranks, each of them
            calls this with a copy of the pipeline.
        cache: Skips denoising steps. "auto", "tea_cache", "cache_dit" or a registered backend; an
            `AutoConfig` or a `TeaCacheConfig`; a mapping such as {"tolerance": 0.03} or {"backend": "tea_cache",
            "rel_l1_thresh": 0.3}; a file saved by `samovar tune`. True is "auto". None looks at the environment
            variable DIFFUSION_CACHE_BACKEND; "none" is no cache.
        tolerance: How much the cache "auto" may lose: "exact", "high", "fast", or a number. It means cache="auto".
        offload: Keeps weights off the GPU until they are needed. "auto", "model" or "layerwise"; an `OffloadConfig`.
        parallel: Splits one image over several ranks. A `SequenceParallelConfig`, or "ulysses" or "ring" for all ranks.
        compile: "graphs" replays computed forwards as CUDA graphs, with the model's bits. True, or a backend's name or
            function, compiles the blocks with torch.compile.
        attention: Computes attention with other kernels: "cudnn", "flash", "flash3", "sage" or another backend of
            diffusers. The first forward compares it with the default, which stays where they do not agree.
        compile_cache: A folder that keeps compiled blocks, so that later processes need not compile them. By default
            torch's own, which is the environment variable TORCHINDUCTOR_CACHE_DIR. Files in it are run as code.
        vae_tiling: VAEs decode in tiles, which are blended, with less memory. By default only if `gpu_memory` is not
            enough otherwise; False never does.
        vae_slicing: VAEs decode the images of a batch one after the other, with less memory. Likewise.
        vae_channels_last: VAEs compute with channels last, which is faster on most GPUs and changes the last bits.
        gpu_memory: The budget for GPU memory, such as "12GiB". Alone, it means offload="auto".
        host_memory: Likewise for host memory that holds weights; the rest is read from the model's files.
        exclude: Names of components that offload leaves where they are, as a list or with commas.
        height: Pixels of the largest request that `gpu_memory` is planned for; by default the pipeline's own size. A
            larger one is planned again when it comes, or refused before it starts.
        width: Likewise.
        num_frames: Likewise, for videos.
        batch: Likewise, images or videos per request.
        replace: Detach what an earlier `attach` put on this pipeline first, as one needs in a notebook.
        aliases: vllm-omni's spellings of the same settings, such as `cache_backend`.

    Returns:
        What is attached: `detach()` takes it off, `stats()` and `explain()` say what it does. It is a context manager.

    Raises:
        SettingError: A setting cannot be used, here or with another; `param` names it. Nothing was changed.
        ModelError: The pipeline has no denoiser, or one that cannot do what was asked for.
        HookConflictError: A hook of somebody else is in the way.
    """
    values, parameters = locals(), inspect.signature(attach).parameters
    check_names(aliases, [*parameters, *ALIASES], "a setting of attach")
    settings = parameters.keys() - {"pipe", "replace", "aliases"}
    given = {name: values[name] for name in settings if values[name] is not parameters[name].default} | aliases
    config = AttachConfig.of(**resolve(given))
    if pipe is None or isinstance(pipe, (str, Path, int, type)):
        raise SettingError(
            f"pipe={pipe!r} is not a pipeline. Load one first, DiffusionPipeline.from_pretrained(...), or let "
            "samovar.Omni(model) do it.",
            param="pipe",
        )
    attached = _replacing(pipe, config) if replace else Attached(pipe, config)
    if not given and not attached.features:
        _logger.warning(NOTHING, type(pipe).__name__)
    return attached


def _replacing(pipe: Any, config: AttachConfig) -> Attached:
    """Attach in place of what is attached, which comes back if that fails."""
    before = [handle.config for handle in _handles(pipe)]
    detach(pipe)
    with contextlib.ExitStack() as restore:
        for earlier in before:
            restore.callback(Attached, pipe, earlier)
        attached = Attached(pipe, config)
        restore.pop_all()
    return attached


def detach(pipe: Any) -> None:
    """Take off everything that `attach` put on a pipeline or denoiser. Does nothing if there is nothing."""
    for handle in reversed(_handles(pipe)):
        handle.detach()


def _handles(pipe: Any) -> list[Attached]:
    handles: list[Attached] = getattr(pipe, "__dict__", {}).get(_ENTRY, [])
    return handles


def _check_denoiser(module: torch.nn.Module) -> None:
    """Refuse a cache on what is not called once a step: a VAE or an encoder."""
    bare = unwrapped(module)
    names = inspect.signature(bare.forward).parameters
    is_vae = all(callable(getattr(type(bare), name, None)) for name in ("encode", "decode"))
    if (is_vae or not names.keys().isdisjoint(_INPUTS)) and all(role_by_name(name) != "time" for name in names):
        raise SettingError(
            f"{type(bare).__name__} is {'a VAE' if is_vae else 'an encoder'}, which has no steps that a cache could "
            "skip. Attach to the pipeline, or to its denoiser, such as pipe.transformer or pipe.unet.",
            param="cache",
        )


def _refuse_twice(pipe: Any, features: tuple[str, ...]) -> None:
    there = [name for handle in _handles(pipe) for name in handle.features if name in features]
    if there:
        raise SettingError(
            f"This {type(pipe).__name__} has {there[0]}= from an earlier attach(). Take that off first with "
            "samovar.detach(pipe), or replace it with attach(pipe, ..., replace=True).",
            param=there[0],
        )
