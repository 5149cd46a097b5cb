"""The settings of `Omni` and `AsyncOmni`, checked before any weights are loaded.

They come from arguments, then a file, then the environment: the first one that has it wins. Each source may use
vllm-omni's spellings. Unknown names are refused in all of them.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from ..arch.devices import read_device
from ..compose import AttachConfig, CacheSetting, OffloadSetting, ParallelSetting
from ..compose.config import OF_OFFLOAD
from ..core import aliases
from ..core.aliases import accept_aliases
from ..core.errors import SettingError
from ..core.files import brief, check_names, read_mapping
from ..core.settings import (
    FLAG,
    SETTING,
    SIZE,
    TEXT,
    TOLERANCE,
    Kind,
    Setting,
    Settings,
    choice,
    count,
    number,
    parse_flag,
    setting,
    settings_of,
    table,
)
from .lora import LoraSetting, read_sources
from .models import find_model
from .planning import check_loss
from .quantize import Quantization, QuantizationSetting
from .request import OmniDiffusionSamplingParams, read_defaults, saved_defaults

PREFIX = "SAMOVAR_"
NOT_SETTINGS = frozenset({"SAMOVAR_API_KEY"})
"""Variables with our prefix that the engine does not read: the server's key."""

_SET_BY_KUBERNETES = re.compile(
    r"SAMOVAR_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
"""Variables in every container where a Service is named samovar or samovar-something."""

DefaultsSetting = OmniDiffusionSamplingParams | Mapping[str, Any] | None

DTYPES = ("auto", "float32", "bfloat16", "float16")


def read_gpus(devices: Any) -> tuple[int, ...]:
    """The numbers of GPUs, from such as "0,1", [0, 1] or "cuda:0,cuda:1"; ValueError for what is none."""
    parts = devices.split(",") if isinstance(devices, str) else devices if isinstance(devices, Sequence) else [devices]
    found = [re.fullmatch(r"(?:cuda:)?(\d{1,4})", str(part).strip(), re.ASCII) for part in parts]
    if not found or not all(found) or any(isinstance(part, bool) for part in parts):
        raise ValueError
    return tuple(int(match[1]) for match in found if match is not None)


_FLAG_OR_NAME = SETTING._replace(parse=parse_flag)
_LORA = SETTING._replace(expected="files or folders by name, such as {'pixel': 'pixel.safetensors'}", read=read_sources)
_DEVICES = SETTING._replace(
    expected="the numbers of GPUs, such as '0,1,2,3' or [0, 1, 2, 3]; for several workers on a CPU, give replicas and "
    "device='cpu'",
    read=read_gpus,
)


@accept_aliases
@dataclass(frozen=True)
class OmniDiffusionConfig(Settings, param="settings"):
    """All settings of `Omni` and `AsyncOmni`. vllm-omni's spellings are accepted too."""

    model: str = setting(
        "emoji",
        TEXT,
        "The name of a built-in model, a folder in diffusers format, or a name on the hub.",
    )
    dtype: str = setting(
        "auto",
        choice(DTYPES),
        '"float32", "bfloat16" or "float16"; "auto" is bfloat16 on a GPU and float32 on a CPU.',
    )
    device: str | None = setting(
        None,
        TEXT,
        'Where to compute, such as "cuda:1"; by default a GPU if there is one.',
    )
    replicas: int | None = setting(
        None,
        count(1),
        "Workers of AsyncOmni that share its queue, each with all of the model. By default one, or one for each "
        "of `devices`; with ranks, for as many of them as there are ranks.",
    )
    devices: tuple[int, ...] | None = setting(
        None,
        _DEVICES,
        'GPUs of the replicas, such as "0,1,2,3" or [0, 1]. By default the first ones. A GPU that is named twice '
        "has two replicas.",
    )
    quantization: QuantizationSetting = setting(
        None,
        SETTING,
        'Quantise weights while they are loaded: "int8", "fp8", "int4", "nf4" or a .gguf file for the denoiser, '
        'or any of these by component, such as {"transformer": "int8", "text_encoder_2": "int4"}.',
    )
    loss: str | None = setting(
        None,
        TEXT,
        'How much quantisation may lose: "exact" (the default), "int8" or "int4". Of exact weights and the kinds '
        "that lose no more, the fastest within `gpu_memory` is taken.",
    )
    lora: LoraSetting = setting(
        None,
        _LORA,
        "LoRA adapters that requests may use, by name: a .safetensors file, a folder, or a name on the hub, such "
        'as {"pixel": "./pixel.safetensors"}.',
    )
    defaults: DefaultsSetting = setting(
        None,
        settings_of(OmniDiffusionSamplingParams),
        'Sampling parameters of requests that do not give them, such as {"num_inference_steps": 28}. Others come '
        "from a tuned cache setting, then from the model's samovar.json.",
    )
    progress: bool = setting(
        True,
        FLAG,
        "Whether to show a progress bar on a terminal.",
    )
    trust_remote_code: bool = setting(
        False,
        FLAG,
        "Whether Python files that come with the model may run.",
    )
    task: str | None = setting(
        None,
        TEXT,
        'What to do with a model whose family has several pipelines in diffusers: "text2img", "img2img", '
        '"inpaint", "text2video", "image2video", "video2video" ... By default what its folder says.',
    )
    cache: CacheSetting = setting(
        None,
        SETTING,
        "The cache: a backend's name, a TeaCacheConfig, a mapping of settings, or a file saved by `samovar tune`. "
        'True is "auto".',
    )
    tolerance: float | str | None = setting(
        None,
        TOLERANCE,
        'How much the cache "auto" may lose: "exact", "high", "fast", or a number. Alone it means cache="auto"; a '
        "request may ask for another.",
    )
    offload: OffloadSetting = setting(
        None,
        SETTING,
        'CPU offload: "auto", "model" or "layerwise", an OffloadConfig, a mapping or a file.',
    )
    gpu_memory: str | int | None = setting(
        None,
        SIZE,
        'GPU memory budget, such as "12GiB". Alone it offloads as little as the budget demands.',
    )
    host_memory: str | int | None = setting(
        None,
        SIZE,
        "Budget of host memory for weights that are not on the GPU; the rest is read from the model's files again.",
    )
    exclude: str | Sequence[str] | None = setting(
        None,
        SETTING,
        "Names of components that offload leaves alone, with commas; they are on the GPU at all times.",
    )
    parallel: ParallelSetting = setting(
        None,
        SETTING,
        "Ranks that share one image: a SequenceParallelConfig, a mapping or a file. One process is started per rank.",
    )
    compile: bool | str = setting(
        False,
        _FLAG_OR_NAME,
        '"graphs" replays the denoiser\'s forwards as CUDA graphs, with the same bits. True, or the name of a '
        "backend of torch.compile, compiles its blocks. The first image of a size takes longer.",
    )
    attention: str | None = setting(
        None,
        TEXT,
        'Other kernels for attention: "cudnn", "flash", "flash3", "sage" or another backend of diffusers. The '
        "first forward compares them with the default, which stays where they do not agree.",
    )
    compile_cache: str | None = setting(
        None,
        TEXT,
        "A folder that keeps compiled blocks, so that a worker that is started again need not compile them. By "
        "default torch's own. Files in it are run as code.",
    )
    vae_tiling: bool | None = setting(
        None,
        FLAG,
        "Decode in tiles, which are blended: less memory for large images, and slightly other pixels. By default "
        "only if `gpu_memory` is not enough otherwise.",
    )
    vae_slicing: bool | None = setting(
        None,
        FLAG,
        "Decode the images of a batch one after the other: less memory. Likewise.",
    )
    vae_channels_last: bool = setting(
        False,
        FLAG,
        "Decode with channels last: faster on most GPUs, with other last bits.",
    )
    warm_up: bool | None = setting(
        None,
        FLAG,
        "Whether to make an image of the default size before the first request, as part of loading. By default "
        "AsyncOmni does so with `compile`.",
    )
    max_batch: int = setting(
        1,
        count(1),
        "Most requests whose steps are computed at once. Above 1, an image may differ in its last bits from one alone.",
    )
    max_queue: int = setting(
        16,
        count(1),
        "Most requests that wait in AsyncOmni's queue.",
    )
    step_timeout_s: float = setting(
        60.0,
        number(above=True),
        "Seconds without a step after which AsyncOmni considers a worker hung, at the model's default size. "
        "Larger images get more, by what smaller ones took.",
    )
    load_timeout_s: float = setting(
        1800.0,
        number(above=True),
        "Seconds that loading the model may take.",
    )

    @classmethod
    def read(cls, value: Any, file: str | Path | None = None) -> Self:
        """Settings from arguments, then a file, then the environment."""
        return cls(**gather(value, file, table(cls)))

    def check(self) -> None:
        find_model(self.model)
        quantised, steps = self.quantised(), self._given_defaults().num_inference_steps
        if self.attach_config.compiles and quantised is not None and quantised.files:
            raise SettingError(
                f"compile={self.compile!r} cannot trace the weights of a GGUF file ({quantised.files[0]}). Leave out "
                "compile, or use quantization='int4'.",
                param="compile",
            )
        if steps is not None and self.scheduled_steps not in (None, steps):
            raise SettingError(
                f"num_inference_steps={steps} is the default, but the cache has a schedule for {self.scheduled_steps} "
                "steps. Leave it out, or use another cache.",
                param="num_inference_steps",
            )
        check_loss(self.loss, self.quantization, self.attach_config.offload)
        self.gpus  # noqa: B018 - It is checked by being read.

    def _given_defaults(self) -> OmniDiffusionSamplingParams:
        return OmniDiffusionSamplingParams.read(self.defaults)

    def sampling_defaults(self, folder: Path | None) -> OmniDiffusionSamplingParams:
        """The parameters of requests that do not give them: ours, then the cache's, then the model's."""
        scheduled = OmniDiffusionSamplingParams(num_inference_steps=self.scheduled_steps)
        models = OmniDiffusionSamplingParams() if folder is None else read_defaults(folder)
        return self._given_defaults().over(scheduled).over(saved_defaults(self.cache)).over(models)

    @functools.cached_property
    def scheduled_steps(self) -> int | None:
        """Number of steps that the cache's schedule is for, if it has one."""
        choice = self.attach_config.cache
        return getattr(choice.settings, "scheduled_steps", None) if choice is not None else None

    @functools.cached_property
    def attach_config(self) -> AttachConfig:
        """The features to attach to the pipeline."""
        taken = {*inspect.signature(AttachConfig.of).parameters, *table(AttachConfig), *OF_OFFLOAD}
        same = {field.name: getattr(self, field.name) for field in fields(self) if field.name in taken}
        return AttachConfig.of(**same | {"device": self.execution_device()})

    @functools.cached_property
    def gpus(self) -> tuple[tuple[int, ...], ...]:
        """For each replica its GPUs, if they are chosen for it."""
        device = self.execution_device()
        return place_replicas(self.replicas, self.devices or (), device, self.num_ranks, torch.cuda.device_count())

    def place_of(self, replica: int) -> str:
        """Where a replica computes, in words."""
        gpus = self.gpus[replica]
        return f"GPU {' and '.join(map(str, gpus))}" if gpus else str(self.execution_device())

    @property
    def num_replicas(self) -> int:
        """Number of workers, each of which makes images."""
        return len(self.gpus)

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute one image."""
        return self.attach_config.num_ranks

    @property
    def backend(self) -> str:
        """How ranks communicate: NCCL on GPUs, gloo on CPUs."""
        return "nccl" if self.execution_device().type == "cuda" else "gloo"

    def execution_device(self) -> torch.device:
        """Where a process computes. "cuda" is the current GPU, which each rank sets to its own."""
        return read_device(self.device)

    def quantised(self) -> Quantization | None:
        """What is quantised on the way in, if anything."""
        return Quantization.read(self.quantization, self.execution_device())


# ------------------------------------------------------------------------------------------------ sources


def gather(arguments: Mapping[str, Any], file: str | Path | None, rows: Mapping[str, Setting]) -> dict[str, Any]:
    """All settings by name; `rows` are those that there are."""
    kinds = {name: row.kind for name, row in rows.items()} | {
        name: alias.kind for name, alias in aliases.ALIASES.items()
    }
    in_file = {} if file is None else read_mapping(file, "config")
    in_file.pop("server", None)  # What `samovar serve` alone reads.
    check_names(arguments, kinds, "a setting of Omni")
    check_names(in_file, kinds, f"a setting of Omni, in {str(file)!r}")
    settings: dict[str, Any] = {}
    for layer in map(aliases.resolve, (from_environment(kinds), in_file, arguments)):
        before, now = settings.get("defaults"), layer.get("defaults")
        settings |= layer
        if isinstance(before, Mapping) and isinstance(now, Mapping):  # They complete each other.
            settings["defaults"] = {**before, **now}
    return settings


def from_environment(kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """The settings in variables such as SAMOVAR_CACHE."""
    variables = {f"{PREFIX}{name.upper()}": name for name in kinds}
    settings = {}
    for variable, text in os.environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or _is_set_by_kubernetes(variable, text):
            continue
        check_names([variable], variables, "a setting of Omni, in the environment")
        try:
            settings[variables[variable]] = kinds[variables[variable]].parse(text)
        except ValueError as error:
            message = f"The variable {variable}={brief(text)} cannot be read: {error}"
            raise SettingError(message, param=variable) from error
    return settings


def _is_set_by_kubernetes(variable: str, text: str) -> bool:
    """SAMOVAR_PORT is an address there; a plain number is the user's mistake and is reported."""
    is_address = variable.endswith("_PORT") and "://" in text
    return is_address or _SET_BY_KUBERNETES.fullmatch(variable) is not None


# ------------------------------------------------------------------------------------------------ GPUs


def place_replicas(
    replicas: int | None, gpus: Sequence[int], device: torch.device, num_ranks: int, num_gpus: int
) -> tuple[tuple[int, ...], ...]:
    """The GPUs of each replica, one for each rank; none of its own on a CPU, and none if the only worker may choose.

    A GPU that is named more than once has several replicas.
    """
    _check_device(replicas, gpus, device, num_ranks, num_gpus)
    if not gpus and (replicas in (None, 1) or device.type != "cuda"):
        return ((),) * (replicas or 1)
    count = replicas or max(1, len(gpus) // num_ranks)
    needed = count * num_ranks
    gpus = gpus or range(needed)
    if missing := ", ".join(str(gpu) for gpu in gpus if gpu >= num_gpus):
        raise SettingError(
            f"{count} replicas of {num_ranks} ranks would take GPU {missing} too, and torch finds {num_gpus} here, "
            f"from 0 to {num_gpus - 1}. CUDA_VISIBLE_DEVICES, if it is set, says which. Name others; or, if several "
            "workers fit on one GPU, name it more than once in devices, such as '0,0', and limit gpu_memory.",
            param="devices",
        )
    if len(gpus) != needed:
        raise SettingError(
            f"devices names {len(gpus)} GPUs ({', '.join(map(str, gpus))}), and {count} replicas of {num_ranks} ranks "
            f"take {needed}. Name as many, or change replicas or parallel.",
            param="devices",
        )
    groups = tuple(tuple(gpus[start : start + num_ranks]) for start in range(0, needed, num_ranks))
    for group in groups:
        if len(set(group)) < num_ranks:
            raise SettingError(
                f"devices gives the ranks of one replica the GPUs {', '.join(map(str, group))}, and each rank needs "
                f"one of its own. A replica has {num_ranks} neighbours of the list: order it so that they differ.",
                param="devices",
            )
    return groups


def _check_device(
    replicas: int | None, gpus: Sequence[int], device: torch.device, num_ranks: int, num_gpus: int
) -> None:
    """Refuse a device that is not what these settings take."""
    takes_several = num_ranks > 1 or bool(gpus) or (device.type == "cuda" and (replicas or 1) > 1)
    if device.index is not None and takes_several:
        raise SettingError(
            f"device={str(device)!r} names one device, and these settings take several. Give 'cuda' or 'cpu', and "
            "choose GPUs with devices or the environment variable CUDA_VISIBLE_DEVICES.",
            param="device",
        )
    if gpus and device.type != "cuda":
        raise SettingError(
            f"devices names GPUs ({', '.join(map(str, gpus))}), and the device is {str(device)!r}. Leave it out, and "
            f"give replicas={len(gpus)} for as many workers; or device='cuda'.",
            param="devices",
        )
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    if not gpus and num_ranks > 1 and device.type == "cuda" and here > num_gpus:  # NCCL cannot share one.
        raise SettingError(
            f"{here} ranks on this machine need a GPU each, and it has {num_gpus}. Choose smaller degrees, or "
            "device='cpu'.",
            param="parallel",
        )
