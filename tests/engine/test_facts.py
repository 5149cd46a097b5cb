"""What a pipeline takes and makes: a request is checked without it, and has the pipeline's arguments then."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from diffusers import ImagePipelineOutput
from PIL import Image

from pipelines.builder import build
from pipelines.recipes import RECIPES
from samovar import OmniDiffusionSamplingParams as Params
from samovar.core.errors import SettingError
from samovar.engine import PipelineFacts, Request
from samovar.engine.facts import facts_of
from samovar.engine.inputs import Inputs, find_inputs
from samovar.engine.outputs import OutputKind
from samovar.media import Audio, Video

IMAGE = Image.new("RGBA", (70, 45), (10, 20, 30, 255))
MASK = Image.new("L", (70, 45), 255)
FILM = Video(np.zeros((5, 16, 24, 3), np.uint8), 8.0)
SOUND = Audio(np.linspace(-1, 1, 200, dtype=np.float32).reshape(2, 100), 100)
TAKES = frozenset({"prompt", "height", "width", "num_inference_steps", "generator"})
TEXT = PipelineFacts("TextPipeline", TAKES, 16, Params(height=64, num_inference_steps=9))
EDIT = PipelineFacts("EditPipeline", TAKES | {"image", "strength"}, 16, inputs=Inputs(("image",)))
PAINT = PipelineFacts(
    "PaintPipeline", TAKES | {"image"}, 16, inputs=Inputs(("image", "mask_image"), mask="mask_image"), needs=("image",)
)
FILMS = OutputKind("video", "frames", fps=12.0, frames_argument="num_frames", frames=81, frame_group=4)
VIDEO = PipelineFacts("VideoPipeline", TAKES | {"num_frames"}, 8, output=FILMS, max_side=512, max_frames=253)


def ask(image: Any = None, how: dict[str, Any] | None = None, **params: Any) -> Request:
    return Request("a cat", Params(**params), image, **(how or {}))


def called(facts: PipelineFacts, request: Request) -> dict[str, Any]:
    """The arguments of a request that passes."""
    checked = facts.check(request)
    assert facts.check(checked) is checked, "once is enough"
    return dict(checked.arguments or {})


def test_defaults_are_used_and_what_is_ours_is_not_passed_on() -> None:
    assert called(TEXT, ask(seed=1, num_outputs_per_prompt=2)) == {"height": 64, "num_inference_steps": 9}
    assert called(TEXT, ask(height=32))["height"] == 32
    drawn = {TEXT.check(ask()).params.seed for _ in range(5)}
    assert len(drawn) == 5, "a seed is drawn for a request that names none"
    assert TEXT.check(ask(seed=0)).params.seed == 0
    assert not TEXT.can_edit
    assert replace(TEXT, inputs=Inputs(("input_images",))).can_edit, "whatever its argument is called"


@pytest.mark.parametrize(
    ("facts", "request_", "message"),
    [
        (TEXT, ask(height=18), "^height must be a multiple of 16 for this model, not 18: try 16 or 32.$"),
        (TEXT, ask(true_cfg_scale=2.0), "TextPipeline does not take true_cfg_scale"),
        (TEXT, ask(num_frames=9), "TextPipeline makes images of its own length, and takes no num_frames"),
        (TEXT, ask(options={"num_inference_step": 2}), "Did you mean 'num_inference_steps'"),
        (TEXT, ask(options={"output_type": "pil"}), "output_type is for the engine to set. Leave it out"),
        (TEXT, ask(options={"num_images_per_prompt": 2}), "Use num_outputs_per_prompt instead"),
        (
            replace(TEXT, types={"height": (int,)}),
            ask(options={"height": "2"}),
            "height must be a whole number, not '2'",
        ),
        (TEXT, ask(how={"tolerance": 0.1}), "Choose cache='auto'"),
        (replace(TEXT, adapters=("pixel",)), ask(how={"lora": "pixle"}), "Did you mean 'pixel'"),
        (replace(TEXT, takes=TAKES - {"prompt"}), ask(), "takes no prompt. Leave it empty"),
        (
            TEXT,
            ask(IMAGE),
            r"^TextPipeline takes no image\. .* To start from one, .* such as 'img2img' or 'image2video'\.$",
        ),
        (TEXT, ask(how={"inputs": {"mask": MASK}}), r"TextPipeline takes no mask\. It starts from text alone"),
        (EDIT, ask(how={"inputs": {"mask": MASK}}), r"EditPipeline takes no mask\. It takes image"),
        (PAINT, ask(), "PaintPipeline needs image. Give it by its name"),
        (PAINT, ask(IMAGE.convert("RGB")), "needs a mask, or an image with an alpha channel"),
        (PAINT, ask(IMAGE, {"inputs": {"mask": MASK.resize((45, 45))}}), "The mask is 45x45 and the image 70x45"),
        (PAINT, ask(IMAGE, {"inputs": {"mask": MASK, "mask_image": MASK}}), "mask and mask_image are the same input"),
        (VIDEO, ask(width=520), "^width must be at most 512 for this model, not 520.$"),
        (VIDEO, ask(seconds=30.0), "^This model makes at most 253 frames, not 361. Ask for fewer.$"),
    ],
)
def test_what_it_does_not_take_is_refused(facts: PipelineFacts, request_: Request, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        facts.check(request_)
    assert refused.value.param is not None


def test_what_is_within_the_limits_passes() -> None:
    assert called(VIDEO, ask(width=512, num_frames=253))["num_frames"] == 253
    assert called(VIDEO, ask(seconds=1.0))["num_frames"] == 13
    assert OutputKind("video", "frames", frames=16, frame_group=8).max_frames(4) == 32, "with no single first frame"
    assert called(replace(TEXT, types={"height": (float,)}), ask(options={"height": 32}))["height"] == 32


def test_an_image_says_how_large_the_new_one_is() -> None:
    call = called(EDIT, ask(IMAGE, strength=0.5))
    assert (call["width"], call["height"], call["strength"]) == (64, 32, 0.5)
    assert (call["image"].mode, call["image"].size) == ("RGB", (70, 45))
    for given, expected in (
        ({"height": 48}, (64, 48)),
        ({"height": 96}, (144, 96)),
        ({"width": 128}, (128, 80)),
        ({"height": 48, "width": 32}, (32, 48)),
    ):
        call = called(EDIT, ask(IMAGE, **given))
        assert (call["width"], call["height"]) == expected
    assert called(EDIT, ask(Image.new("RGB", (3, 3))))["width"] == 16
    small = replace(EDIT, takes=EDIT.takes | {"_auto_resize", "max_area"})
    assert called(small, ask(IMAGE)) | {"image": 0} == {
        "image": 0, "width": 64, "height": 32, "max_area": 2048, "_auto_resize": False
    }  # fmt: skip


def test_an_image_to_animate_sets_the_shape_of_a_video_and_not_its_size() -> None:
    facts = PipelineFacts(
        "P", TAKES, 16, output=OutputKind("video", "frames"), inputs=Inputs(("image",)), size=(480, 832)
    )
    photo = Image.new("RGB", (4000, 3000))
    call = called(facts, ask(photo))
    assert (call["width"], call["height"]) == (720, 544)
    call = called(replace(facts, defaults=Params(width=128, height=96)), ask(photo))
    assert (call["width"], call["height"]) == (128, 96), "the model's own size counts, if it has one"


def test_inputs_arrive_as_the_pipeline_takes_them() -> None:
    image = IMAGE.copy()
    image.putpixel((5, 6), (0, 0, 0, 0))
    mask = called(PAINT, ask(image))["mask_image"]
    assert (mask.getpixel((5, 6)), mask.getpixel((0, 0))) == (255, 0), "what is transparent is redrawn"
    inputs = Inputs(("image", "mask_image", "src_audio", "control_video", "reference_images"))
    given = {"image": [[IMAGE, None]], "mask": MASK, "audio": SOUND, "control_video": FILM, "reference_images": IMAGE}
    call = inputs.prepared(given, "P", 200)
    assert call["image"][0][0].mode == "RGB"
    assert call["image"][0][1] is None, "rows of images may have gaps"
    assert call["mask_image"].mode == "L"
    assert [frame.size for frame in call["control_video"]] == [(24, 16)] * 5
    assert call["src_audio"].shape == (2, 200), "at the model's rate"
    assert [each.mode for each in call["reference_images"]] == ["RGB"], "an argument that takes several"
    assert Inputs(("control_image",)).argument("image", "P") == "control_image"
    turned = Image.new("RGB", (24, 16))
    turned.getexif()[0x0112] = 6
    assert called(EDIT, ask(turned, width=32, height=32))["image"].size == (16, 24), "upright"


def test_inputs_of_another_kind_or_that_are_cut_off_are_refused() -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    cut = Image.open(io.BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))
    for takes, value, message in (
        ("image", FILM, "image must be an image, not a video"),
        ("video", SOUND, "video must be a video, not a sound"),
        ("video", "film.mp4", r"video must be a video, not 'film.mp4'; .*read_video\(file"),
        ("audio", [IMAGE], "audio must be a sound, not an image"),
        ("image", cut, r"The image cannot be read: .*\. Is the file complete\?"),
    ):
        with pytest.raises(SettingError, match=message):
            Inputs((takes,)).prepared({takes: value}, "P", None)


@pytest.mark.parametrize(
    ("name", "takes", "needs"),
    [
        ("FluxControlNetPipeline", {"control_image"}, set()),  # Its own checks ask for it.
        ("WanImageToVideoPipeline", {"image", "last_image"}, {"image"}),
        ("WanAnimatePipeline", {"image", "pose_video", "face_video"}, {"image", "pose_video", "face_video"}),
        ("Cosmos2_5_TransferPipeline", {"controls"}, {"controls"}),
    ],
)
def test_the_inputs_of_a_pipeline_are_read_from_its_signature(name: str, takes: set[str], needs: set[str]) -> None:
    import diffusers

    found = find_inputs(getattr(diffusers, name))
    assert takes <= set(found.takes)
    assert set(found.needs) == needs


def test_a_server_can_send_images_alone() -> None:
    Inputs(("image",), ("image",)).check_sendable(("image",), "P")
    for needs in ("video", "pose_video"):
        with pytest.raises(SettingError, match=f"P needs {needs}, which requests to a server cannot send"):
            Inputs((needs,), (needs,)).check_sendable(("image", "video"), "P")


def test_facts_are_read_off_a_pipeline() -> None:
    class Plain:
        vae_scale_factor = 8

        def __call__(self, prompt: str, height: int, eta: float | None = None) -> ImagePipelineOutput: ...

    facts = facts_of(Plain(), Params(seed=1))
    assert facts.takes == {"prompt", "height", "eta"}
    assert (facts.multiple, facts.needs, facts.defaults.seed) == (16, ("height",), 1)
    assert called(facts, ask(height=32, options={"eta": 1})) == {"height": 32, "eta": 1}
    for request, message in (
        (ask(), "Plain needs height"),
        (ask(num_inference_steps=2), "Plain does not take num_inference_steps"),
    ):
        with pytest.raises(SettingError, match=message):
            facts.check(request)


@pytest.mark.parametrize(
    ("config", "extra", "multiple"),
    [
        ({"patch_size": 2}, {}, 16),  # SD3
        ({"patch_size": (1, 2, 2)}, {}, 16),  # video models
        ({"patch_size": 1}, {"_pack_latents": None}, 16),  # FLUX
        ({}, {"_patchify_latents": None}, 16),  # FLUX.2
        ({"patch_size": 1, "in_channels": 64}, {"vae": SimpleNamespace(config={"z_dim": 16})}, 16),  # in its blocks
    ],
)
def test_sizes_are_multiples_of_a_token(config: dict[str, Any], extra: dict[str, Any], multiple: int) -> None:
    def call(self: Any, prompt: str) -> ImagePipelineOutput: ...

    pipeline = type("Pipeline", (), {"__call__": call, "vae_scale_factor": 8, **extra})()
    pipeline.transformer = SimpleNamespace(config=config)
    assert facts_of(pipeline, Params()).multiple == multiple


def test_a_schedule_is_for_one_number_of_steps() -> None:
    facts = replace(TEXT, defaults=Params(num_inference_steps=10), scheduled_steps=10)
    facts.check(ask())
    facts.check(ask(how={"exact": True}, num_inference_steps=4))
    with pytest.raises(SettingError, match="num_inference_steps=4, but the cache has a schedule for 10 steps"):
        facts.check(ask(num_inference_steps=4))


@pytest.mark.filterwarnings("ignore")
def test_a_sound_starts_where_it_is_asked_to() -> None:
    import diffusers

    facts = facts_of(build(diffusers.StableAudioPipeline, RECIPES["StableAudioPipeline"]), Params())
    call = called(facts, Request("rain", Params(seconds=1.0, options={"audio_start_in_s": 0.5})))
    assert call["audio_end_in_s"] == 1.5
    assert facts_of(build(diffusers.AceStepPipeline, RECIPES["AceStepPipeline"]), Params()).output.seconds == 60.0
