"""The settings of `attach`, checked as far as possible without a pipeline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from ..cache import AutoConfig, CacheChoice, CacheSetting, TeaCacheConfig
from ..core.errors import SettingError, nearest
from ..core.settings import FLAG, Kind, Settings, kind, setting, settings_of
from ..graphs import GraphsConfig
from ..offload import OffloadConfig
from ..parallel import SequenceParallelConfig
from .attention import OF_TORCH, read_attention

OffloadSetting = str | Path | OffloadConfig | Mapping[str, Any] | Literal[False] | None
ParallelSetting = str | Path | SequenceParallelConfig | Mapping[str, Any] | Literal[False] | None
CompileSetting = bool | str | GraphsConfig | Mapping[str, Any] | Callable[..., Any]
GRAPHS = "graphs"
OF_OFFLOAD = {"gpu_memory": "gpu_memory", "host_memory": "host_memory", "exclude": "exclude", "height": "height",
              "width": "width", "num_frames": "frames", "batch": "batch"}  # fmt: skip
"""Settings of `attach` that are settings of offload, and their names there."""
_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""What torch.compile calls its modes."""


def _read_compile(value: Any) -> Any:
    graphs = graphs_of(value)
    backend = value if graphs is None else graphs.blocks
    if isinstance(backend, str):
        _check_backend(backend)
    elif not isinstance(backend, bool) and not callable(backend):
        raise ValueError
    return value


_ATTENTION = Kind("a backend", lambda value: (read_attention(value), value)[1])
_COMPILE = Kind("True, False, 'graphs', or a backend of torch.compile such as 'inductor'", _read_compile)


@dataclass(frozen=True)
class AttachConfig(Settings, param="attach"):
    """The settings of `attach`, checked. The defaults attach nothing."""

    cache: CacheChoice | None = setting(
        None, kind("a CacheChoice", lambda value: isinstance(value, CacheChoice)), "Skips denoising steps."
    )
    offload: OffloadConfig | None = setting(
        None, settings_of(OffloadConfig), "Keeps weights off the GPU until they are needed."
    )
    parallel: SequenceParallelConfig = setting(
        SequenceParallelConfig, settings_of(SequenceParallelConfig), "Splits one image over several ranks."
    )
    compile: CompileSetting = setting(False, _COMPILE, "Replays forwards as graphs, or compiles blocks.")
    attention: str | None = setting(None, _ATTENTION, "A backend of diffusers' attention, by our name or theirs.")
    vae_tiling: bool | None = setting(
        None, FLAG, "Whether VAEs decode in tiles. By default if a budget of memory cannot be kept otherwise."
    )
    vae_slicing: bool | None = setting(
        None, FLAG, "Whether VAEs decode the images of a batch one after the other. Likewise."
    )
    vae_channels_last: bool = setting(False, FLAG, "Whether the weights of VAEs are laid out with their channels last.")
    compile_cache: str | Path | None = setting(
        None, kind("a folder", lambda value: isinstance(value, (str, Path))), "A folder that keeps compiled blocks."
    )

    @classmethod
    def of(
        cls,
        cache: CacheSetting = None,
        offload: OffloadSetting = None,
        parallel: ParallelSetting = None,
        tolerance: float | str | None = None,
        device: torch.device | None = None,
        **others: Any,
    ) -> AttachConfig:
        """Each setting of `attach` as a name, an object, a mapping or a file. `device` is where to compute if `offload`
        does not say."""
        given = {of: value for name, of in OF_OFFLOAD.items() if (value := others.pop(name, None)) not in (None, "")}
        degrees = SequenceParallelConfig() if _is_off(parallel) else SequenceParallelConfig.read(parallel)
        config, moves = cls(_read_cache(cache, tolerance), None, degrees, **others), _read_offload(offload, given)
        if moves is None:
            return config
        moves = replace(
            moves,
            device=moves.device or device,
            skipped=moves.skipped or skipped_share(config.cache) or 0.0,
            graphs=config.graphs is not None,
        )
        return replace(config, offload=moves)

    def check(self) -> None:
        if self.offload is not None and self.compiler == "cudagraphs":
            raise SettingError(
                "compile='cudagraphs' records the addresses of weights, and offload changes them. Use "
                "compile='graphs', which sees that, or no offload.",
                param="compile",
            )
        if self.compile_cache is not None and not self.compiles:
            raise SettingError(
                f"compile_cache={str(self.compile_cache)!r} keeps compiled blocks, and nothing is compiled. Give "
                "compile=True too, or leave it out.",
                param="compile_cache",
            )
        is_split, is_ring = self.parallel.sequence_parallel_size > 1, self.parallel.ring_degree > 1
        if self.attention and is_split and (is_ring or read_attention(self.attention) not in OF_TORCH):
            raise SettingError(
                f"attention={self.attention!r} cannot be used by {self.parallel.sequence_parallel_size} ranks that "
                "share a sequence. Those take torch's own kernels ('cudnn', 'torch_flash', 'efficient', 'math'), "
                "with ulysses_degree or allgather_degree; a ring has its own. Or use cfg_parallel_size.",
                param="attention",
            )
        ours = (AutoConfig, TeaCacheConfig)
        if self.num_ranks > 1 and self.cache is not None and not isinstance(self.cache.settings, ours):
            raise SettingError(
                f"The cache {self.cache.backend!r} cannot be used on {self.num_ranks} ranks: each rank would decide "
                "for itself and wait for the others forever. Use the cache 'auto' or 'tea_cache', or one rank.",
                param="cache",
            )

    def for_requests(self, **size: int | None) -> AttachConfig:
        """The same for requests of up to this size, where `offload` does not say another."""
        if self.offload is None:
            return self
        said = vars(self.offload.size)
        missing = {name: value for name, value in size.items() if said[name] is None}
        return replace(self, offload=replace(self.offload, **missing))  # type: ignore[arg-type]

    @functools.cached_property
    def graphs(self) -> GraphsConfig | None:
        """How forwards are replayed; None if they are not."""
        return graphs_of(self.compile)

    @property
    def compiler(self) -> Any:
        """The backend that compiles blocks; True for torch's default, False if they are not compiled."""
        return self.compile if self.graphs is None else self.graphs.blocks

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled."""
        return self.compiler is not False

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute one image."""
        return self.parallel.num_ranks


def skipped_share(choice: CacheChoice | None) -> float | None:
    """The share of forwards that a cache will skip; None if only the run can tell."""
    config = None if choice is None else choice.settings
    if isinstance(config, TeaCacheConfig) and config.masks:
        steps = list(itertools.chain.from_iterable(config.masks.values()))
        return steps.count(False) / len(steps)
    return 0.0 if choice is None or getattr(config, "never_skips", False) else None


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


def _read_offload(offload: OffloadSetting, given: Mapping[str, Any]) -> OffloadConfig | None:
    """The settings of offload, with those that were given beside it."""
    if _is_off(offload):
        if not given.keys() & {"gpu_memory", "host_memory"}:
            for name, value in given.items():
                raise SettingError(
                    f"{name}={value!r} is for offload, and there is none. Give offload or gpu_memory too.", param=name
                )
            return None
        offload = None
    config = OffloadConfig.read(offload)
    merged = replace(config, **given)
    for name in given:
        value, other = getattr(merged, name), getattr(config, name)
        if other not in (None, (), value):
            raise SettingError(
                f"{name}={value!r} contradicts {name}={other!r} in offload. Give one of them.", param=name
            )
    return merged


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


def _check_backend(name: str) -> None:
    if name in _MODES:
        instead = "compile='graphs', which replays CUDA graphs with the model's bits" if "reduce" in name else "True"
        raise SettingError(
            f"compile={name!r} is a mode of torch.compile, and compile takes a backend. Did you mean {instead}?",
            param="compile",
        )
    names = torch.compiler.list_backends(exclude_tags=())  # type: ignore[no-untyped-call, unused-ignore]
    if name not in names:
        raise SettingError(
            f"compile={name!r} is not a backend of torch.compile. {nearest(name, [*names, GRAPHS])} All: "
            "'graphs', and those of torch.compiler.list_backends().",
            param="compile",
        )
