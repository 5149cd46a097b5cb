"""Which requests are taken, and what each refusal says."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.server import Limits
from samovar.server.failures import Refusal
from samovar.server.protocol import ImageRequest, fields_of, request_schema

LIMITS = Limits(max_pixels=1_000_000, max_steps=50)


def read(**values: Any) -> ImageRequest:
    return ImageRequest.from_values({"prompt": "a cat", **values}, LIMITS)


def test_everything_arrives() -> None:
    asked = read(n=3, size="640x480", seed=7, num_inference_steps=50, guidance_scale=0, true_cfg_scale=2.5,
                 negative_prompt="dogs", output_format="webp", output_compression=80, stream=True, partial_images=3,
                 progress=True, deadline=1.5, priority=-3, cache=False, model="m", max_sequence_length=9,
                 quality="auto", background="opaque", response_format="b64_json", user="me")  # fmt: skip
    assert asked.params.given() == {
        "num_inference_steps": 50, "seed": 7, "height": 480, "width": 640, "guidance_scale": 0, "true_cfg_scale": 2.5,
        "negative_prompt": "dogs", "num_outputs_per_prompt": 3, "max_sequence_length": 9,
    }  # fmt: skip
    assert (asked.output_format, asked.compression, asked.is_streamed, asked.num_previews) == ("webp", 80, True, 3)
    assert (asked.has_progress, asked.deadline_s, asked.priority, asked.is_cached) == (True, 1.5, -3, False)
    assert asked.model == "m"


def test_null_is_the_same_as_nothing() -> None:
    nothing = {name: None for name in fields_of(LIMITS, is_edit=False) if name != "prompt"}
    assert read(**nothing) == read() == read(size="auto")


@pytest.mark.parametrize(
    ("values", "param", "code", "message"),
    [
        ({"prompt": " \n"}, "prompt", "missing_required_parameter", "Say what to draw"),
        ({"prompt": "x" * 32_001}, "prompt", "string_above_max_length", "32001 characters; at most 32000"),
        ({"prompt": ["a cat"]}, "prompt", "invalid_type", "prompt must be text, not ['a cat']"),
        ({"steps": 4}, "steps", "unknown_field", "Did you mean 'num_inference_steps'"),
        ({"num_inference_step": 4}, "num_inference_step", "unknown_field", "Did you mean 'num_inference_steps'?"),
        ({"n": 0}, "n", "invalid_value", "n must be from 1 to 10, not 0"),
        ({"n": True}, "n", "invalid_type", "n must be a whole number, not True"),
        ({"n": 1.0}, "n", "invalid_type", "not 1.0"),
        ({"num_inference_steps": 51}, "num_inference_steps", "invalid_value", "from 1 to 50"),
        ({"seed": 2**63}, "seed", "invalid_value", "seed must be from 0 to"),
        ({"seed": -1}, "seed", "invalid_value", "not -1"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "invalid_value", "seed + n must stay within"),
        ({"response_format": "url"}, "response_format", "unsupported_value", "Give b64_json"),
        ({"output_format": "exe"}, "output_format", "invalid_value", "one of png, jpeg, webp"),
        ({"quality": "high"}, "quality", "unsupported_value", "Leave it out"),
        ({"background": "transparent"}, "background", "unsupported_value", "cannot be served"),
        ({"output_compression": 50}, "output_compression", "invalid_value", "a png loses nothing"),
        ({"partial_images": 2}, "partial_images", "invalid_value", "needs stream=true"),
        ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value", "from 0 to 3"),
        ({"stream": "true"}, "stream", "invalid_type", "true or false, not 'true'"),
        ({"guidance_scale": "3"}, "guidance_scale", "invalid_type", "a number, not '3'"),
        ({"deadline": 0}, "deadline", "invalid_value", "deadline must be from 0.001"),
        ({"lora": {"path": "/etc"}}, "lora", "unknown_field", "is no known field"),
        ({"size": "1001x1000"}, "size", "size_above_limit", "1,001,000 pixels; at most 1,000,000"),
        ({"strength": 0.5}, "strength", "unknown_field", "is no known field"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(values: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(**values)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert message in refused.value.message


@pytest.mark.parametrize(
    "size", ["", "512", "512x", "x512", "0x512", "-1x5", "1_000x512", "\uff15\uff11\uff12x512", " 512x512",
             "512x512\n", "512X512", "512\u00d7512", "5.0x5", "0512x512", "99999x99999", "65537x16000", "100000x1",
             "auto ", "Auto"]
)  # fmt: skip
def test_sizes_are_read_strictly(size: str) -> None:
    with pytest.raises(Refusal) as refused:
        read(size=size)
    assert refused.value.param == "size"


@pytest.mark.parametrize(("kind", "most"), [("webp", 16_383), ("jpeg", 65_500)])
def test_a_picture_that_its_format_cannot_hold_is_refused(kind: str, most: int) -> None:
    assert read(size=f"{most}x8", output_format=kind).params.width == most
    assert read(size=f"8x{most + 1}").params.height == most + 1
    with pytest.raises(Refusal, match=f"{kind} holds at most {most} pixels a side") as refused:
        read(size=f"8x{most + 1}", output_format=kind)
    assert (refused.value.status, refused.value.param) == (400, "output_format")


def test_forms_say_the_same_in_text() -> None:
    texts = {"prompt": "a cat", "n": "2", "seed": "7", "true_cfg_scale": "1.5", "stream": "true", "strength": "0.5"}
    asked = ImageRequest.from_form(texts, LIMITS)
    assert (asked.params.num_outputs_per_prompt, asked.params.seed, asked.params.strength) == (2, 7, 0.5)
    assert asked.is_streamed
    for name, text in (("n", "1_0"), ("n", "\uff12"), ("seed", "7.0"), ("stream", "yes"), ("true_cfg_scale", "nan")):
        with pytest.raises(Refusal) as refused:
            ImageRequest.from_form({"prompt": "a cat", name: text}, LIMITS)
        assert refused.value.param == name


def test_the_schema_says_what_is_checked() -> None:
    schema = request_schema(LIMITS, is_edit=False)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]
    assert set(schema["properties"]) == set(fields_of(LIMITS, is_edit=False))
    assert schema["properties"]["num_inference_steps"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 50}
    assert request_schema(LIMITS, is_edit=True)["required"] == ["prompt", "image"]
