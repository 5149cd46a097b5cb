"""How much a request makes is known before it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams, OutputKind, PipelineFacts, Request
from samovar.server import Limits
from samovar.server.output_size import check_output_size, output_size

TAKES = frozenset({"prompt", "height", "width", "num_frames"})
VIDEO = PipelineFacts(
    "Wan", TAKES, 8, output=OutputKind("video", fps=16.0, frames_argument="num_frames", frames=81, frame_group=4),
    size=(480, 832),
)  # fmt: skip
NO_SIZE = replace(VIDEO, size=None)
AUDIO = PipelineFacts("Sound", TAKES, 8, output=OutputKind("audio", rate=100, duration_argument="seconds"))
MUSIC = replace(AUDIO, output=replace(AUDIO.output, seconds=60.0))
IMAGE = PipelineFacts("Flux", TAKES, 8)


@pytest.mark.parametrize(
    ("facts", "params", "extent"),
    [
        (VIDEO, {}, (832, 480, 81, 81 / 16, 832 * 480 * 81)),
        (VIDEO, {"seconds": 1.0, "width": 64, "height": 32}, (64, 32, 17, 17 / 16, 64 * 32 * 17)),
        (VIDEO, {"num_frames": 9, "fps": 3.0}, (832, 480, 9, 3.0, 832 * 480 * 9)),
        (AUDIO, {"seconds": 2.5}, (0, 0, 1, 2.5, 2**20)),
        (MUSIC, {}, (0, 0, 1, 60.0, 2**20)),
        (MUSIC, {"seconds": 2.5}, (0, 0, 1, 2.5, 2**20)),
        (IMAGE, {"width": 64, "height": 32}, (64, 32, 1, None, 64 * 32)),
        (IMAGE, {}, (0, 0, 1, None, 2**20)),
        (NO_SIZE, {}, (0, 0, 81, 81 / 16, 81 * 2**20)),
    ],
)
def test_sides_frames_and_seconds(facts: PipelineFacts, params: dict[str, Any], extent: tuple[Any, ...]) -> None:
    assert output_size(facts, Request("a", OmniDiffusionSamplingParams(**params))) == extent


@pytest.mark.parametrize(
    ("facts", "params", "limits", "param", "message"),
    [
        (VIDEO, {}, {"max_frames": 80}, "num_frames", "The video has 81 frames; the limit is 80 (--max-frames)"),
        (VIDEO, {}, {"max_seconds": 5}, "seconds", "The video has 5.0625 seconds; the limit is 5 (--max-seconds)"),
        (VIDEO, {}, {"max_video_pixels": 10**7}, "size", "81 frames of 832x480 are 32,348,160 pixels; the limit is"),
        (VIDEO, {}, {"max_pixels": 10**5}, "size", "size 832x480 is 399,360 pixels; the limit is 100,000 (--max-p"),
        (NO_SIZE, {"num_frames": 200}, {}, "size", "200 frames of the model's size, taken as 1,048,576 pixels, are"),
        (MUSIC, {}, {"max_seconds": 30}, "seconds", "The audio has 60 seconds; the limit is 30 (--max-seconds)"),
        (AUDIO, {"seconds": 301.0}, {}, "seconds", "The audio has 301 seconds; the limit is 300 (--max-seconds)"),
    ],
)  # fmt: skip
def test_limits(facts: PipelineFacts, params: dict[str, Any], limits: dict[str, int], param: str, message: str) -> None:
    extent = output_size(facts, Request("a", OmniDiffusionSamplingParams(**params)))
    with pytest.raises(SettingError) as refused:
        check_output_size(extent, facts, Limits(**limits))
    assert refused.value.param == param
    assert message in str(refused.value)


def test_an_image_is_no_video_of_one_frame() -> None:
    extent = output_size(IMAGE, Request("a", OmniDiffusionSamplingParams(width=2048, height=2048)))
    check_output_size(extent, IMAGE, Limits(max_video_pixels=1))
