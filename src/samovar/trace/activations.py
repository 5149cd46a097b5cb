"""The memory that components need beside their weights, at a size.

As a pipeline's run without weights shows. Of a denoiser without a pipeline that can be run it is estimated, and the
note says so: from the widest layer and the number of tokens. What neither shows is left out, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mode
from typing import Any

import torch

from ..arch.modules import main_dtype, parameters_of
from ..arch.skeleton import Parts, build_pipeline, loaded_parts
from ..core.errors import ModelError
from .dry_run import CallForm, DryRun, RequestSize, dry_run

_SHARE, _BYTES = 0.10, 256 * 2**20
"""What is added: kernels take memory of their own, matrix products on a GPU a workspace of 32 MiB, and torch's
allocator leaves holes between blocks, of 40 to 180 MiB in all (seen on an H200)."""
_TOKEN, _FRAMES, _TEXT = 16, 4, 512
"""Pixels of a token's side and frames in it, with most VAEs, and tokens of a prompt."""
_IMAGE, _VIDEO = RequestSize(1024, 1024), RequestSize(480, 832, 81)
"""What is made where nothing says otherwise."""
_MANY_CONVOLUTIONS = 16
"""A model with more of them is a UNet, whose widths say little."""


@dataclass(frozen=True)
class Activations:
    """What is known of the memory beside the weights."""

    by_name: Mapping[str, int]
    """Bytes by component, with a margin."""
    note: str
    """For which size they are."""
    problem: str | None = None
    """Why some are missing."""
    calls: Mapping[str, CallForm] = field(default_factory=dict)
    """How components are called, as far as it was seen."""
    size: RequestSize | None = None
    """What the pipeline made."""


def activations_of(pipeline: Any, size: RequestSize | None = None) -> Activations:
    """Those of a loaded pipeline or model. SettingError for a size that it does not take."""
    return _of(dry_run(pipeline, size), loaded_parts(pipeline), size or RequestSize(), "as it is configured")


def read_activations(source: str, parts: Parts, size: RequestSize | None = None) -> Activations:
    """Those of a model folder or a class, whose `parts` were built without weights."""
    try:
        pipeline = build_pipeline(source, parts)
        seen = DryRun() if pipeline is None else dry_run(pipeline, size)
    except ModelError as error:
        seen = DryRun(problem=str(error))
    is_folder = Path(source).expanduser().exists()
    how = "as its folder configures it" if is_folder else "as its class configures it by default"
    return _of(seen, parts, size or RequestSize(), how)


def _of(seen: DryRun, parts: Parts, size: RequestSize, how: str) -> Activations:
    peaks, calls, note = dict(seen.peaks), dict(seen.calls), f"those of {seen.size or size}"
    for name, part in parts.items():
        if part.role != "denoiser" or name in peaks:
            continue
        twin = next((other for other in seen.calls if other in peaks and parts[other].cls is part.cls), None)
        if twin is not None:  # It is for later steps.
            peaks[name], calls = peaks[twin], {name: calls[twin]} | calls
        elif found := estimate(part.module, size):
            peaks[name], made = found
            note = f"estimated for {made} of a {part.cls.__name__} {how} (a token is {_TOKEN} x {_TOKEN} pixels)"
    by_name = {name: int(peak * (1 + _SHARE)) + _BYTES for name, peak in peaks.items()}
    is_complete = by_name.keys() >= {name for name, part in parts.items() if part.role != "resident"}
    problem = None if is_complete else seen.problem or "it was not called in a run without weights"
    note = f"activations are {note}, and {_SHARE:.0%} and {_BYTES >> 20} MiB to spare"
    return Activations(by_name, note, problem, calls, seen.size)


def estimate(model: torch.nn.Module | None, size: RequestSize) -> tuple[int, RequestSize] | None:
    """What a forward of tokens through the widest layer holds: what that reads and writes, twice, and what goes around
    it, a few times. Measured of FLUX.1 at 1024 px: 0.35 to 0.6 GiB; estimated: 0.5."""
    kinds = Counter() if model is None else Counter(map(type, model.modules()))
    if model is None or not kinds[torch.nn.Linear] or kinds[torch.nn.Conv2d] > _MANY_CONVOLUTIONS:
        return None
    is_video = "num_frames" in parameters_of(model) or torch.nn.Conv3d in kinds
    made = replace(_VIDEO if is_video else _IMAGE, **{name: value for name, value in vars(size).items() if value})
    height, width, frames, batch = (each or 1 for each in vars(made).values())
    tokens = -(-height // _TOKEN) * -(-width // _TOKEN) * ((frames - 1) // _FRAMES + 1) + _TEXT
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    widest = max(layer.in_features + layer.out_features for layer in layers)
    held = tokens * (2 * widest + 4 * mode(layer.in_features for layer in layers))
    itemsize = (main_dtype(model) or torch.bfloat16).itemsize
    return batch * held * itemsize, made
