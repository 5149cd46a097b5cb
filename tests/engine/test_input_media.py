"""Which inputs a pipeline takes and needs is read from its call; they arrive as it takes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.builder import build
from pipelines.recipes import RECIPES
from samovar import Omni
from samovar.core.errors import SettingError
from samovar.engine.input_media import Inputs, find_inputs
from samovar.engine.request import Request
from samovar.media import Audio, Video

PICTURE = Image.new("RGB", (24, 16), (200, 60, 20))
MASK = Image.new("L", (24, 16), 255)
FILM = Video(np.zeros((5, 16, 24, 3), np.uint8), 8.0)
SOUND = Audio(np.linspace(-1, 1, 200, dtype=np.float32).reshape(2, 100), 100)


@pytest.mark.parametrize(
    ("name", "takes", "needs"),
    [
        ("FluxPipeline", {"ip_adapter_image", "negative_ip_adapter_image"}, set()),
        ("FluxImg2ImgPipeline", {"image"}, set()),  # Its own checks ask for it.
        ("FluxControlNetPipeline", {"control_image"}, set()),
        ("WanImageToVideoPipeline", {"image", "last_image"}, {"image"}),
        ("WanVACEPipeline", {"video", "mask", "reference_images"}, set()),
        ("WanAnimatePipeline", {"image", "pose_video", "face_video"}, {"image", "pose_video", "face_video"}),
        ("StableAudioPipeline", {"initial_audio_waveforms"}, set()),
        ("Cosmos2_5_TransferPipeline", {"controls"}, {"controls"}),
    ],
)
def test_what_a_pipeline_takes_and_needs(name: str, takes: set[str], needs: set[str]) -> None:
    import diffusers

    found = find_inputs(getattr(diffusers, name))
    assert takes <= set(found.takes)
    assert set(found.needs) == needs


def test_rows_of_images_are_taken_upright_with_their_gaps() -> None:
    rows = [[PICTURE.convert("RGBA"), PICTURE], [PICTURE, None]]
    inputs = Inputs(("image",))
    found = inputs.prepare(inputs.check({"image": rows}, "P"), None)["image"]
    assert [[image and image.mode for image in row] for row in found] == [["RGB", "RGB"], ["RGB", None]]
    assert [image.size for image in Request("a cat", image=rows).images] == [(24, 16)] * 3
    with pytest.raises(SettingError, match="image must be a PIL image"):
        Request("a cat", image=[[None], []])


def test_our_words_are_the_pipelines() -> None:
    inputs = Inputs(("image", "mask_image", "src_audio", "control_video"))
    given = {"image": PICTURE, "mask": MASK, "audio": SOUND, "control_video": FILM}
    found = inputs.check(given, "P")
    assert inputs.check({**given, "mask": MASK.resize((49, 32))}, "P"), "of another size, but of the same shape"
    assert set(found) == {"image", "mask_image", "src_audio", "control_video"}
    call = inputs.prepare(found, 200)
    assert (call["image"].mode, call["mask_image"].mode) == ("RGB", "L")
    assert [frame.size for frame in call["control_video"]] == [(24, 16)] * 5
    assert call["src_audio"].shape == (2, 200), "at the model's rate"
    assert Inputs(("image",), ("image",)).argument("control_image", "P") == "image"


@pytest.mark.parametrize(
    ("inputs", "given", "message"),
    [
        (Inputs(), {"mask": MASK}, r"P takes no mask\. It starts from text alone"),
        (Inputs(("image",)), {"mask": MASK}, r"P takes no mask\. It takes image"),
        (Inputs(("image",)), {"image": FILM}, "image must be an image, not a video"),
        (Inputs(("video",)), {"video": PICTURE}, "video must be a video, not an image"),
        (Inputs(("video",)), {"video": SOUND}, "video must be a video, not a sound"),
        (Inputs(("video",)), {"video": "film.mp4"}, r"video must be a video, not 'film.mp4': .*read_video\(file"),
        (Inputs(("mask_image",)), {"mask": MASK, "mask_image": MASK}, "mask and mask_image are the same input"),
        (
            Inputs(("image",), ("image",)),
            {"image": PICTURE, "control_image": PICTURE},
            "For P, image and control_image are the same input. Give one of them",
        ),
        (
            Inputs(("image", "mask_image")),
            {"image": PICTURE, "mask": MASK.resize((24, 24))},
            "The mask is 24x24 and the image 24x16, which is another shape",
        ),
    ],
)
def test_what_cannot_be_taken_is_said(inputs: Inputs, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        inputs.check(given, "P")


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        (("image",), "P needs an image. Give it as image."),
        (("control_image",), "P needs a control image. Give it as image."),
        (("image", "control_image"), "P needs an image. Give it as image."),
        (("control_video",), "P needs a video as control_video"),
        (("pose_video",), "P needs a video as pose_video. Give it as pose_video."),
        (("video",), "P needs a video. Give it as video."),
        (("control_mask",), "P needs a mask. Give it as mask."),
    ],
)
def test_what_is_missing_is_said(needs: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        Inputs(needs, needs).check_missing({}, "P")
    assert message in str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return str(path)


FAST: dict[str, Any] = {"num_inference_steps": 3, "max_sequence_length": 8, "seed": 1}


def pixels(omni: Omni, **how: Any) -> Any:
    return np.asarray(omni.generate("a cat", **FAST, **how)[0].images[0])


def test_a_flux_folder_does_img2img_and_inpainting(folder: str) -> None:
    with Omni(folder, device="cpu", task="img2img") as omni:
        with pytest.raises(SettingError, match=r"refuses these settings.* It was given no image"):
            omni.generate("a cat", **FAST)
        red = pixels(omni, image=PICTURE)
        assert red.shape == (16, 24, 3)
        assert not np.array_equal(red, pixels(omni, image=Image.new("RGB", (24, 16), "blue")))
    with Omni(folder, device="cpu", task="inpaint") as omni:
        with pytest.raises(SettingError, match="needs a mask, or an image with an alpha channel"):
            omni.generate("a cat", image=PICTURE, **FAST)
        half = MASK.copy()
        half.paste(0, (0, 0, 12, 16))
        transparent = PICTURE.copy()
        transparent.putalpha(half.point(lambda level: 255 - level))
        masked = pixels(omni, image=PICTURE, mask=half)
        assert np.array_equal(masked, pixels(omni, image=transparent)), "the transparent part is the mask"
        assert not np.array_equal(masked, pixels(omni, image=PICTURE, mask=MASK))


def test_an_image_is_taken_upright(folder: str) -> None:
    lying = Image.new("RGB", (24, 16), "red")
    lying.paste("blue", (0, 0, 12, 16))
    turned = lying.copy()
    turned.getexif()[0x0112] = 6
    with Omni(folder, device="cpu", task="img2img") as omni:
        assert pixels(omni, image=turned).shape == (16, 8, 3) or pixels(omni, image=turned).shape[0] == 24
        upright = lying.transpose(Image.Transpose.ROTATE_270)
        assert np.array_equal(pixels(omni, image=turned), pixels(omni, image=upright))


def test_kontext_obeys_the_size() -> None:
    from diffusers import FluxKontextPipeline

    flux = tiny_flux_pipeline()
    pipe = FluxKontextPipeline(**flux.components)
    pipe.set_progress_bar_config(disable=True)
    with Omni(pipe) as omni:
        assert pixels(omni, height=16, width=32).shape == (16, 32, 3)
        assert pixels(omni, image=PICTURE).shape == (16, 24, 3), "the size of the image"


def test_a_controlnet_says_which_image_it_lacks() -> None:
    pipe = PIPELINES["flux-controlnet"].build(0)
    with Omni(pipe) as omni:
        with pytest.raises(SettingError, match=r"refuses these settings.* It was given no control_image"):
            omni.generate("a cat", **FAST)
        one, other = (pixels(omni, height=16, width=24, control_image=image) for image in (PICTURE, MASK))
        assert not np.array_equal(one, other)


def test_an_image_to_animate_sets_the_shape_of_a_video_and_not_its_size() -> None:
    from samovar import OmniDiffusionSamplingParams
    from samovar.engine import PipelineFacts, Request
    from samovar.engine.outputs import OutputKind

    takes = frozenset({"prompt", "image", "height", "width"})
    facts = PipelineFacts(
        "P", takes, 16, output=OutputKind("video", "frames"), inputs=Inputs(("image",)), size=(480, 832)
    )
    photo = Image.new("RGB", (4000, 3000))
    call = facts.check(Request("", OmniDiffusionSamplingParams(), photo))
    assert (call["width"], call["height"]) == (720, 544)
    facts = replace(facts, defaults=OmniDiffusionSamplingParams(width=128, height=96))
    call = facts.check(Request("", OmniDiffusionSamplingParams(), photo))
    assert (call["width"], call["height"]) == (128, 96), "the model's own size counts, if it has one"


def test_a_last_image_needs_a_transformer_for_two() -> None:
    """One with an image encoder; those without take the images as frames."""
    import diffusers

    recipe = RECIPES["WanImageToVideoPipeline"]
    for transformer, components, takes in (
        ({}, recipe.components, False),
        ({"pos_embed_seq_len": 10}, recipe.components, True),
        ({"image_dim": None, "added_kv_proj_dim": None}, {**recipe.components, "image_encoder": None}, True),
    ):
        changed = replace(recipe, transformer={**recipe.transformer, **transformer}, components=components)
        with Omni(build(diffusers.WanImageToVideoPipeline, changed), progress=False) as omni:
            how = {"num_frames": 5, "width": 32, "height": 32, "num_inference_steps": 1, "max_sequence_length": 16}
            given = {"image": PICTURE, "last_image": PICTURE}
            if takes:
                assert omni.generate("a cat", **given, **how)[0].videos
                continue
            with pytest.raises(SettingError, match="takes last_image with a transformer for two images, and this one"):
                omni.generate("a cat", **given, **how)
