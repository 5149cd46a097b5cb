"""The pipeline of an engine: loaded from a folder as its settings say, or taken as it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..arch.modular import adapt
from ..builtin import BUILTIN_MODELS, MAX_SIDE
from ..cache import TunedFor
from ..core.errors import SettingError
from ..offload.quantization_choice import EXACT
from .models import fetch_model, find_loader, load_pipeline, resolve_dtype
from .outputs import output_fields
from .planning import make_plan
from .quantize import Quantization
from .request import OmniDiffusionSamplingParams
from .settings import OmniDiffusionConfig


class Loaded(NamedTuple):
    """A pipeline, and what is known of it."""

    pipeline: Any
    device: torch.device
    defaults: OmniDiffusionSamplingParams
    started: float
    """When loading began; imports do not count."""
    why_quantised: str = ""
    max_side: int | None = None
    """In pixels, if the model has a limit that it does not tell."""
    restore: Callable[[], None] = lambda: None


def load_model(config: OmniDiffusionConfig, components: Mapping[str, Any] | None = None) -> Loaded:
    """The pipeline of a model's folder, on the host, but for components that are loaded already."""
    folder, device = fetch_model(config.model, trust_remote_code=config.trust_remote_code), config.execution_device()
    if (tuned := TunedFor.read(config.cache)) is not None:  # One for another model is refused before weights are read.
        tuned.check_folder(folder)
    defaults, dtype = config.sampling_defaults(folder), resolve_dtype(config.dtype, device)
    is_trusted = config.trust_remote_code
    loader = find_loader(folder, trust_remote_code=is_trusted, task=config.task)
    if loader.__name__ != "DiffusionPipeline":  # Otherwise the class comes with the model.
        output_fields(loader)
    started = time.perf_counter()
    quantised, why = _quantization(config, folder, dtype, defaults)
    how = {"trust_remote_code": is_trusted, "loader": loader}
    pipeline = load_pipeline(folder, dtype, quantization=quantised, components=components, **how)
    # A bar is shown on a terminal (None), not in a file.
    is_shown = config.progress and os.environ.get("RANK", "0") == "0"
    pipeline.set_progress_bar_config(disable=None if is_shown else True, leave=False, desc="denoising")
    return Loaded(pipeline, device, defaults, started, why, MAX_SIDE if config.model in BUILTIN_MODELS else None)


def adopt(config: OmniDiffusionConfig, pipeline: Any) -> Loaded:
    """A pipeline that is loaded, where its owner put it. Settings that come too late for it are refused."""
    name = type(pipeline).__name__
    if config.task is not None:
        raise SettingError(f"This {name} is loaded, so its task is decided. Leave out task.", param="task")
    if config.quantised() is not None or config.loss not in (None, "exact"):
        raise SettingError(
            f"Weights are quantised while they are loaded, and this {name} is loaded. Give the model's name or folder, "
            "or load it with a quantization_config of diffusers and leave out quantization and loss.",
            param="quantization" if config.loss is None else "loss",
        )
    device = pipeline.device if config.device is None else config.execution_device()
    return Loaded(pipeline, device, config.sampling_defaults(None), time.perf_counter(), restore=adapt(pipeline))


def _quantization(
    config: OmniDiffusionConfig, folder: Path, dtype: torch.dtype, defaults: OmniDiffusionSamplingParams
) -> tuple[Quantization | None, str]:
    """What to quantise, and why."""
    attached, device, quantised = config.attach_config, config.execution_device(), config.quantised()
    if config.loss in (None, EXACT) or attached.offload is None:
        return quantised, "asked for" if quantised is not None else ""
    size = {"height": defaults.height, "width": defaults.width, "frames": defaults.num_frames}
    how: dict[str, Any] = {"dtype": dtype, "loss": config.loss, "device": device, "attached": attached}
    made = make_plan(str(folder), attached.offload, size | {"batch": config.max_batch}, **how)
    return None if made.taken == EXACT else Quantization.read(made.taken, device), made.why
