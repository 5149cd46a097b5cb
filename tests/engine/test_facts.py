"""What a pipeline takes: checked without it."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import ImagePipelineOutput
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import SettingError
from samovar.engine import PipelineFacts, Request
from samovar.engine.facts import facts_of
from samovar.engine.input_media import Inputs
from samovar.engine.outputs import OutputKind

TAKES = frozenset({"prompt", "height", "width", "num_inference_steps", "generator"})
TEXT = PipelineFacts("TextPipeline", TAKES, 16, OmniDiffusionSamplingParams(height=64, num_inference_steps=9))
EDIT = PipelineFacts("EditPipeline", TAKES | {"image", "strength"}, 16, inputs=Inputs(("image",)))
MASKED = ("image", "mask_image")
PAINT = PipelineFacts("PaintPipeline", TAKES | set(MASKED), 16, inputs=Inputs(MASKED, MASKED))
PICTURE = Image.new("RGBA", (70, 45), (10, 20, 30, 255))


def ask(image: Any = None, **params: Any) -> Request:
    return Request("a cat", OmniDiffusionSamplingParams(**params), image)


def test_defaults_are_used_and_what_is_ours_is_not_passed_on() -> None:
    assert TEXT.check(ask(seed=1, num_outputs_per_prompt=2)) == {"height": 64, "num_inference_steps": 9}
    assert TEXT.check(ask(height=32))["height"] == 32
    assert not TEXT.can_edit
    assert replace(TEXT, inputs=Inputs(("input_images",))).can_edit, "whatever its argument is called"


@pytest.mark.parametrize(
    ("facts", "request_", "message"),
    [
        (TEXT, ask(height=18), "height must be a multiple of 16 for this model, not 18: try 16 or 32"),
        (TEXT, ask(width=2), "width must be a multiple of 16 for this model, not 2: try 16"),
        (TEXT, ask(true_cfg_scale=2.0), "TextPipeline does not take true_cfg_scale"),
        (TEXT, ask(PICTURE), r"^TextPipeline takes no image\. To start from one, .* such as task='img2img'\.$"),
        (PAINT, ask(PICTURE.convert("RGB")), "needs a mask, or an image with an alpha channel"),
    ],
)
def test_what_it_does_not_take_is_refused(facts: PipelineFacts, request_: Request, message: str) -> None:
    with pytest.raises(SettingError, match=message) as refused:
        facts.check(request_)
    assert refused.value.param in ("height", "width", "true_cfg_scale", "image")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"width": 512}, ""),
        ({"width": 520}, "^width must be at most 512 for this model, not 520.$"),
        ({"num_frames": 253}, ""),
        ({"num_frames": 257}, "^This model makes at most 253 frames, not 257. Ask for fewer.$"),
        ({"seconds": 30.0}, "^This model makes at most 253 frames, not 361. Ask for fewer.$"),
    ],
)
def test_what_a_model_has_no_positions_for_is_refused(params: dict[str, Any], message: str) -> None:
    output = OutputKind("video", "frames", fps=12.0, frames_argument="num_frames", frames=81, frame_group=4)
    facts = PipelineFacts("VideoPipeline", TAKES | {"num_frames"}, 8, output=output, positions=64)
    if not message:
        facts.check(ask(**params))
        return
    with pytest.raises(SettingError, match=message) as refused:
        facts.check(ask(**params))
    assert refused.value.param in params
    assert OutputKind("video", "frames", frames=16, frame_group=8).most_frames(4) == 32, "with no single first frame"


def test_a_image_says_how_large_the_new_one_is() -> None:
    call = EDIT.check(ask(PICTURE, strength=0.5))
    assert (call["width"], call["height"], call["strength"]) == (64, 32, 0.5)
    image = EDIT.inputs_of(ask(PICTURE))["image"]
    assert (image.mode, image.size) == ("RGB", (70, 45))
    assert EDIT.check(ask(PICTURE, height=48))["height"] == 48
    assert EDIT.check(ask(PICTURE, height=96))["width"] == 144, "the shape of the picture"
    assert EDIT.check(ask(PICTURE, width=128))["height"] == 80
    both = EDIT.check(ask(PICTURE, height=48, width=32))
    assert (both["height"], both["width"]) == (48, 32)
    assert EDIT.check(ask(Image.new("RGB", (3, 3))))["width"] == 16


def test_what_is_transparent_is_drawn_anew() -> None:
    picture = PICTURE.copy()
    picture.putpixel((5, 6), (0, 0, 0, 0))
    mask = PAINT.inputs_of(ask(picture))["mask_image"]
    assert (mask.getpixel((5, 6)), mask.getpixel((0, 0))) == (255, 0)


def test_facts_are_read_off_a_pipeline() -> None:
    class Unguided:
        vae_scale_factor = 8

        def __call__(self, prompt: str, height: int, eta: float | None = None) -> ImagePipelineOutput: ...

    facts = facts_of(Unguided(), OmniDiffusionSamplingParams(seed=1))
    assert facts.takes == {"prompt", "height", "eta"}
    assert (facts.multiple, facts.needs, facts.defaults.seed) == (16, ("height",), 1)
    assert facts.check(ask(height=32, options={"eta": 1})) == {"height": 32, "eta": 1}
    with pytest.raises(SettingError, match="Unguided needs height"):
        facts.check(ask())
    with pytest.raises(SettingError, match="Unguided does not take num_inference_steps"):
        facts.check(ask(num_inference_steps=2))


def test_a_image_that_is_cut_off_is_refused() -> None:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    cut = Image.open(io.BytesIO(file.getvalue()[: len(file.getvalue()) // 2]))
    with pytest.raises(SettingError, match=r"The image cannot be read: .*\. Is the file complete\?"):
        EDIT.check(ask(cut))


@pytest.mark.parametrize(
    ("config", "extra", "multiple"),
    [
        ({"patch_size": 2}, {}, 16),  # SD3
        ({"patch_size": 1}, {}, 8),  # Sana
        ({"patch_size": (1, 2, 2)}, {}, 16),  # video models
        ({"patch_size": 1}, {"_pack_latents": None}, 16),  # FLUX
        ({}, {"_patchify_latents": None}, 16),  # FLUX.2
        ({}, {}, 16),
    ],
)
def test_sizes_are_multiples_of_a_token(config: dict[str, Any], extra: dict[str, Any], multiple: int) -> None:
    transformer = SimpleNamespace(config=config)

    def call(self: Any, prompt: str) -> ImagePipelineOutput: ...

    pipeline = type("Pipeline", (), {"__call__": call, "vae_scale_factor": 8, **extra})()
    pipeline.transformer = transformer
    assert facts_of(pipeline, OmniDiffusionSamplingParams()).multiple == multiple


def test_a_schedule_is_for_one_number_of_steps() -> None:
    takes = frozenset({"num_inference_steps"})
    facts = PipelineFacts(
        "Pipeline", takes, 16, OmniDiffusionSamplingParams(num_inference_steps=10), scheduled_steps=10
    )
    other = OmniDiffusionSamplingParams(num_inference_steps=4)
    facts.check(Request(""))
    facts.check(Request("", other, exact=True))
    with pytest.raises(SettingError, match="num_inference_steps=4, but the cache has a schedule for 10 steps"):
        facts.check(Request("", other))
