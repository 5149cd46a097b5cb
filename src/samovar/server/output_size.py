"""How much a request would make, known before anything is allocated, and within limits."""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import SettingError
from ..engine import PipelineFacts, Request
from .settings import Limits

USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""


class OutputSize(NamedTuple):
    """How much a request makes."""

    width: int
    height: int
    frames: int
    seconds: float | None
    pixels: int
    """In all frames, at the usual size if it is not known."""


def output_size(facts: PipelineFacts, request: Request | None = None) -> OutputSize:
    """How much a request makes, or one that says nothing; sides of 0 are not known before it runs."""
    params = facts.completed(request or Request(""))
    height, width = facts.size or (0, 0)
    width, height = params.width or width, params.height or height
    frames = facts.num_frames(params)
    is_video = facts.output.kind == "video"
    seconds = frames / (facts.fps(params) or 1) if is_video else params.seconds or facts.output.seconds
    return OutputSize(width, height, frames, seconds, (width * height or USUAL_PIXELS) * frames)


def check_output_size(extent: OutputSize, facts: PipelineFacts, limits: Limits) -> None:
    """Refuse what is above the limits."""
    size, is_video = f"{extent.width}x{extent.height}", facts.output.kind == "video"
    size = size if extent.width else f"the model's size, taken as {USUAL_PIXELS:,} pixels,"
    for param, what, value, option, most in (
        ("size", f"size {size} is {{}} pixels", extent.width * extent.height, "max_pixels", limits.max_pixels),
        ("seconds", f"The {facts.output} has {{}} seconds", extent.seconds or 0, "max_seconds", limits.max_seconds),
        ("num_frames", "The video has {} frames", extent.frames, "max_frames", limits.max_frames),
        ("size", f"{extent.frames} frames of {size} are {{}} pixels", extent.pixels * is_video, "max_video_pixels",
         limits.max_video_pixels),
    ):  # fmt: skip
        if value > most:
            said = what.format(f"{value:,.6g}" if isinstance(value, float) else f"{value:,}")
            message = f"{said}; the limit is {most:,} (--{option.replace('_', '-')}). Ask for less."
            raise SettingError(message, param=param)
