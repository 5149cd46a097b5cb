"""What can a user set? Everything is checked when the settings are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ..arch.devices import read_device
from ..core.errors import SettingError, nearest
from ..core.files import brief, is_file_name, is_folder, read_config
from ..trace.rehearse import RequestSize
from .sizes import parse_bytes
from .streaming import Timing

Mode = Literal["auto", "model", "layerwise"]
Compress = Literal["auto", "lossless", "none"]
Size = str | int
"""A number of bytes, or text such as "12GiB"."""


@dataclass(frozen=True)
class OffloadConfig:
    """How a pipeline is offloaded."""

    mode: Mode = "auto"
    """"auto" offloads as little as `gpu_memory` requires. "model": denoisers and encoders take turns on the device.
    "layerwise": their blocks stream."""
    gpu_memory: Size | None = None
    """Budget of device memory. "auto" takes all that is free by default."""
    device: str | torch.device | None = None
    """Where the pipeline computes; a GPU if there is one. With "cpu", host memory simulates the device."""
    activations: Size | Mapping[str, Size] | None = None
    """Memory that a component needs beside its weights, for all components or by name. By default it is counted in a
    run without weights at the size below, with a margin. See `Offloaded.measure`."""
    height: int | None = None
    """Pixels of the largest request that will be made; the pipeline's default size if nothing is said."""
    width: int | None = None
    """Likewise."""
    frames: int | None = None
    """Likewise, for videos."""
    batch: int | None = None
    """Likewise, images or videos per request."""
    host_memory: Size | None = None
    """Budget of host memory for weights, pinned or not. What is over it is read from the model's files again. By
    default, 85 % of the memory may be pinned."""
    spill_folder: str | Path | None = None
    """Where to write weights that are over `host_memory` and in no file. Without it they are refused."""
    share: bool | None = None
    """Whether processes on this machine that read the same files share one pinned copy, in /dev/shm. By default, the
    ranks that compute one image and the replicas of one server do."""
    exclude: tuple[str, ...] = ()
    """Names of components that stay where they are, as a list or with commas."""
    timing: Timing | None = None
    """Known speeds of bus and model; by default the bus is measured."""
    compress: Compress = "auto"
    """"lossless": 16-bit weights cross the bus in about 0.7 of their bytes and are decoded on the device, bit for bit.
    "auto" does so for components that stream to a GPU that has Triton. "none": all cross as they are."""
    compress_cache: str | Path | None = None
    """A folder that keeps coded weights, so that they need not be coded again by the next process."""
    precompute: bool | None = None
    """Whether layers that depend on time alone are computed ahead of the steps and kept off the device. By default they
    are where not everything fits."""
    graphs: bool = False
    """Whether forwards of denoisers whose blocks do not stream are recorded as graphs, which takes as much memory as
    their activations once more. `attach(compile="graphs")` says so."""
    skipped: float = 0.0
    """The expected share of denoiser forwards that a cache skips. These load nothing."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise SettingError(f"mode={self.mode!r}. {nearest(str(self.mode), get_args(Mode))}", param="mode")
        if self.compress not in get_args(Compress):
            known = get_args(Compress)
            raise SettingError(f"compress={self.compress!r}. {nearest(str(self.compress), known)}", param="compress")
        parse_bytes(self.gpu_memory, "gpu_memory")
        parse_bytes(self.host_memory, "host_memory")
        for param, folder in (("spill_folder", self.spill_folder), ("compress_cache", self.compress_cache)):
            if folder is not None and not is_folder(folder):
                raise SettingError(
                    f"{param}={brief(str(folder))} is not a folder. Make it, on a disk with room for the weights.",
                    param=param,
                )
        by_name = self.activations if isinstance(self.activations, Mapping) else {"": self.activations}
        for value in by_name.values():
            parse_bytes(value, "activations")
        _ = self.size
        device = read_device(self.device)
        if device.type not in ("cuda", "cpu"):
            raise SettingError(
                f"device={str(device)!r} cannot be used for offload: use 'cuda' or 'cpu'.", param="device"
            )
        if not isinstance(self.skipped, (int, float)) or not 0.0 <= self.skipped < 1.0:
            raise SettingError(f"skipped={self.skipped!r}; expected a fraction from 0 to below 1.", param="skipped")
        if self.precompute not in (None, True, False):
            raise SettingError(f"precompute={self.precompute!r}; expected True, False or None.", param="precompute")
        exclude = self.exclude.split(",") if isinstance(self.exclude, str) else self.exclude
        if not isinstance(exclude, Sequence) or not all(isinstance(name, str) for name in exclude):
            raise SettingError(f"exclude={exclude!r}; expected names of components.", param="exclude")
        object.__setattr__(self, "exclude", tuple(name.strip() for name in exclude))
        if self.timing is not None:
            object.__setattr__(self, "timing", read_config(Timing, self.timing, "timing"))

    @property
    def size(self) -> RequestSize:
        """What will be asked of the pipeline."""
        return RequestSize(self.height, self.width, self.frames, self.batch)

    @classmethod
    def read(cls, value: OffloadConfig | str | Path | Mapping[str, Any] | None) -> OffloadConfig:
        """Settings from a mode's name, a mapping, or a JSON or YAML file; None means the defaults."""
        if value is None or (isinstance(value, str) and not is_file_name(value)):
            if value not in (None, *get_args(Mode)):
                raise SettingError(f"offload={value!r}. {nearest(str(value), get_args(Mode))}", param="offload")
            return cls(mode=value or "auto")  # type: ignore[arg-type]
        if value is True:  # type: ignore[comparison-overlap]
            raise SettingError("offload=True does not say how. Use 'auto', 'model' or 'layerwise'.", param="offload")
        return read_config(cls, value, "offload")
