"""What is wished for? Every setting of `attach`, checked as far as it can be without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ..cache import CacheBackend, TeaCacheBackend, make_cache_backend
from ..errors import SettingError, nearest
from ..offload import OffloadConfig, parse_bytes
from ..parallel import ParallelMesh, SequenceParallelConfig, agreement

OffloadMode = Literal["auto", "model", "layerwise"]
Compiler = bool | str | Callable[..., Any]


@dataclass(frozen=True)
class AttachConfig:
    """A cache, an offload, ranks and a compiler for one pipeline; what is left as it is changes nothing."""

    cache: str | None = None
    """A cache backend by name; None asks the environment, "none" is no cache."""
    cache_config: Mapping[str, Any] | str | Path | None = None
    """Its settings, or a file in which `samovar tune` saved them."""
    offload: OffloadMode | None = None
    gpu_memory: str | int | None = None
    """The most that may be used on the device; alone it means offload="auto"."""
    parallel: SequenceParallelConfig | None = None
    cfg_parallel: int = 1
    """Ranks that share the branches of the guidance."""
    compile: Compiler = False
    """Whether the denoisers' blocks are compiled; a backend of torch.compile by name, or a function, is used in place
    of torch's usual one."""
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
        self._check_compiler()
        self.make_cache(None)

    @property
    def offloads(self) -> bool:
        return self.offload is not None or self.gpu_memory is not None

    @property
    def compiles(self) -> bool:
        return self.compile is not False

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
        if self.cfg_parallel > 1 and backend.config.hard is not None:
            raise SettingError(
                "The cache's setting 'hard' looks at one branch to decide for all, and cfg_parallel="
                f"{self.cfg_parallel} puts branches on ranks of their own. Leave one of the two out."
            )
        return TeaCacheBackend(backend.config, agreement(mesh)) if mesh is not None else backend

    def offload_config(self, skipped: float | None) -> OffloadConfig:
        """What offload is to do, knowing what a cache will skip."""
        return OffloadConfig(
            mode=self.offload or "auto", gpu_memory=self.gpu_memory, device=self.device, skipped=skipped or 0.0
        )

    def _check_compiler(self) -> None:
        if isinstance(self.compile, str):
            known: Any = torch.compiler.list_backends  # type: ignore[no-untyped-call, unused-ignore]
            names = known(exclude_tags=())
            if self.compile not in names:
                raise SettingError(
                    f"compile={self.compile!r} is no backend of torch.compile. {nearest(self.compile, names)}"
                )
            if self.compile == "cudagraphs" and self.offloads:
                raise SettingError(
                    "compile='cudagraphs' keeps the addresses of weights, and offload changes them. Use compile=True, "
                    "or no offload."
                )
        elif not isinstance(self.compile, bool) and not callable(self.compile):
            raise SettingError(
                f"compile is {self.compile!r}; True, False or a backend of torch.compile such as 'inductor' was "
                "expected."
            )


def skipped_share(cache: CacheBackend | None) -> float | None:
    """The share of forwards that a cache will skip; None where that shows in the run only."""
    if cache is None:
        return 0.0
    if not isinstance(cache, TeaCacheBackend):
        return None
    masks = list(cache.config.masks.values())
    if masks:  # One for all branches, or one for each.
        return sum(mask.count(False) for mask in masks) / sum(map(len, masks))
    return 0.0 if cache.config.never_skips else None


def _check_device(device: str | torch.device | None) -> None:
    try:
        kind = torch.device(device or "cpu").type
    except RuntimeError as error:
        raise SettingError(f"device is {device!r}. Give cuda, cuda:1 for the second GPU, or cpu.") from error
    if kind not in ("cuda", "cpu") or (kind == "cuda" and not torch.cuda.is_available()):
        raise SettingError(f"device={str(device)!r} cannot be used for offload: a GPU that is here, or cpu, can.")
