"""How do a cache, offload and several ranks go on one pipeline together? `attach(pipe, ...)`.

Everything is checked before anything is changed, whatever fails half-way is undone, and what comes back is an
`Attached`: what was done so far, and the way back. What one feature must know of another it is told here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, get_args

import torch

from .arch import find_denoisers
from .cache import CacheBackend, TeaCacheBackend, make_cache_backend
from .errors import SettingError, nearest
from .offload import OffloadConfig, Offloaded, OffloadStats, apply_offload, parse_bytes
from .parallel import (
    ParallelMesh,
    SequenceParallelConfig,
    agreement,
    apply_cfg_parallel,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    make_mesh,
    remove_cfg_parallel,
    sharding_of,
)

OffloadMode = Literal["auto", "model", "layerwise"]


@dataclass(frozen=True)
class AttachConfig:
    """What is wished for, checked as far as it can be without a pipeline."""

    cache: str | None = None
    """A cache backend by name; None asks the environment, "none" is no cache."""
    cache_config: Mapping[str, Any] | None = None
    offload: OffloadMode | None = None
    gpu_memory: str | int | None = None
    """The most that may be used on the device; alone it means offload="auto"."""
    parallel: SequenceParallelConfig | None = None
    cfg_parallel: int = 1
    """Ranks that share the branches of the guidance."""
    device: str | torch.device | None = None
    """Where an offloaded pipeline computes; a GPU if there is one."""

    def __post_init__(self) -> None:
        if self.offload is not None and self.offload not in get_args(OffloadMode):
            raise SettingError(f"offload is {self.offload!r}. {nearest(str(self.offload), get_args(OffloadMode))}")
        if self.gpu_memory is not None:
            parse_bytes(self.gpu_memory, "gpu_memory")
        if self.device is not None and not self.offloads:
            raise SettingError(
                f"device={str(self.device)!r} is where an offloaded pipeline computes, and offload is None. Move the "
                "pipeline itself, pipe.to(device), or choose an offload."
            )
        _check_device(self.device)
        if self.parallel is not None and not isinstance(self.parallel, SequenceParallelConfig):
            raise SettingError(f"parallel is {self.parallel!r}; a SequenceParallelConfig was expected.")
        if type(self.cfg_parallel) is not int or self.cfg_parallel < 1:
            raise SettingError(f"cfg_parallel is {self.cfg_parallel!r}; a number of ranks from 1 on was expected.")
        self.make_cache(None)

    @property
    def offloads(self) -> bool:
        return self.offload is not None or self.gpu_memory is not None

    @property
    def num_ranks(self) -> int:
        """How many ranks make one picture."""
        return self.cfg_parallel * (self.parallel or SequenceParallelConfig()).sequence_parallel_size

    def make_cache(self, mesh: ParallelMesh | None) -> CacheBackend | None:
        """A cache backend that decides alike on all ranks."""
        backend = make_cache_backend(self.cache, self.cache_config)
        if backend is None or self.num_ranks == 1:
            return backend
        if type(backend) is not TeaCacheBackend:
            raise SettingError(
                f"{type(backend).__name__} cannot be used on {self.num_ranks} ranks: each would decide for itself, and "
                "wait for the others for ever. Use the cache 'tea_cache' or 'forecast', or one rank."
            )
        return TeaCacheBackend(backend.config, agreement(mesh)) if mesh is not None else backend


@dataclass(frozen=True)
class AttachedStats:
    """What was done so far; None for what is not attached."""

    cache: Any = None
    """The `stats()` of the cache, of the most recent run."""
    offload: OffloadStats | None = None
    num_ranks: int = 1
    sharding: Mapping[str, str] = field(default_factory=dict)
    """By denoiser: where the plan is from by which its sequence is split; empty before the first forward."""


class Attached:
    """A pipeline with features on it; `detach` takes them off."""

    def __init__(self, pipe: Any, config: AttachConfig) -> None:
        self.config = config
        self.cache: CacheBackend | None = None
        self.offloaded: Offloaded | None = None
        self.mesh: ParallelMesh | None = None
        self._denoisers: dict[str, torch.nn.Module] = {}
        self._undo = contextlib.ExitStack()
        if config.num_ranks > 1:
            self._denoisers = find_denoisers(pipe)
            self.mesh = make_mesh(config.parallel or SequenceParallelConfig(), config.cfg_parallel)
        self.cache = config.make_cache(self.mesh)
        with contextlib.ExitStack() as undo:
            self._apply(pipe, undo)
            self._undo = undo.pop_all()

    def _apply(self, pipe: Any, undo: contextlib.ExitStack) -> None:
        """In a fixed order. Hooks have an order of their own, so this one is only of cost: offload moves all weights,
        and comes when nothing else can be refused any more."""
        if self.mesh is not None:
            for denoiser in self._denoisers.values():
                if apply_cfg_parallel(denoiser, self.mesh) is not None:
                    undo.callback(remove_cfg_parallel, denoiser)
                config = self.config.parallel or SequenceParallelConfig()
                if enable_sequence_parallel_for_model(denoiser, config, mesh=self.mesh) is not None:
                    undo.callback(disable_sequence_parallel_for_model, denoiser)
        if self.cache is not None:
            self.cache.enable(pipe)
            undo.callback(self.cache.disable, pipe)
        if self.config.offloads:
            wish = OffloadConfig(
                mode=self.config.offload or "auto", gpu_memory=self.config.gpu_memory, device=self.config.device
            )
            self.offloaded = apply_offload(pipe, wish)
            undo.callback(self.offloaded.remove)

    def stats(self) -> AttachedStats:
        """What was done so far."""
        found = {name: sharding_of(denoiser) for name, denoiser in self._denoisers.items()}
        return AttachedStats(
            None if self.cache is None else self.cache.stats(),
            None if self.offloaded is None else self.offloaded.stats(),
            self.config.num_ranks,
            {name: sharding.source for name, sharding in found.items() if sharding is not None},
        )

    def detach(self) -> None:
        """Take everything off: the pipeline is what it was. What is off already stays so."""
        self._undo.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def attach(
    pipe: Any,
    cache: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    offload: OffloadMode | None = None,
    gpu_memory: str | int | None = None,
    parallel: SequenceParallelConfig | None = None,
    cfg_parallel: int = 1,
    device: str | torch.device | None = None,
) -> Attached:
    """Put features on a pipeline, or on a denoiser alone; the settings are those of `AttachConfig`. With several
    ranks, every one of them calls this with a copy of the pipeline."""
    return Attached(pipe, AttachConfig(cache, cache_config, offload, gpu_memory, parallel, cfg_parallel, device))


def _check_device(device: str | torch.device | None) -> None:
    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError as error:
        raise SettingError(f"device is {device!r}. Give cuda, cuda:1 for the second GPU, or cpu.") from error
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not torch.cuda.is_available()):
        raise SettingError(f"device={str(device)!r} cannot be used for offload: a GPU that is here, or cpu, can.")
