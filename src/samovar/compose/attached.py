"""What is on the pipeline, and how does it come off again? `attach(pipe, ...) -> Attached`.

Everything is checked before anything is changed, and whatever fails half-way is undone. What one feature must know of
another it is told here: a cache asks all ranks before it decides, and the planner of an offload knows what is skipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..arch import find_denoisers
from ..cache import CacheBackend, TeaCacheBackend
from ..offload import Offloaded, OffloadStats, prepare_offload
from ..parallel import (
    ParallelMesh,
    SequenceParallelConfig,
    apply_cfg_parallel,
    enable_sequence_parallel_for_model,
    make_mesh,
    sharding_of,
)
from .config import AttachConfig, Compiler, OffloadMode, skipped_share
from .explain import Explanation, explain
from .peers import Peer, check_peers
from .regional import Regions, compile_regions, find_regions


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
        self.cache: CacheBackend | None = config.make_cache(None)
        self.offloaded: Offloaded | None = None
        self.mesh: ParallelMesh | None = None
        self.denoisers: dict[str, torch.nn.Module] = {}
        self.regions: Regions = {}
        self.peers: list[Peer] = []
        self._pipe = pipe
        self._undo = contextlib.ExitStack()
        self._check()
        with contextlib.ExitStack() as undo:
            self._apply(undo)
            self._undo = undo.pop_all()

    def _check(self) -> None:
        """All that can be refused or decided while nothing is changed."""
        config = self.config
        if self.cache is not None or config.num_ranks > 1 or config.compiles:
            self.denoisers = find_denoisers(self._pipe)
            self.peers = check_peers(self.denoisers, config, caches=self.cache is not None)
        if config.num_ranks > 1:
            degrees = config.parallel or SequenceParallelConfig()
            self.mesh = make_mesh(replace(degrees, cfg_parallel_size=config.cfg_parallel))
            self.cache = config.make_cache(self.mesh)
        if config.compiles:
            self.regions = find_regions(self.denoisers)
        if config.offloads:
            self.offloaded = prepare_offload(self._pipe, config.offload_config(skipped_share(self.cache)))

    def _apply(self, undo: contextlib.ExitStack) -> None:
        """In a fixed order. Hooks have an order of their own, so this one is only of cost: offload moves all weights,
        and comes when nothing else can be refused any more."""
        config = self.config
        if self.mesh is not None:
            for denoiser in self.denoisers.values():
                undo.callback(apply_cfg_parallel(denoiser, self.mesh).detach)
                wish = config.parallel or SequenceParallelConfig()
                undo.callback(enable_sequence_parallel_for_model(denoiser, wish, mesh=self.mesh).detach)
        if self.cache is not None:
            self.cache.enable(self._pipe)
            undo.callback(self.cache.disable, self._pipe)
        if self.regions:
            undo.callback(compile_regions(self.regions, None if isinstance(config.compile, bool) else config.compile))
        if self.offloaded is not None:
            self.offloaded.start()
            undo.callback(self.offloaded.remove)

    def stats(self) -> AttachedStats:
        """What was done so far."""
        found = {name: sharding_of(denoiser) for name, denoiser in self.denoisers.items()} if self.mesh else {}
        return AttachedStats(
            None if self.cache is None else self.cache.stats(),
            None if self.offloaded is None else self.offloaded.stats(),
            self.config.num_ranks,
            {name: sharding.source for name, sharding in found.items() if sharding is not None},
        )

    def explain(self) -> Explanation:
        """What is attached where, in which order, and why. Print it, or take `to_dict()`."""
        return explain(
            self._pipe,
            self.config,
            cache=self.cache,
            offloaded=self.offloaded,
            regions=self.regions,
            peers=self.peers,
            sharding=self.stats().sharding,
        )

    @contextlib.contextmanager
    def exactly(self) -> Iterator[None]:
        """Runs inside are computed whole, whatever the cache would skip."""
        with contextlib.ExitStack() as undo:
            if isinstance(self.cache, TeaCacheBackend):
                undo.enter_context(self.cache.paused())
            elif self.cache is not None:
                self.cache.disable(self._pipe)
                undo.callback(self.cache.enable, self._pipe)
            yield

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
    cache_config: Mapping[str, Any] | str | Path | None = None,
    offload: OffloadMode | None = None,
    gpu_memory: str | int | None = None,
    parallel: SequenceParallelConfig | None = None,
    cfg_parallel: int = 1,
    compile: Compiler = False,
    device: str | torch.device | None = None,
) -> Attached:
    """Put features on a pipeline, or on a denoiser alone; the settings are those of `AttachConfig`. With several
    ranks, every one of them calls this with a copy of the pipeline."""
    config = AttachConfig(cache, cache_config, offload, gpu_memory, parallel, cfg_parallel, compile, device)
    return Attached(pipe, config)
