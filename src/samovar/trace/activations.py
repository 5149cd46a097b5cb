"""The memory that components need beside their weights, at a size.

As a pipeline's run without weights shows. Of a denoiser without a pipeline that can be run it is estimated, and the
note says so: from the widest layer and the number of tokens. What neither shows is left out, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import mode
from typing import Any

import torch

from ..arch.modules import main_dtype, parameters_of
from ..arch.skeleton import Part, Parts, build_pipeline, loaded_parts
from ..core.errors import ModelError
from .dry_run import CallForm, DryRun, RequestSize, dry_run

_SHARE, _BYTES = 0.10, 192 * 2**20
"""What is added: kernels take memory of their own, matrix products on a GPU a workspace of 32 MiB, and torch's
allocator leaves holes between blocks, of 40 to 100 MiB in all (seen on an H200)."""
_TOKEN, _FRAMES, _TEXT = 16, 4, 512
"""Pixels of a token's side and frames in it, with most VAEs, and tokens of a prompt."""
_IMAGE, _VIDEO = (1024, 1024, 1), (480, 832, 81)
"""Height, width and frames where nothing says others."""
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
    return _of(dry_run(pipeline, size), loaded_parts(pipeline), size or RequestSize())


def read_activations(source: str, parts: Parts, size: RequestSize | None = None) -> Activations:
    """Those of a model folder or a class, whose `parts` were built without weights."""
    try:
        pipeline = build_pipeline(source, parts)
        seen = DryRun() if pipeline is None else dry_run(pipeline, size)
    except ModelError as error:
        seen = DryRun(problem=str(error))
    return _of(seen, parts, size or RequestSize())


def _of(seen: DryRun, parts: Parts, size: RequestSize) -> Activations:
    peaks, calls, note = dict(seen.peaks), dict(seen.calls), f"those of {seen.size or size}"
    denoisers = [name for name, part in parts.items() if part.role == "denoiser"]
    for name in [name for name in denoisers if name not in peaks]:
        twin = next((other for other in seen.calls if other in peaks and parts[other].cls is parts[name].cls), None)
        if twin is not None:  # It is for later steps.
            peaks[name], calls = peaks[twin], {name: calls[twin]} | calls
        elif found := estimate(parts[name], size):
            peaks[name], note = found
    by_name = {name: int(peak * (1 + _SHARE)) + _BYTES for name, peak in peaks.items()}
    is_complete = by_name.keys() >= {name for name, part in parts.items() if part.role != "resident"}
    problem = None if is_complete else seen.problem or "it was not called in a run without weights"
    note = f"activations are {note}, and {_SHARE:.0%} and {_BYTES >> 20} MiB to spare"
    return Activations(by_name, note, problem, calls, seen.size)


def estimate(part: Part, size: RequestSize) -> tuple[int, str] | None:
    """What a forward of tokens through the widest layer holds: what that reads and writes, twice, and what goes around
    it, a few times. Measured of FLUX.1 at 1024 px: 0.35 to 0.6 GiB; estimated: 0.5."""
    modules = [] if part.module is None else list(part.module.modules())
    kinds, linear = Counter(map(type, modules)), [each for each in modules if isinstance(each, torch.nn.Linear)]
    if part.module is None or not linear or kinds[torch.nn.Conv2d] > _MANY_CONVOLUTIONS:
        return None
    is_video = "num_frames" in parameters_of(part.module) or torch.nn.Conv3d in kinds
    height, width, frames = _VIDEO if is_video else _IMAGE
    height, width = size.height or size.width or height, size.width or size.height or width
    frames, batch = size.frames or frames, size.batch or 1
    tokens = -(-height // _TOKEN) * -(-width // _TOKEN) * ((frames - 1) // _FRAMES + 1) + _TEXT
    widest = max(layer.in_features + layer.out_features for layer in linear)
    held = 2 * widest + 4 * mode(layer.in_features for layer in linear)
    itemsize = (main_dtype(part.module) or torch.bfloat16).itemsize
    made = RequestSize(height, width, frames if is_video else None, size.batch)
    note = f"estimated for {made} of a {part.cls.__name__} as it is configured (a token is {_TOKEN} x {_TOKEN} pixels)"
    return batch * tokens * held * itemsize, note
