"""What may `attach` be asked for? Every setting, checked as far as possible without a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..cache import AutoConfig, CacheChoice, CacheSetting, TeaCacheConfig
from ..core.errors import SettingError, nearest
from ..graphs import GraphsConfig
from ..offload import OffloadConfig
from ..parallel import SequenceParallelConfig
from .attention import OF_TORCH, read_attention

OffloadSetting = str | Path | OffloadConfig | Mapping[str, Any] | Literal[False] | None
ParallelSetting = str | Path | SequenceParallelConfig | Mapping[str, Any] | Literal[False] | None
CompileSetting = bool | str | GraphsConfig | Mapping[str, Any] | Callable[..., Any]
GRAPHS = "graphs"


@dataclass(frozen=True)
class AttachConfig:
    """The settings of `attach`, checked. The defaults attach nothing."""

    cache: CacheChoice | None = None
    offload: OffloadConfig | None = None
    parallel: SequenceParallelConfig = field(default_factory=SequenceParallelConfig)
    compile: CompileSetting = False
    attention: str | None = None
    """A backend of diffusers' attention, by our name or theirs."""
    vae_tiling: bool | None = None
    """Whether VAEs decode in tiles. None: if a budget of memory cannot be kept otherwise."""
    vae_slicing: bool | None = None
    """Whether VAEs decode the images of a batch one after the other. None: if a budget cannot be kept otherwise."""
    vae_channels_last: bool = False
    """Whether the weights of VAEs are laid out with their channels last."""
    compile_cache: str | Path | None = None
    """A folder that keeps compiled blocks for later processes."""

    @classmethod
    def read(
        cls,
        cache: CacheSetting = None,
        offload: OffloadSetting = None,
        parallel: ParallelSetting = None,
        compile: CompileSetting = False,
        attention: str | None = None,
        vae_tiling: bool | None = None,
        vae_slicing: bool | None = None,
        vae_channels_last: bool = False,
        compile_cache: str | Path | None = None,
        gpu_memory: str | int | None = None,
        host_memory: str | int | None = None,
        exclude: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        batch: int | None = None,
        device: torch.device | None = None,
        tolerance: float | str | None = None,
        is_alone: bool = True,
    ) -> AttachConfig:
        """Each setting as a name, an object, a mapping or a file. `device` is where to compute if `offload` does not
        say. Unless `is_alone`, other processes load the same model."""
        choice, degrees = _read_cache(cache, tolerance), _read_parallel(parallel)
        size = {"height": height, "width": width, "frames": num_frames, "batch": batch}
        moves = _read_offload(offload, {"gpu_memory": gpu_memory, "host_memory": host_memory}, size, exclude)
        if moves is not None:
            shares = degrees.num_ranks > 1 or not is_alone if moves.share is None else moves.share
            skipped = moves.skipped or skipped_share(choice) or 0.0
            graphs = graphs_of(compile) is not None
            moves = replace(moves, device=moves.device or device, skipped=skipped, share=shares, graphs=graphs)
        return cls(
            choice, moves, degrees, compile, attention, vae_tiling, vae_slicing, vae_channels_last, compile_cache
        )

    def __post_init__(self) -> None:
        _check_compile(self.compile, offloads=self.offload is not None)
        for name in ("vae_tiling", "vae_slicing", "vae_channels_last"):
            if getattr(self, name) not in (None, True, False) or type(getattr(self, name)) is int:
                raise SettingError(f"{name}={getattr(self, name)!r}; expected True or False.", param=name)
        if self.compile_cache is not None and not self.compiles:
            raise SettingError(
                f"compile_cache={str(self.compile_cache)!r} keeps compiled blocks, and nothing is compiled. Give "
                "compile=True too, or leave it out.",
                param="compile_cache",
            )
        if self.attention is not None:
            is_torchs, splits = read_attention(self.attention) in OF_TORCH, self.parallel.sequence_parallel_size > 1
            if splits and (not is_torchs or self.parallel.ring_degree > 1):
                raise SettingError(
                    f"attention={self.attention!r} cannot be used by {self.parallel.sequence_parallel_size} ranks that "
                    "share a sequence. Those take torch's own kernels ('cudnn', 'torch_flash', 'efficient', 'math'), "
                    "with ulysses_degree or allgather_degree; a ring has its own. Or use cfg_parallel_size.",
                    param="attention",
                )
        if self.cache is None or self.num_ranks == 1:
            return
        config = self.cache.settings
        if not isinstance(config, (AutoConfig, TeaCacheConfig)):
            raise SettingError(
                f"The cache {self.cache.backend!r} cannot be used on {self.num_ranks} ranks: each rank would decide "
                "for itself and wait for the others forever. Use the cache 'auto' or 'tea_cache', or one rank.",
                param="cache",
            )
        if self.parallel.cfg_parallel_size > 1 and getattr(config, "outliers", None) is not None:
            raise SettingError(
                "The cache's setting 'outliers' looks at one branch to decide for all, and cfg_parallel_size="
                f"{self.parallel.cfg_parallel_size} puts the branches on different ranks. Leave out one of the two.",
                param="cache",
            )

    def for_requests(self, **size: int | None) -> AttachConfig:
        """The same for requests of up to this size, where `offload` does not say another."""
        if self.offload is None:
            return self
        said = vars(self.offload.size)
        missing = {name: value for name, value in size.items() if said[name] is None}
        return replace(self, offload=replace(self.offload, **missing))  # type: ignore[arg-type]

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled."""
        return (self.compile if self.graphs is None else self.graphs.blocks) is not False

    @property
    def compiler(self) -> str | Callable[..., Any] | None:
        """The backend that compiles blocks; None for torch's default."""
        value: Any = self.compile if self.graphs is None else self.graphs.blocks
        return None if isinstance(value, bool) else value

    @functools.cached_property
    def graphs(self) -> GraphsConfig | None:
        """How forwards are replayed; None if they are not."""
        return graphs_of(self.compile)

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute one image."""
        return self.parallel.num_ranks


def skipped_share(choice: CacheChoice | None) -> float | None:
    """The share of forwards that a cache will skip; None if only the run can tell."""
    if choice is None:
        return 0.0
    config = choice.settings
    if not isinstance(config, TeaCacheConfig):
        return 0.0 if isinstance(config, AutoConfig) and config.never_skips else None
    masks = list(config.masks.values())
    if masks:
        return sum(mask.count(False) for mask in masks) / sum(map(len, masks))
    return 0.0 if config.never_skips else None


def _read_cache(cache: CacheSetting, tolerance: float | str | None) -> CacheChoice | None:
    if tolerance is None:
        return CacheChoice.read(cache)
    choice = CacheChoice.read(True if cache is None else cache)
    if choice is None or not isinstance(choice.settings, AutoConfig):
        raise SettingError(
            f"tolerance={tolerance!r} is for the cache 'auto', and cache={cache!r:.200} is another or none. Leave out "
            "one of them.",
            param="tolerance",
        )
    return replace(choice, settings=replace(choice.settings, tolerance=tolerance))


def _is_off(value: Any) -> bool:
    return value is None or value is False or value == "none"


def _read_offload(
    offload: OffloadSetting,
    budgets: Mapping[str, str | int | None],
    size: Mapping[str, int | None],
    exclude: str | Sequence[str] | None,
) -> OffloadConfig | None:
    given: dict[str, Any] = {name: budget for name, budget in budgets.items() if budget is not None}
    of_offload = {name: value for name, value in size.items() if value is not None}
    if _is_off(offload):
        if not given:
            for name, value in (*of_offload.items(), *([("exclude", exclude)] if exclude else ())):
                raise SettingError(
                    f"{name}={value!r} is for offload, and there is none. Give offload or gpu_memory too.", param=name
                )
            return None
        offload = None
    if exclude:
        given["exclude"] = OffloadConfig(exclude=exclude).exclude  # type: ignore[arg-type]
    given |= of_offload
    config = OffloadConfig.read(offload)
    for name, budget in given.items():
        other = getattr(config, name)
        if other not in (None, (), budget):
            raise SettingError(
                f"{name}={budget!r} contradicts {name}={other!r} in offload. Give one of them.", param=name
            )
    return replace(config, **given)


def _read_parallel(parallel: ParallelSetting) -> SequenceParallelConfig:
    return SequenceParallelConfig() if _is_off(parallel) else SequenceParallelConfig.read(parallel)


def graphs_of(value: CompileSetting) -> GraphsConfig | None:
    """The settings of graphs, such as {"backend": "graphs", "max_graphs": 8}; None if something else is asked for."""
    if isinstance(value, GraphsConfig):
        return value
    if not isinstance(value, Mapping):
        return GraphsConfig() if isinstance(value, str) and value == GRAPHS else None
    settings = dict(value)
    if settings.pop("backend", None) != GRAPHS:
        raise SettingError(
            f"compile={dict(value)!r}; expected settings of graphs, such as {{'backend': 'graphs', 'max_graphs': 8}}.",
            param="compile",
        )
    return GraphsConfig.read(settings)


def _check_compile(value: Any, *, offloads: bool) -> None:
    graphs = graphs_of(value)
    if graphs is not None:
        if isinstance(graphs.blocks, str):
            _check_compile(graphs.blocks, offloads=offloads)
    elif isinstance(value, str) and value != GRAPHS:
        known: Any = torch.compiler.list_backends  # type: ignore[no-untyped-call, unused-ignore]
        names = known(exclude_tags=())
        if value not in names:
            raise SettingError(
                f"compile={value!r} is not a backend of torch.compile. {nearest(value, [*names, GRAPHS])} All: "
                "'graphs', and those of torch.compiler.list_backends().",
                param="compile",
            )
        if value == "cudagraphs" and offloads:
            raise SettingError(
                "compile='cudagraphs' records the addresses of weights, and offload changes them. Use "
                "compile='graphs', which sees that, or no offload.",
                param="compile",
            )
    elif not isinstance(value, (bool, str)) and not callable(value):
        raise SettingError(
            f"compile={value!r}; expected True, False, 'graphs', or a backend of torch.compile such as 'inductor'.",
            param="compile",
        )
