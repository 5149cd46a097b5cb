"""Which model is run, where, and with what on it? Every setting, checked before any weights are loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, nearest
from .models import find_model
from .sources import gather, read_bool, read_mapping_or_file

if TYPE_CHECKING:
    import torch

    from ..compose import AttachConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")


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
    cache_backend: str | None = None
    cache_config: Mapping[str, Any] | str | Path | None = None
    """Its settings, or a file in which `samovar tune` saved them."""
    enable_cpu_offload: bool = False
    """Denoisers and encoders take turns on the device."""
    enable_layerwise_offload: bool = False
    """Their blocks stream."""
    gpu_memory: str | int | None = None
    """The most that may be used on the device; alone, as little is offloaded as it demands."""
    ulysses_degree: int = 1
    ring_degree: int = 1
    """Ranks that share a sequence."""
    cfg_parallel_size: int = 1
    """Ranks that share the branches of the guidance."""
    compile: bool = False
    """Whether the denoiser's blocks are compiled: the first picture takes longer, maybe more than `step_timeout_s`, and
    the others less."""
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
        if self.enable_cpu_offload and self.enable_layerwise_offload:
            raise SettingError(
                "enable_cpu_offload and enable_layerwise_offload exclude each other: components take turns as a whole, "
                "or their blocks stream. Choose one, or give gpu_memory alone, which chooses for you."
            )
        find_model(self.model)
        _check_device(self.device)
        if self.num_ranks > 1:
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
        from ..parallel import SequenceParallelConfig

        if type(self.cfg_parallel_size) is not int or self.cfg_parallel_size < 1:
            raise SettingError(
                f"cfg_parallel_size is {self.cfg_parallel_size!r}; a number of ranks from 1 on was expected."
            )
        offloads = self.enable_cpu_offload or self.enable_layerwise_offload
        is_offloaded = offloads or self.gpu_memory is not None
        return AttachConfig(
            cache=self.cache_backend,
            cache_config=self.cache_config,
            offload=None if not offloads else "model" if self.enable_cpu_offload else "layerwise",
            gpu_memory=self.gpu_memory,
            parallel=SequenceParallelConfig(ulysses_degree=self.ulysses_degree, ring_degree=self.ring_degree),
            cfg_parallel=self.cfg_parallel_size,
            compile=self.compile,
            device=self.execution_device() if is_offloaded else None,
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
        import torch

        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

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


def _check_device(device: str | None) -> None:
    import torch

    if device is None:
        return
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise SettingError(f"{device!r} is no device. Give cpu, cuda, or cuda:1 for the second GPU.") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise SettingError(
            f"{device!r} cannot be used: torch {torch.__version__} finds no GPU here. Leave it out, or give cpu."
        )


def _reader(annotation: Any) -> Callable[[str], Any]:
    """What makes a value of a variable's text."""
    readers: dict[str, Callable[[str], Any]] = {"bool": read_bool, "int": int, "float": float}
    return readers.get(annotation, read_mapping_or_file if "Mapping" in annotation else str)
