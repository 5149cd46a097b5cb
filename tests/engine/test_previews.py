"""Previews of whole pipelines: what is decoded after the last step is the image itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines import PIPELINES
from pipelines.builder import Recipe, build
from pipelines.recipes import RECIPES
from pipelines.standins import standins
from samovar import Omni
from samovar.engine import Done, Preview
from samovar.engine.previews import NoPreview, decode_latents, predict_clean
from samovar.engine.steps import preview_steps


def run(name: str) -> tuple[Any, list[torch.Tensor], Any, tuple[int, int]]:
    """A pipeline, its latents after each step, its image and their size."""
    tiny = PIPELINES[name]
    pipe, seen = tiny.build(0), list[torch.Tensor]()

    def note(pipe: Any, step: int, when: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(tensors["latents"].clone())
        return tensors

    image = tiny.run(pipe, output_type="np", callback_on_step_end=note)
    return pipe, seen, image, (tiny.settings["height"], tiny.settings["width"])


@pytest.mark.parametrize("name", ["flux", "sd3", "qwen-image", "z-image", "flux2-klein"])
def test_the_last_latents_are_the_image(name: str) -> None:
    pipe, latents, image, size = run(name)
    preview = decode_latents(pipe, latents[-1], size)
    assert preview.size == size[::-1]
    assert np.abs(np.asarray(preview) / 255 - image[0]).max() <= 0.51 / 255
    pipe.scheduler._step_index = len(latents) - 1
    clean = predict_clean(pipe.scheduler, latents[-3], latents[-2])
    apart = [
        np.abs(np.asarray(decode_latents(pipe, each, size)) / 255 - image[0]).mean() for each in (clean, latents[-2])
    ]
    assert apart[0] < apart[1], "where it is heading is nearer to the end than where it is"


@pytest.mark.filterwarnings("ignore")
@standins()
def test_latents_of_an_unknown_kind_have_no_preview() -> None:
    import diffusers

    pipe = build(diffusers.Ideogram4Pipeline, RECIPES["Ideogram4Pipeline"])  # The channels of its patches come last.
    with pytest.raises(NoPreview, match="the order of channels in its patches is unknown"):
        decode_latents(pipe, torch.zeros(1, 6, 4), (32, 48))
    pipe, latents, *_ = run("flux")
    with pytest.raises(NoPreview, match="latents of FluxPipeline cannot be decoded half-way"):
        decode_latents(pipe, latents[0][0], (16, 24))
    with pytest.raises(NoPreview, match="object has no VAE that makes images"):
        decode_latents(object(), latents[0], (16, 24))
    with pytest.raises(NoPreview, match="tokens make no image of"):
        decode_latents(pipe, latents[0], (24, 24))
    for shape in ((3, 4, 8, 8), (4, 4, 8, 8), (4, 8, 8, 4)):
        with pytest.raises(NoPreview, match=r"may have its axes in another order|the VAE needs 4 channels"):
            decode_latents(run("sd3")[0], torch.zeros(1, *shape), (16, 24))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("WanPipeline", {"num_frames": 9, "max_sequence_length": 16}),
        ("LTXPipeline", {"num_frames": 9, "max_sequence_length": 16}),
        ("LattePipeline", {"video_length": 5}),
        ("PixArtSigmaPipeline", {"use_resolution_binning": False}),
        ("ErnieImagePipeline", {}),
        ("Krea2Pipeline", {}),
        ("QwenImage21Pipeline", {}),
        ("HunyuanVideo15ImageToVideoPipeline", {"num_frames": 9}),
    ],
)
@pytest.mark.filterwarnings("ignore")
@standins()
def test_every_layout_is_shown_as_the_pipeline_decodes_it(
    name: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames for a VAE of images, tokens of a latent; patches in the scale of a batch norm; an image for a VAE of
    videos; and a size that only the input says."""
    import diffusers

    recipe = RECIPES.get(name, Recipe())
    pipe = build(getattr(diffusers, name), recipe)
    has_norm = hasattr(pipe.vae, "bn")
    if has_norm:  # So far from 0 that what is not scaled by it is nowhere near.
        pipe.vae.bn.running_mean.fill_(10)
        pipe.vae.bn.running_var.copy_(torch.linspace(0.5, 2, len(pipe.vae.bn.running_var)))
    given: list[torch.Tensor] = []
    decode = type(pipe.vae).decode

    def noted(vae: Any, latents: torch.Tensor, *args: Any, **more: Any) -> Any:
        given.append(latents)
        return decode(vae, latents, *args, **more)

    monkeypatch.setattr(type(pipe.vae), "decode", noted)
    pipe.save_pretrained(tmp_path)
    with Omni(tmp_path, device="cpu", progress=False) as omni:
        wish = {"height": 32, "width": 48, "seed": 3, "num_inference_steps": 4, **recipe.call, **settings}
        if "ImageToVideo" in name:
            wish |= {"height": None, "width": None, "image": Image.new("RGB", (32, 48), "red")}
        events = list(omni.generate("a cat", num_previews=3, stream=True, **wish))
    previews = [event.image for event in events if isinstance(event, Preview)]
    assert isinstance(events[-1], Done), events[-1]
    result = events[-1].result
    made = result.outputs[0]
    assert [image.size for image in previews] == [(made.width, made.height)] * 3, result.notes
    assert not any("preview" in note for note in result.notes)
    shown, whole = given[2], given[3]
    first = whole[:, :, :1] if whole.ndim == 5 else whole[: len(shown)]
    assert shown.shape == first.shape
    near, far = ((first - each).abs().mean() for each in (shown, -shown))
    assert near < far, "it is nearer to what is made than to its negative"
    assert not has_norm or near < first.abs().mean() / 2


@pytest.mark.filterwarnings("ignore")
def test_the_result_says_that_there_was_none() -> None:
    import diffusers

    with Omni(build(diffusers.StableAudioPipeline, RECIPES["StableAudioPipeline"]), progress=False) as omni:
        *_, done = omni.generate("rain", seconds=1, num_inference_steps=3, num_previews=1, stream=True)
    assert "there was no preview: StableAudioPipeline has no VAE that makes images" in done.result.notes
    with Omni(PIPELINES["flux"].build(0), progress=False) as omni:
        wish = {"height": 16, "width": 24, "max_sequence_length": 8, "num_inference_steps": 1}
        *_, done = omni.generate("a cat", num_previews=1, stream=True, **wish)
    assert "there was no preview: there is none within 1 step" in done.result.notes


@pytest.mark.parametrize(
    ("num_previews", "num_steps", "expected"),
    [(0, 9, set()), (3, 28, {7, 14, 21}), (9, 3, {1, 2}), (2, 1, set())],
)
def test_previews_are_spread_evenly(num_previews: int, num_steps: int, expected: set[int]) -> None:
    assert preview_steps(num_previews, num_steps) == expected
