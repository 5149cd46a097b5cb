"""The built-in video model: what is shipped, that it moves what it is asked for, and that Samovar works on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from samovar import Omni
from samovar.builtin import BUILTIN_MODELS

FOLDER = BUILTIN_MODELS["motion"]
PROMPT = "rocket, flat style, flying up"


@pytest.fixture(scope="module")
def omni() -> Any:
    with Omni("motion", progress=False) as omni:
        yield omni


def darkness(video: Any) -> np.ndarray:
    """How much of each pixel is drawn: (frames, rows, columns)."""
    return (255 - video.frames.astype(float)).mean(-1)


def centres(video: Any, axis: int) -> list[float]:
    """Where the drawing's centre is in each frame, in pixels from the top or from the left."""
    drawn = darkness(video).sum(2 - axis)
    return list((drawn * np.arange(drawn.shape[1])).sum(1) / drawn.sum(1))


def test_its_defaults_give_seventeen_frames(omni: Omni) -> None:
    given = omni.defaults.given()
    assert (given["height"], given["width"], given["num_frames"], given["max_sequence_length"]) == (64, 64, 17, 32)
    (video,) = omni.generate(PROMPT, seed=1, num_inference_steps=2)[0].videos
    assert (video.frames.shape, video.fps) == ((17, 64, 64, 3), 12.0)


@pytest.mark.parametrize(("words", "axis", "sign"), [("falling", 0, 1), ("moving left", 1, -1)])
def test_it_moves_what_it_is_asked_for(omni: Omni, words: str, axis: int, sign: int) -> None:
    (video,) = omni.generate(f"rocket {words}", seed=1, num_inference_steps=8)[0].videos
    places = centres(video, axis)
    assert sign * (places[-1] - places[0]) > 12
    others = centres(video, 1 - axis)
    assert abs(others[-1] - others[0]) < 6


def test_it_grows(omni: Omni) -> None:
    (video,) = omni.generate("teapot, 3d style, growing", seed=1, num_inference_steps=8)[0].videos
    grown = darkness(video).mean((1, 2))
    assert grown[-1] > 2 * grown[0]


def test_auto_skips_steps_and_stays_close(omni: Omni) -> None:
    with Omni("motion", cache="auto", progress=False) as cached:
        result = cached.generate(PROMPT, seed=2, num_inference_steps=20)[0]
    (stats,) = result.cache
    assert stats.skipped > 0.2 * (stats.computed + stats.skipped)
    (video,) = omni.generate(PROMPT, seed=2, num_inference_steps=20)[0].videos
    difference = video.frames.astype(float) - result.videos[0].frames
    assert 10 * np.log10(255**2 / (difference**2).mean()) > 30
