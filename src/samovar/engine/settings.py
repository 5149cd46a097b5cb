"""Which model is run, where, and with what on it? Every setting, checked before any weights are loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..errors import ModelError, SettingError, nearest

if TYPE_CHECKING:
    import torch

    from ..compose import AttachConfig

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def model_folder(model: str) -> Path:
    """Where a model is: one that comes with Samovar, by name, or a folder in diffusers format."""
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    folder = Path(model).expanduser()
    if not (folder / "model_index.json").is_file():
        raise ModelError(
            f"{model!r} is neither a model that comes with Samovar nor a folder with a model_index.json. "
            f"{nearest(model, BUILTIN_MODELS)} A model of the hub must be downloaded first: "
            "hf download NAME --local-dir FOLDER"
        )
    return folder


@dataclass(frozen=True)
class EngineConfig:
    """What is wished for. The names are those of `Omni`."""

    model: str = "emoji"
    dtype: str = "auto"
    device: str | None = None
    progress: bool = True
    cache_backend: str | None = None
    cache_config: Mapping[str, Any] | None = None
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

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            hint = nearest(str(self.dtype), _DTYPES)
            raise SettingError(f"dtype must be one of {', '.join(_DTYPES)}, not {self.dtype!r}. {hint}")
        if self.enable_cpu_offload and self.enable_layerwise_offload:
            raise SettingError(
                "enable_cpu_offload and enable_layerwise_offload exclude each other: components take turns as a whole, "
                "or their blocks stream. Choose one, or give gpu_memory alone, which chooses for you."
            )
        model_folder(self.model)
        _check_device(self.device)
        if self.num_ranks > 1:
            self._check_gpus()

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
