"""VAEs decode in parts while that is attached, and as before afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compose.matrix import footprint
from pipelines import PIPELINES
from samovar import attach
from samovar.errors import SettingError


def settings_of(vae: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(vae).items() if isinstance(value, (bool, int, float))}


@pytest.mark.parametrize("name", ["flux", "wan", "ltx"])
def test_on_and_off(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    before, settings = footprint(pipe), settings_of(pipe.vae)
    with attach(pipe, vae_tiling=True, vae_slicing=True) as attached:
        assert (pipe.vae.use_tiling, pipe.vae.use_slicing) == (True, True)
        assert "VAE: vae_tiling, vae_slicing: " in str(attached.explain())
    assert settings_of(pipe.vae) == settings
    assert footprint(pipe) == before


def test_slices_are_the_same_images() -> None:
    tiny = PIPELINES["sd3"]
    pipe = tiny.build(0)
    call = {"prompt": ["a cat", "a dog"], "negative_prompt": ["x", "y"], "output_type": "pt"}
    expected = tiny.run(pipe, 2, **call)
    with attach(pipe, vae_slicing=True):
        assert torch.allclose(tiny.run(pipe, 2, **call), expected, atol=1e-5)


def test_what_has_no_such_vae_is_refused() -> None:
    pipe = PIPELINES["flux"].build(0)
    with pytest.raises(SettingError, match=r"no VAE here can do that \(found: none\)"):
        attach(pipe.transformer, vae_tiling=True)
    with pytest.raises(SettingError, match="vae_tiling=2; expected True or False"):
        attach(pipe, vae_tiling=2)  # type: ignore[arg-type]
    with attach(pipe, vae_tiling=True), pytest.raises(SettingError, match="has vae_tiling= from an earlier attach"):
        attach(pipe, vae_tiling=True)
