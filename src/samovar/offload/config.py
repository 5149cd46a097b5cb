"""The settings of offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ..arch.devices import read_device
from ..core.errors import SettingError, nearest
from ..core.settings import (
    FLAG,
    FOLDER,
    NAMES,
    SIZE,
    Kind,
    Settings,
    choice,
    count,
    number,
    parse_bytes,
    setting,
    settings_of,
)
from ..trace.dry_run import RequestSize
from .streaming import Timing

Mode = Literal["auto", "model", "layerwise"]
Compress = Literal["auto", "lossless", "none"]
Size = str | int
"""A number of bytes, or text such as "12GiB"."""


def _read_device(device: Any) -> Any:
    if read_device(device).type not in ("cuda", "cpu"):
        raise ValueError
    return device


def _read_activations(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return parse_bytes(value, "activations")
    # Measured ones may be a few bytes, which are no slip of the pen.
    return {name: size if type(size) is int and size >= 0 else parse_bytes(size, "activations")
            for name, size in value.items()}  # fmt: skip


@dataclass(frozen=True)
class OffloadConfig(Settings, param="offload"):
    """How a pipeline is offloaded."""

    mode: Mode = setting(
        "auto",
        choice(Mode),
        '"auto" offloads as little as `gpu_memory` requires. "model": denoisers and encoders take turns on the device. '
        '"layerwise": their blocks stream.',
    )
    gpu_memory: Size | None = setting(
        None, SIZE, 'Budget of device memory, such as "12GiB". "auto" takes all that is free by default.'
    )
    device: str | torch.device | None = setting(
        None,
        Kind("'cuda' or 'cpu'", _read_device),
        'Where the pipeline computes; a GPU if there is one. With "cpu", host memory simulates the device.',
    )
    activations: Size | Mapping[str, Size] | None = setting(
        None,
        Kind("a size, or sizes by component", _read_activations, metavar="SIZE"),
        "Memory that a component needs beside its weights, for all components or by name. By default it is counted in "
        "a run without weights at the size below, with a margin. See `Offloaded.measure`.",
    )
    height: int | None = setting(
        None, count(1), "Pixels of the largest request that will be made. By default the pipeline's default size."
    )
    width: int | None = setting(None, count(1), "Likewise.")
    frames: int | None = setting(None, count(1), "Likewise, for videos.")
    batch: int | None = setting(None, count(1), "Likewise, images or videos per request.")
    steps: int | None = setting(
        None,
        count(1),
        "Steps of a run, for which it is decided whether layers are computed ahead. By default those of the last call, "
        "or the pipeline's.",
    )
    host_memory: Size | None = setting(
        None,
        SIZE,
        "Budget of host memory for weights, pinned or not. What is over it is read from the model's files again. By "
        "default, 85 % of the memory may be pinned. Weights that are in no file must fit.",
    )
    exclude: tuple[str, ...] = setting(
        (), NAMES, "Names of components that stay where they are, as a list or with commas."
    )
    timing: Timing | None = setting(
        None, settings_of(Timing), "Known speeds of bus and model. By default the bus is measured."
    )
    compress: Compress = setting(
        "auto",
        choice(Compress),
        '"lossless": 16-bit weights cross the bus in about 0.7 of their bytes and are decoded on the device, bit for '
        'bit. "auto" does so for components that stream to a GPU that has Triton. "none": all cross as they are.',
    )
    figures: str | Path | None = setting(
        None,
        Kind("a folder, or 'none'", lambda value: value if value == "none" else FOLDER.read(value), metavar="FOLDER"),
        "A folder that keeps what runs have shown: memory that components need, times, the order of calls. The next "
        "process plans with it. By default ~/.cache/samovar/offload for GPUs, or where XDG_CACHE_HOME says; 'none' "
        "keeps nothing.",
    )
    precompute: bool | None = setting(
        None,
        FLAG,
        "Whether layers that depend on time alone are computed ahead of the steps and kept off the device. By default "
        "they are where not everything fits.",
    )
    graphs: bool = setting(
        False,
        FLAG,
        "Whether forwards of denoisers whose blocks do not stream are recorded as graphs, which takes as much memory "
        'as their activations once more. `attach(compile="graphs")` says so.',
    )
    skipped: float = setting(
        0.0,
        number(0, 1, below=True),
        "The expected share of denoiser forwards that a cache skips. These load nothing.",
    )

    @property
    def size(self) -> RequestSize:
        """What will be asked of the pipeline."""
        return RequestSize(self.height, self.width, self.frames, self.batch)

    @classmethod
    def from_name(cls, name: str) -> OffloadConfig:
        if name not in get_args(Mode):
            raise SettingError(f"offload={name!r}. {nearest(name, get_args(Mode))}", param="offload")
        return cls(mode=name)  # type: ignore[arg-type]

    @classmethod
    def refusal(cls, value: Any) -> SettingError:
        if value is True:
            return SettingError("offload=True does not say how. Use 'auto', 'model' or 'layerwise'.", param="offload")
        return super().refusal(value)
