"""How much a request makes, known and limited before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import SettingError
from ..engine import OmniDiffusionSamplingParams, PipelineFacts, Request
from .settings import BYTES_PER_PIXEL, Limits

_USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""
_MAX_SIDE = 16_383
"""Pixels that every format of images holds per side."""
_USUAL_SECONDS, _BYTES_PER_SAMPLE = 60, 16
"""Of a sound that does not say how long it is; and of two channels, in memory and on their way."""


class OutputSize(NamedTuple):
    """How much a request makes."""

    width: int
    height: int
    frames: int
    seconds: float | None
    pixels: int
    """In all frames, at the usual size if it is not known."""
    num_bytes: int
    """In this process at most: what was sent, what is made, and previews."""


def output_size(facts: PipelineFacts, request: Request, limits: Limits) -> OutputSize:
    """How much a request makes; sides of 0 are not known before it runs. Refused above the limits."""
    params, kind = facts.completed(request), facts.output.kind
    height, width = facts.size or (0, 0)
    width, height = params.width or width, params.height or height
    frames = facts.num_frames(params)
    seconds = frames / (facts.fps(params) or 1) if kind == "video" else params.seconds or facts.output.seconds
    pixels = (width * height or _USUAL_PIXELS) * frames
    given = [image.width * image.height for image in request.images]
    sent = sum(given) + sum(image.width * image.height for image in request.inputs.values())
    frame = width * height or max(given, default=0) or _USUAL_PIXELS
    made = (params.num_outputs_per_prompt or 1) * frame * (frames + request.num_previews)
    num_bytes = BYTES_PER_PIXEL * (sent + made)
    if kind == "audio":
        num_bytes = int((seconds or _USUAL_SECONDS) * (facts.output.rate or 1)) * _BYTES_PER_SAMPLE
    found = OutputSize(width, height, frames, seconds, pixels, num_bytes)
    _check_limits(facts, limits, found, params)
    return found


def _check_limits(facts: PipelineFacts, limits: Limits, found: OutputSize, params: OmniDiffusionSamplingParams) -> None:
    width, height, frames = found.width, found.height, found.frames
    size = f"{width}x{height}" if width else f"the model's size, taken as {_USUAL_PIXELS:,} pixels,"
    if max(width, height) > _MAX_SIDE:
        raise SettingError(f"size {size} has a side above {_MAX_SIDE:,} pixels. Ask for less.", param="size")
    for param, what, value, limit in (
        ("num_inference_steps", "num_inference_steps is {}", params.num_inference_steps, "max_steps"),
        ("num_outputs_per_prompt", "num_outputs_per_prompt is {}", params.num_outputs_per_prompt, "max_images"),
        ("size", f"size {size} is {{}} pixels", width * height, "max_pixels"),
        ("seconds", f"The {facts.output} has {{}} seconds", found.seconds, "max_seconds"),
        ("num_frames", "The video has {} frames", frames, "max_frames"),
        ("size", f"{frames} frames of {size} are {{}} pixels", found.pixels, "max_video_pixels"),
    ):
        most = getattr(limits, limit)
        if (value or 0) > most and (facts.output.kind == "video" or limit != "max_video_pixels"):
            said = what.format(f"{value:,.6g}" if isinstance(value, float) else f"{value:,}")
            option = limit.replace("_", "-")
            raise SettingError(f"{said}; the limit is {most:,} (--{option}). Ask for less.", param=param)
