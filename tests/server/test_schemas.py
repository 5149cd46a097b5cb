"""Which requests are taken, and what each refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from samovar.server import Limits
from samovar.server.decode_worker import Refused, read_object
from samovar.server.errors import ApiError
from samovar.server.schemas import EditBody, GenerationBody, read_body, read_texts, request_schema

LIMITS = Limits(max_pixels=1_000_000, max_steps=50)


def read(**values: Any) -> GenerationBody:
    return read_body(GenerationBody, {"prompt": "a cat", **values}, LIMITS)


def read_form(texts: dict[str, str], limits: Limits) -> EditBody:
    return read_body(EditBody, read_texts(EditBody, texts, {}), limits)


def test_everything_arrives() -> None:
    asked = read(n=3, size="640x480", seed=7, num_inference_steps=50, guidance_scale=0, true_cfg_scale=2.5,
                 negative_prompt="dogs", output_format="webp", output_compression=80, stream=True, partial_images=3,
                 progress=True, deadline=1.5, priority=-3, cache=False, model="m", max_sequence_length=9,
                 quality="auto", background="opaque", response_format="b64_json", user="me")  # fmt: skip
    assert asked.params().given() == {
        "num_inference_steps": 50, "seed": 7, "height": 480, "width": 640, "guidance_scale": 0, "true_cfg_scale": 2.5,
        "negative_prompt": "dogs", "num_outputs_per_prompt": 3, "max_sequence_length": 9,
    }  # fmt: skip
    assert (asked.format, asked.output_compression, asked.stream, asked.partial_images) == ("webp", 80, True, 3)
    assert (asked.progress, asked.deadline, asked.priority, asked.cache) == (True, 1.5, -3, False)
    assert asked.model == "m"


def test_null_is_the_same_as_nothing() -> None:
    nothing = {name: None for name in GenerationBody.model_fields if name != "prompt"}
    assert read(**nothing) == read()
    assert read(size="auto").params() == read().params()


@pytest.mark.parametrize(
    ("values", "param", "code", "message"),
    [
        ({"prompt": " \n"}, "prompt", "invalid_value", "prompt is empty. Say what to make"),
        ({"prompt": None}, "prompt", "invalid_type", "prompt should be a valid string, not None"),
        ({"prompt": "x" * 32_001}, "prompt", "string_above_max_length", "32001 characters; the limit is 32000"),
        ({"prompt": ["a cat"]}, "prompt", "invalid_type", "prompt should be a valid string, not ['a cat']"),
        ({"steps": 4}, "steps", "unknown_field", "Did you mean 'num_inference_steps'"),
        ({"num_inference_step": 4}, "num_inference_step", "unknown_field", "Did you mean 'num_inference_steps'?"),
        ({"n": 0}, "n", "invalid_value", "n should be greater than or equal to 1, not 0"),
        ({"n": 11}, "n", "invalid_value", "n must be at most 10, not 11"),
        ({"n": True}, "n", "invalid_type", "n should be a valid integer, not True"),
        ({"n": 1.0}, "n", "invalid_type", "not 1.0"),
        ({"num_inference_steps": 51}, "num_inference_steps", "invalid_value", "must be at most 50"),
        ({"seed": 2**63}, "seed", "invalid_value", "seed should be less than or equal to"),
        ({"seed": -1}, "seed", "invalid_value", "not -1"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "invalid_value", "seed + n - 1 must be at most"),
        ({"response_format": "url"}, "response_format", "unsupported_value", "should be 'b64_json', not 'url'"),
        ({"output_format": "exe"}, "output_format", "unsupported_value", "should be 'png', 'jpeg' or 'webp'"),
        ({"quality": "best"}, "quality", "unsupported_value", "should be 'auto', 'high', 'medium', 'low', 'hd' or"),
        ({"tolerance": "fats"}, "tolerance", "unsupported_value", "'high' or 'fast', not 'fats'"),
        ({"tolerance": -0.1}, "tolerance", "invalid_value", "not -0.1"),
        ({"background": "red"}, "background", "unsupported_value", "should be 'auto', 'opaque' or 'transparent'"),
        ({"output_compression": 50}, "output_compression", "invalid_value", "png is lossless"),
        ({"partial_images": 2}, "partial_images", "invalid_value", "needs stream=true"),
        ({"partial_images": 4, "stream": True}, "partial_images", "invalid_value", "less than or equal to 3"),
        ({"stream": "true"}, "stream", "invalid_type", "a valid boolean, not 'true'"),
        ({"guidance_scale": "3"}, "guidance_scale", "invalid_type", "a valid number, not '3'"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "invalid_value", "a finite number"),
        ({"deadline": 0}, "deadline", "invalid_value", "deadline should be greater than or equal to 0.001"),
        ({"lora": {"name": "a", "path": "/etc"}}, "lora", "unknown_field", "lora: 'path' is not taken. Adapters are"),
        ({"lora": ["a", {"name": "b", "scale": "1"}]}, "lora", "invalid_value", "lora: scale: Input should be a valid"),
        ({"lora": 7}, "lora", "invalid_type", "lora should be a valid list, not 7"),
        ({"size": "1001x1000"}, "size", "size_above_limit", "1,001,000 pixels; the limit is 1,000,000"),
        ({"strength": 0.5}, "strength", "unknown_field", "is not a known field"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(values: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**values)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert message in refused.value.message


@pytest.mark.parametrize(
    "size", ["", "512", "512x", "x512", "0x512", "-1x5", "1_000x512", "\uff15\uff11\uff12x512", " 512x512",
             "512x512\n", "512X512", "512\u00d7512", "5.0x5", "0512x512", "99999x99999", "65537x16000", "100000x1",
             "auto ", "Auto"]
)  # fmt: skip
def test_sizes_are_read_strictly(size: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(size=size)
    assert refused.value.param == "size"


@pytest.mark.parametrize(("kind", "most"), [("webp", 16_383), ("jpeg", 65_500)])
def test_a_image_that_its_format_cannot_hold_is_refused(kind: str, most: int) -> None:
    assert read(size=f"{most}x8", output_format=kind).params().width == most
    assert read(size=f"8x{most + 1}").params().height == most + 1
    with pytest.raises(ApiError, match=f"{kind} holds at most {most} pixels a side") as refused:
        read(size=f"8x{most + 1}", output_format=kind)
    assert (refused.value.status, refused.value.param) == (400, "output_format")


def test_forms_say_the_same_in_text() -> None:
    texts = {"prompt": "a cat", "n": "2", "seed": "7", "true_cfg_scale": "1.5", "stream": "true", "strength": "0.5"}
    asked = read_form(texts, LIMITS)
    params = asked.params()
    assert (params.num_outputs_per_prompt, params.seed, params.strength) == (2, 7, 0.5)
    assert asked.stream
    assert read_form({"prompt": "7", "negative_prompt": "true"}, LIMITS).params().negative_prompt == "true"
    wrong = {"n": ("07", "+7", "1_0", "\uff12", " 7", "7\n", "7.0", "1e3", "0x7", ""), "stream": ("True", "1", "yes"),
             "true_cfg_scale": ("nan", "inf", "1e1", "2.", ".5", "1_0.5", "")}  # fmt: skip
    for name, text in ((name, text) for name, values in wrong.items() for text in values):
        with pytest.raises(ApiError) as refused:
            read_form({"prompt": "a cat", name: text}, LIMITS)
        assert refused.value.param == name, text


def test_the_schema_says_what_is_checked() -> None:
    schema = request_schema(GenerationBody, LIMITS)
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]
    assert set(schema["properties"]) == set(GenerationBody.model_fields)
    steps = schema["properties"]["num_inference_steps"]
    assert steps["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 50}, {"type": "null"}]
    assert request_schema(EditBody, LIMITS, {"image": True, "mask": False})["required"] == ["prompt", "image"]


BAD = {
    "empty": b"",
    "cut off": b'{"prompt": "a',
    "a list": b"[1]",
    "a word": b"null",
    "NaN": b'{"guidance_scale": NaN}',
    "Infinity": b'{"deadline": -Infinity}',
    "overflow": b'{"guidance_scale": 1e309}',
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "twice": b'{"n": 1, "n": 2}',
    "twice within": b'{"a": {"b": 1, "b": 1}}',
    "deep lists": b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "no UTF-8": b'{"user": "\xff"}',
    "UTF-16": '{"n": 1}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"n": 1}',
    "half a character": b'{"user": "\\ud800"}',
    "half a character to avoid": b'{"negative_prompt": "\\udfff"}',
    "half a character as a name": b'{"\\udfff": 1}',
    "single quotes": b"{'a': 1}",
    "a comma too many": b'{"a": 1,}',
    "two objects": b"{}{}",
    "a raw line break": b'{"a": "\n"}',
    "a comment": b"{} // no",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_bad_bodies_are_refused(body: bytes) -> None:
    with pytest.raises((ApiError, Refused)) as refused:
        read_body(GenerationBody, {"prompt": "a cat", **read_object(body)}, LIMITS)
    assert len(refused.value.message) < 400


def test_good_bodies_are_read() -> None:
    body = '{"prompt": "Кот \\u0000 \\ud83d\\ude00", "n": 2, "x": 1.5, "y": null, "z": [{}]}'
    assert read_object(body.encode()) == {"prompt": "Кот \x00 😀", "n": 2, "x": 1.5, "y": None, "z": [{}]}


def test_values_of_megabytes_are_shown_in_part() -> None:
    for name in ("quality", "n", "size", "user"):
        with pytest.raises(ApiError) as refused:
            read_body(GenerationBody, {"prompt": "a cat", name: "auto" * 250_000}, LIMITS)
        assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    ("lora", "names"),
    [
        ("pixel", ["pixel"]),
        ({"name": "pixel", "scale": 0.5}, ["pixel"]),
        (["ink", {"name": "pixel"}], ["ink", "pixel"]),
    ],
)
def test_adapters_are_named_in_json_and_in_forms(lora: Any, names: list[str]) -> None:
    body = read_body(GenerationBody, {"prompt": "a", "lora": lora}, Limits())
    form = read_form({"prompt": "a", "lora": lora if isinstance(lora, str) else json.dumps(lora)}, Limits())
    assert [adapter.name for adapter in body.lora or ()] == names
    assert form.lora == body.lora


@pytest.mark.parametrize("text", ["{", "[[[", '{"name": "a", "name": "b"}', "[" * 100_000])
def test_adapters_that_are_no_json_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="lora is not valid JSON"):
        read_form({"prompt": "a", "lora": text}, Limits())
