"""Which model is run, where, and with what on it? Every setting, checked before any weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..aliases import accept_aliases
from ..errors import SettingError, nearest
from .models import find_model
from .sources import gather, read_bool, read_name_or_json

if TYPE_CHECKING:
    import torch

    from ..compose import AttachConfig, CacheSetting, OffloadSetting, ParallelSetting

_DTYPES = ("auto", "float32", "bfloat16", "float16")


@accept_aliases
@dataclass(frozen=True)
class OmniDiffusionConfig:
    """What is wished for: all settings of `Omni` and `AsyncOmni`."""

    model: str = "emoji"
    """One that comes with Samovar, a folder in diffusers format, or a name of the hub."""
    dtype: str = "auto"
    device: str | None = None
    progress: bool = True
    """Whether a bar is shown on a terminal."""
    trust_remote_code: bool = False
    """Whether Python files that come with the model may be run."""
    cache: CacheSetting = None
    """The cache: a backend's name, a TeaCacheConfig, a mapping of settings, or a file saved by `samovar tune`."""
    offload: OffloadSetting = None
    """CPU offload: "auto", "model" or "layerwise", an OffloadConfig, a mapping or a file."""
    gpu_memory: str | int | None = None
    """GPU memory budget, such as "12GiB". Alone it offloads as little as the budget demands."""
    parallel: ParallelSetting = None
    """Ranks that share one image: a SequenceParallelConfig, a mapping or a file. One process is started per rank."""
    compile: bool = False
    """Whether to compile the denoiser's blocks. The first image takes longer, perhaps longer than `step_timeout_s`."""
    max_batch: int = 1
    """The most pictures that are made at once; above 1 they may differ in the last bits from those made alone."""
    max_queue: int = 16
    """The most requests that wait in AsyncOmni."""
    step_timeout_s: float = 60.0
    """How long AsyncOmni waits for a step before it takes a worker for hung."""
    load_timeout_s: float = 1800.0
    """How long it waits for the model to be loaded."""

    @classmethod
    def read(cls, settings: Mapping[str, Any], file: str | Path | None = None) -> OmniDiffusionConfig:
        """These settings, then those of a file, then those of the environment."""
        return cls(**gather(settings, file, {field.name: _reader(field.type) for field in fields(cls)}))

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.dtype not in _DTYPES:
            hint = nearest(str(self.dtype), _DTYPES)
            raise SettingError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}. {hint}")
        find_model(self.model)
        self.execution_device()
        if self.attach_config().num_ranks > 1:
            self._check_gpus()

    def _check_kinds(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                raise SettingError(f"{field.name} must be true or false, not {value!r}.")
        for name in ("max_batch", "max_queue"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise SettingError(f"{name} must be a whole number from 1 on, not {value!r}.")
        for name in ("step_timeout_s", "load_timeout_s"):
            if not is_duration(getattr(self, name)):
                raise SettingError(f"{name} must be a number of seconds above 0, not {getattr(self, name)!r}.")

    def attach_config(self) -> AttachConfig:
        """What goes on the pipeline."""
        from ..compose import AttachConfig

        return AttachConfig.read(
            cache=self.cache,
            offload=self.offload,
            parallel=self.parallel,
            compile=self.compile,
            gpu_memory=self.gpu_memory,
            device=self.execution_device(),
        )

    @property
    def num_ranks(self) -> int:
        """How many processes make one picture."""
        return self.attach_config().num_ranks

    @property
    def backend(self) -> str:
        """What ranks exchange by: NCCL on GPUs, gloo on CPUs."""
        return "nccl" if self.execution_device().type == "cuda" else "gloo"

    def execution_device(self) -> torch.device:
        """Where a process computes. "cuda" is the current GPU, which on each rank is its own; asking which one that
        is would take memory of a GPU in a process that needs none."""
        from ..arch.devices import read_device

        return read_device(self.device)

    def _check_gpus(self) -> None:
        """Refuse ranks that would have to share a GPU: NCCL cannot serve them."""
        import torch

        if torch.device(self.device or "cpu").index is not None:
            raise SettingError(
                f"device={self.device!r} names one device, and {self.num_ranks} ranks need one each. Give 'cuda' or "
                "'cpu', and choose GPUs with the environment variable CUDA_VISIBLE_DEVICES."
            )
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.num_ranks))
        if self.backend == "nccl" and torch.cuda.device_count() < here:
            raise SettingError(
                f"{here} ranks on this machine need a GPU each, and it has {torch.cuda.device_count()}. Choose smaller "
                "degrees, or device='cpu'."
            )


def is_duration(value: Any) -> bool:
    """Whether this is a time that can be waited: a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _reader(annotation: Any) -> Callable[[str], Any]:
    """What makes a value of a variable's text."""
    readers: dict[str, Callable[[str], Any]] = {"bool": read_bool, "int": int, "float": float}
    return readers.get(annotation, read_name_or_json if annotation.endswith("Setting") else str)
