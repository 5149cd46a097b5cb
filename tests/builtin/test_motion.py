"""The built-in video model: what is shipped, that it moves what it is asked for, and that Samovar works on it."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest
import torch

import samovar
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


def test_it_is_small_and_holds_its_notices() -> None:
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 24 * 2**20
    assert all(file.stat().st_size < 16 * 2**20 for file in files)
    for file in FOLDER.rglob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} <= {"F16", "BF16"}
    notice = (FOLDER / "NOTICE").read_text()
    for name in ("fluent-emoji.txt", "emojibase.txt"):
        assert f"notices/{name}" in notice
        assert "Copyright" in (FOLDER / "notices" / name).read_text()


def test_its_defaults_give_seventeen_frames(omni: Omni) -> None:
    given = omni.defaults.given()
    assert (given["height"], given["width"], given["num_frames"], given["max_sequence_length"]) == (64, 64, 17, 32)
    (video,) = omni.generate(PROMPT, seed=1, num_inference_steps=2)[0].videos
    assert (video.frames.shape, video.fps) == ((17, 64, 64, 3), 12.0)


@pytest.mark.parametrize(("words", "axis", "sign"), [("flying up", 0, -1), ("falling", 0, 1), ("moving left", 1, -1)])
def test_it_moves_what_it_is_asked_for(omni: Omni, words: str, axis: int, sign: int) -> None:
    (video,) = omni.generate(f"rocket {words}", seed=1, num_inference_steps=8)[0].videos
    places = centres(video, axis)
    assert sign * (places[-1] - places[0]) > 12
    others = centres(video, 1 - axis)
    assert abs(others[-1] - others[0]) < 6


def test_it_fades_and_grows(omni: Omni) -> None:
    faded, grown = (
        darkness(omni.generate(f"teapot, 3d style, {words}", seed=1, num_inference_steps=8)[0].videos[0]).mean((1, 2))
        for words in ("fading out", "growing")
    )
    assert faded[0] > 4 * faded[-1]
    assert grown[-1] > 2 * grown[0]


@pytest.mark.parametrize("prompt", ["", "🫖" * 40, "котик летит вверх", "\x00\n\t"])
def test_any_text_gives_a_video(omni: Omni, prompt: str) -> None:
    assert len(omni.generate(prompt, seed=1, num_inference_steps=1)[0].videos[0]) == 17


def latents(pipe: Any, steps: int) -> torch.Tensor:
    call = {"height": 64, "width": 64, "num_frames": 17, "max_sequence_length": 32, "output_type": "latent"}
    generator = torch.Generator().manual_seed(5)
    found: torch.Tensor = pipe(PROMPT, num_inference_steps=steps, generator=generator, **call).frames
    return found


def test_neutral_settings_keep_its_bits() -> None:
    """A cache that may lose nothing, and weights that stream, give the bits of the bare pipeline."""
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(FOLDER)
    pipe.set_progress_bar_config(disable=True)
    bare = latents(pipe, 4)
    for settings in (
        {"cache": {"backend": "auto", "tolerance": "exact"}},
        {"cache": {"rel_l1_thresh": 0}},
        {"offload": {"mode": "layerwise", "device": "cpu"}},
    ):
        with samovar.attach(pipe, **settings):
            assert torch.equal(latents(pipe, 4), bare), settings
    assert torch.equal(latents(pipe, 4), bare)


def test_auto_skips_steps_and_stays_close() -> None:
    with Omni("motion", cache="auto", progress=False) as cached:
        result = cached.generate(PROMPT, seed=2)[0]
    (stats,) = result.cache
    assert stats.skipped > 0.25 * (stats.computed + stats.skipped)
    with Omni("motion", progress=False) as exact:
        (video,) = exact.generate(PROMPT, seed=2)[0].videos
    difference = video.frames.astype(float) - result.videos[0].frames
    assert 10 * np.log10(255**2 / (difference**2).mean()) > 30
