"""The built-in model: what is shipped, and that it draws what it is asked for."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from samovar import Omni
from samovar.builtin import BUILTIN_MODELS

PROMPTS = {
    "empty": "",
    "emoji": "🫖" * 40,
    "Cyrillic": "котик в стиле 3d",
    "control": "\x00\n\t",
    "10,500 characters": "a cat, " * 1500,
}


@pytest.fixture(scope="module")
def omni() -> Omni:
    return Omni("emoji", progress=False)


@pytest.mark.parametrize("name", BUILTIN_MODELS)
def test_it_is_small_and_holds_its_notices(name: str) -> None:
    folder = BUILTIN_MODELS[name]
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 32 * 2**20
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        assert {entry["dtype"] for name, entry in header.items() if name != "__metadata__"} <= {"F16", "BF16"}
    notices = list((folder / "notices").iterdir())
    assert len(notices) >= 2
    for notice in notices:
        assert f"notices/{notice.name}" in (folder / "NOTICE").read_text()
        assert "Copyright" in notice.read_text()


def test_its_defaults_are_its_own(omni: Omni) -> None:
    assert omni.defaults.given() == {
        "height": 128, "width": 128, "num_inference_steps": 28, "true_cfg_scale": 2.0, "negative_prompt": "",
        "max_sequence_length": 64,
    }  # fmt: skip


def test_it_draws_what_it_is_asked_for(omni: Omni) -> None:
    """Hearts of three colours: what is drawn tells whether the text is obeyed."""

    def colour(prompt: str) -> tuple[int, ...]:
        picture = np.asarray(omni.generate(prompt, seed=1, num_inference_steps=8)[0].images[0]).astype(int)
        drawn = picture[picture.sum(-1) < 3 * 225]
        return tuple(drawn.mean(0).round().astype(int))

    red, green, blue = (colour(f"{name}, flat style") for name in ("red heart", "green heart", "blue heart"))
    assert red[0] > red[1] + 80
    assert red[0] > red[2] + 80
    assert green[1] > green[0] + 80
    assert blue[2] > blue[0] + 80


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_any_text_gives_a_picture(omni: Omni, prompt: str) -> None:
    result = omni.generate(prompt, seed=1, num_inference_steps=2)[0]
    assert result.images[0].size == (128, 128)
    assert bool(result.notes) is (len(prompt) > 1000)
