"""Previews of whole pipelines: what is decoded at the end is the image itself."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from pipelines import PIPELINES
from samovar.engine.previews import decode_latents, predict_clean


def run(name: str) -> tuple[Any, list[torch.Tensor], Any]:
    """A pipeline, its latents after each step, and its image."""
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    seen: list[torch.Tensor] = []

    def note(pipe: Any, step: int, when: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"].clone())
        return tensors

    return pipe, seen, tiny.run(pipe, output_type="np", callback_on_step_end=note)


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen-image", "z-image", "flux2-klein"])
def test_the_last_latents_are_the_image(name: str) -> None:
    pipe, latents, picture = run(name)
    height, width = (PIPELINES[name].settings[side] for side in ("height", "width"))
    (preview,) = decode_latents(pipe, latents[-1], height, width)
    assert preview.size == (width, height)
    assert np.abs(np.asarray(preview) / 255 - picture[0]).max() <= 0.51 / 255
    assert decode_latents(pipe, torch.cat([latents[0]] * 2), height, width)[1].size == (width, height)
    clean = predict_clean(pipe.scheduler, latents[-3], latents[-2], len(latents) - 2)
    (ahead,) = decode_latents(pipe, clean, height, width)
    (as_is,) = decode_latents(pipe, latents[-2], height, width)
    apart = [np.abs(np.asarray(each) / 255 - picture[0]).mean() for each in (ahead, as_is)]
    assert apart[0] < apart[1], "where it is heading is nearer to the end than where it is"


@pytest.mark.parametrize("name", ["wan", "ltx"])
def test_the_preview_of_a_video_is_decoded_from_its_first_latents(name: str) -> None:
    """After the last step, from those that the pipeline gives to the VAE."""
    tiny, given = PIPELINES[name], []
    pipe, latents, _ = run(name)
    decode = pipe.vae.decode
    pipe.vae.decode = lambda latents, *args, **more: given.append(latents) or decode(latents, *args, **more)
    tiny.run(pipe, output_type="np")
    height, width = tiny.settings["height"], tiny.settings["width"]
    (preview,) = decode_latents(pipe, latents[-1], height, width)
    assert preview.size == (width, height)
    whole, first = given
    assert whole.shape[2] > 1
    assert torch.allclose(whole[:, :, :1], first, atol=1e-5)


def test_latents_of_an_unknown_kind_have_no_preview() -> None:
    pipe, latents, _ = run("flux")
    assert decode_latents(pipe, latents[0], 16, 16) == [], "of another size"
    assert decode_latents(pipe, latents[0][0], 16, 24) == []
    assert decode_latents(pipe, torch.zeros(1, 9, 8, 12), 16, 24) == [], "of other channels"
    assert decode_latents(object(), latents[0], 16, 24) == []
    for error in (IndexError, KeyError, AssertionError):
        pipe.vae.decode = Mock(side_effect=error)
        assert decode_latents(pipe, latents[0], 16, 24) == []


def test_without_a_step_before_or_a_straight_line_the_latents_stand_for_themselves() -> None:
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    latents = torch.ones(1, 4, 2, 2)
    flow = FlowMatchEulerDiscreteScheduler()
    flow.set_timesteps(4)
    assert predict_clean(flow, None, latents, 0) is latents
    assert predict_clean(DDIMScheduler(), latents, latents, 0) is latents
    assert predict_clean(flow, latents[:, :2], latents, 0) is latents
    noise, target = torch.randn(1, 4, 2, 2), torch.randn(1, 4, 2, 2)
    before, after = (sigma * noise + (1 - sigma) * target for sigma in flow.sigmas[1:3])
    assert torch.allclose(predict_clean(flow, before, after, 1), target, atol=1e-5)
