"""How much a request makes, known and limited before anything is allocated."""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import SettingError
from ..engine import PipelineFacts, Request
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
    _check_limits(facts, limits, (width, height), frames, seconds or 0, pixels)
    given = [image.width * image.height for image in request.images]
    sent = sum(given) + sum(image.width * image.height for image in request.inputs.values())
    frame = width * height or max(given, default=0) or _USUAL_PIXELS
    made = (params.num_outputs_per_prompt or 1) * frame * (frames + request.num_previews)
    num_bytes = BYTES_PER_PIXEL * (sent + made)
    if kind == "audio":
        num_bytes = int((seconds or _USUAL_SECONDS) * (facts.output.rate or 1)) * _BYTES_PER_SAMPLE
    return OutputSize(width, height, frames, seconds, pixels, num_bytes)


def _check_limits(
    facts: PipelineFacts, limits: Limits, sides: tuple[int, int], frames: int, seconds: float, pixels: int
) -> None:
    width, height = sides
    size = f"{width}x{height}" if width else f"the model's size, taken as {_USUAL_PIXELS:,} pixels,"
    if max(sides) > _MAX_SIDE:
        raise SettingError(f"size {size} has a side above {_MAX_SIDE:,} pixels. Ask for less.", param="size")
    for param, what, value, option, most in (
        ("size", f"size {size} is {{}} pixels", width * height, "max-pixels", limits.max_pixels),
        ("seconds", f"The {facts.output} has {{}} seconds", seconds, "max-seconds", limits.max_seconds),
        ("num_frames", "The video has {} frames", frames, "max-frames", limits.max_frames),
        ("size", f"{frames} frames of {size} are {{}} pixels", pixels, "max-video-pixels", limits.max_video_pixels),
    ):  # fmt: skip
        if value > most and (facts.output.kind == "video" or option != "max-video-pixels"):
            said = what.format(f"{value:,.6g}" if isinstance(value, float) else f"{value:,}")
            raise SettingError(f"{said}; the limit is {most:,} (--{option}). Ask for less.", param=param)
