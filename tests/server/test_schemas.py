"""Which fields a request may have, and what each refusal says."""

from __future__ import annotations

import inspect
import json
from typing import Any

import diffusers
import pytest

from samovar.engine import OutputKind, PipelineFacts
from samovar.engine.facts import _plain_types
from samovar.engine.inputs import find_inputs
from samovar.server import Limits
from samovar.server.decode import Refused, read_object
from samovar.server.errors import ApiError
from samovar.server.schemas import (
    AudioBody,
    EditBody,
    GenerationBody,
    SpeechBody,
    VideoBody,
    json_schema,
    read_body,
    read_texts,
    schema_of,
)

LIMITS = Limits(max_pixels=1_000_000, max_steps=50)
VIDEO = PipelineFacts(
    "Pipe", frozenset({"prompt", "num_frames", "sigmas", "shift", "num_layers", "mode", "prompt_2", "clean",
               "latents"}),
    8, output=OutputKind("video", frames_argument="num_frames"),
    types={"shift": (float,), "num_layers": (int,), "mode": (int, str), "clean": (bool,)},
)  # fmt: skip
SCHEMAS = {
    kind: schema_of(kind, LIMITS, VIDEO if kind is VideoBody else None)
    for kind in (GenerationBody, EditBody, VideoBody, AudioBody, SpeechBody)
}


def read(kind: Any = GenerationBody, **values: Any) -> Any:
    prompt = "input" if issubclass(kind, AudioBody) else "prompt"
    body = read_body(SCHEMAS[kind], {prompt: "a cat", **values}, VIDEO if kind is VideoBody else None)
    body.check()
    return body


def read_form(texts: dict[str, str], kind: Any = EditBody) -> Any:
    return read_body(SCHEMAS[kind], read_texts(SCHEMAS[kind], texts))


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
    nothing = {name: None for name in GenerationBody.model_fields if name != "prompt"}
    assert read(**nothing) == read(), "null is the same as nothing"
    assert read(size="auto").params() == read().params()
    sound = read(SpeechBody, audio_length="2.5", audio_start=1, voice="auto", speed=1.0)
    assert (sound.params().seconds, sound.params().options, sound.format) == (2.5, {"audio_start_in_s": 1.0}, "mp3")


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
        ({"n": 11}, "n", "invalid_value", "n should be less than or equal to 10, not 11"),
        ({"n": True}, "n", "invalid_type", "n should be a valid integer, not True"),
        ({"n": 1.0}, "n", "invalid_type", "not 1.0"),
        ({"num_inference_steps": 51}, "num_inference_steps", "invalid_value", "less than or equal to 50"),
        ({"seed": 2**63}, "seed", "invalid_value", "seed should be less than or equal to"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "invalid_value", "seed + n - 1 must be at most"),
        ({"response_format": "url"}, "response_format", "unsupported_value", "should be 'b64_json', not 'url'"),
        ({"output_format": "exe"}, "output_format", "unsupported_value", "should be 'png', 'jpeg' or 'webp'"),
        ({"quality": "best"}, "quality", "unsupported_value", "should be 'auto', 'high', 'medium', 'low', 'hd' or"),
        (
            {"tolerance": "fats"},
            "tolerance",
            "invalid_type",
            "a valid number or be 'exact', 'high' or 'fast', not 'fats'",
        ),
        ({"tolerance": -0.1}, "tolerance", "invalid_value", "not -0.1"),
        ({"output_compression": 50}, "output_compression", "invalid_value", "png is lossless"),
        ({"partial_images": 2}, "partial_images", "invalid_value", "needs stream=true"),
        ({"stream": "true"}, "stream", "invalid_type", "a valid boolean, not 'true'"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "invalid_value", "a finite number"),
        ({"deadline": 0}, "deadline", "invalid_value", "deadline should be greater than or equal to 0.001"),
        ({"lora": {"name": "a", "path": "/etc"}}, "lora", "unknown_field", "lora: 'path' is not taken. Adapters are"),
        ({"lora": ["a", {"name": "b", "scale": "1"}]}, "lora", "invalid_type", "lora.1.scale should be a valid number"),
        ({"lora": 7}, "lora", "invalid_type", "lora should be a valid list, not 7"),
        ({"strength": 0.5}, "strength", "unknown_field", "is not a known field"),
        ({"user": "\ud800"}, "user", "invalid_value", "user should be a valid string"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(values: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**values)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert message in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "size", ["", "512", "512x", "x512", "0x512", "-1x5", "1_000x512", "\uff15\uff11\uff12x512", " 512x512",
             "512x512\n", "512X512", "512\u00d7512", "5.0x5", "0512x512", "100000x1", "auto ", "Auto", "x" * 10**6]
)  # fmt: skip
def test_sizes_are_read_strictly(size: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(size=size)
    assert refused.value.param == "size"
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(("kind", "most"), [("webp", 16_383), ("jpeg", 65_500)])
def test_an_image_that_its_format_cannot_hold_is_refused(kind: str, most: int) -> None:
    read(output_format=kind).check_sides(most, 8)
    read().check_sides(8, most + 1)
    with pytest.raises(ApiError, match=f"{kind} holds at most {most} pixels a side") as refused:
        read(output_format=kind).check_sides(8, most + 1)
    assert (refused.value.status, refused.value.param) == (400, "output_format")


def test_forms_say_the_same_in_text() -> None:
    texts = {"prompt": "a cat", "n": "2", "seed": "7", "true_cfg_scale": "1.5", "stream": "true", "strength": "0.5"}
    params = read_form(texts).params()
    assert (params.num_outputs_per_prompt, params.seed, params.strength) == (2, 7, 0.5)
    assert read_form(texts).stream
    assert read_form({"prompt": "7", "negative_prompt": "true", "tolerance": "high"}).params().negative_prompt == "true"
    wrong = {"n": ("07", "+7", "1_0", "\uff12", " 7", "7\n", "7.0", "1e3", "0x7", ""), "stream": ("True", "1", "yes"),
             "true_cfg_scale": ("nan", "inf", "1e1", "2.", ".5", "1_0.5", ""),
             "lora": ("{", "[[[", '{"name": "a", "name": "b"}', "[" * 100_000)}  # fmt: skip
    for name, text in ((name, text) for name, values in wrong.items() for text in values):
        with pytest.raises(ApiError) as refused:
            read_form({"prompt": "a cat", name: text})
        assert refused.value.param == name, text


@pytest.mark.parametrize(
    ("lora", "names"),
    [
        ("pixel", ["pixel"]),
        ({"name": "pixel", "scale": 0.5}, ["pixel"]),
        (["ink", {"name": "pixel"}], ["ink", "pixel"]),
    ],
)
def test_adapters_are_named_in_json_and_in_forms(lora: Any, names: list[str]) -> None:
    form = read_form({"prompt": "a", "lora": lora if isinstance(lora, str) else json.dumps(lora)})
    assert [adapter.name for adapter in read(lora=lora).lora] == names
    assert form.lora == read(lora=lora).lora


def test_the_schema_says_what_is_checked() -> None:
    schema = json_schema(SCHEMAS[GenerationBody], {})
    assert schema["additionalProperties"] is False
    assert schema["required"] == ["prompt"]
    steps = schema["properties"]["num_inference_steps"]
    assert steps["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 50}, {"type": "null"}]
    assert json_schema(SCHEMAS[EditBody], {"image": True, "mask": False})["required"] == ["prompt", "image"]
    assert json_schema(SCHEMAS[VideoBody], {})["properties"]["shift"]["anyOf"][0] == {"type": "number"}


# ------------------------------------------------------------------------------------------------ of the pipeline


def test_arguments_of_the_pipeline_are_fields_with_types_and_limits() -> None:
    body = read(VideoBody, shift=2, prompt_2="b", num_frames=5, sigmas=[1, 0.5], mode="x", clean=True)
    assert body.params().options == {"shift": 2.0, "prompt_2": "b", "sigmas": [1.0, 0.5], "mode": "x", "clean": True}
    assert body.params().num_frames == 5
    assert read(VideoBody, **body.model_dump(exclude_none=True)) == body, "kept and read again"
    form = read_form({"prompt": "7", "shift": "2.5", "prompt_2": "7", "num_frames": "5", "sigmas": "[1]"}, VideoBody)
    assert (form.prompt, form.params().options) == ("7", {"shift": 2.5, "prompt_2": "7", "sigmas": [1.0]})
    assert schema_of(VideoBody, LIMITS, PipelineFacts("Upscaler", frozenset({"video"}), 8))().prompt == ""


@pytest.mark.parametrize(
    ("values", "code", "message"),
    [
        ({"num_layers": 99}, "unsupported_value", "'num_layers' is an argument of the pipeline that requests cannot"),
        ({"latents": [1]}, "unsupported_value", "for that there are size, n"),
        ({"shfit": 1}, "unknown_field", "Did you mean 'shift'?"),
        ({"sigmas": [1.0] * 51}, "invalid_value", "sigmas should have at most 50 items"),
        ({"sigmas": [1.0, "a"]}, "invalid_type", "sigmas.1 should be a valid number, not 'a'"),
        ({"sigmas": [1.0, True]}, "invalid_type", "sigmas.1 should be a valid number, not True"),
        ({"sigmas": [1.0, float("inf")]}, "invalid_value", "sigmas.1 should be a finite number"),
        ({"sigmas": 1}, "invalid_type", "sigmas should be a valid list, not 1"),
        ({"shift": {"a": 1}}, "invalid_type", "shift should be a valid number, not {'a': 1}"),
        ({"shift": float("nan")}, "invalid_value", "shift should be a finite number"),
        ({"mode": 2**63}, "invalid_value", "9223372036854775808"),
        ({"mode": [1]}, "invalid_type", "should be a valid integer or be a valid string, not [1]"),
        ({"prompt_2": "x" * 32_001}, "string_above_max_length", "prompt_2 has 32001 characters; the limit is 32000"),
        ({"prompt_2": "a\ud800"}, "invalid_value", "prompt_2 should be a valid string"),
        ({"size": "48x32", "width": 48}, "invalid_value", "size says the same as width and height"),
    ],
)
def test_arguments_that_are_refused(values: dict[str, Any], code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(VideoBody, **values)
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, code, next(iter(values)))
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("name", "output", "has", "has_not"),
    [
        ("WanPipeline", {"kind": "video", "frames_argument": "num_frames"}, {"guidance_scale_2"},
         {"num_videos_per_prompt", "latents", "output_type", "num_frames", "prompt", "height", "attention_kwargs"}),
        ("StableAudioPipeline", {"kind": "audio", "duration_argument": "audio_end_in_s"}, {"audio_start_in_s"},
         {"audio_end_in_s", "num_waveforms_per_prompt", "initial_audio_waveforms"}),
        ("FluxPipeline", {}, {"prompt_2", "sigmas"},
         {"num_images_per_prompt", "max_sequence_length", "return_dict", "ip_adapter_image"}),
        ("PixArtSigmaPipeline", {}, {"use_resolution_binning", "clean_caption"}, {"width"}),
        ("WanAnimatePipeline", {"kind": "video"}, {"mode"}, {"segment_frame_length", "pose_video"}),
    ],
)  # fmt: skip
def test_what_requests_may_set_of_real_pipelines(
    name: str, output: dict[str, Any], has: set[str], has_not: set[str]
) -> None:
    """Nothing that says how much is computed: it would be a way around the limits."""
    cls = getattr(diffusers, name)
    parameters = inspect.signature(cls.__call__).parameters
    types = {each: plain for each, value in parameters.items() if (plain := _plain_types(value.annotation))}
    facts = PipelineFacts(
        name, frozenset(parameters), 8, types=types, inputs=find_inputs(cls), output=OutputKind(**output)
    )
    found = set(schema_of(VideoBody, LIMITS, facts).option_names)
    assert has <= found
    assert not has_not & found


# ------------------------------------------------------------------------------------------------ JSON

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
    "many fields": json.dumps(dict.fromkeys(map(str, range(41)))).encode(),
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
        read(**read_object(body))
    assert len(str(refused.value)) < 400


def test_good_bodies_are_read() -> None:
    body = '{"prompt": "Кот \\u0000 \\ud83d\\ude00", "n": 2, "x": 1.5, "y": null, "z": [{}]}'
    assert read_object(body.encode()) == {"prompt": "Кот \x00 😀", "n": 2, "x": 1.5, "y": None, "z": [{}]}
