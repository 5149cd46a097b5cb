"""Which fields a request may have, and what each refusal says."""

from __future__ import annotations

import inspect
from typing import Any

import diffusers
import pytest

from samovar.engine import OutputKind, PipelineFacts
from samovar.engine.facts import _plain_types
from samovar.engine.inputs import find_inputs
from samovar.server.errors import ApiError
from samovar.server.schemas import (
    AudioBody,
    EditBody,
    GenerationBody,
    SpeechBody,
    VideoBody,
    field_names,
    json_schema,
    read_body,
    read_texts,
    schema_of,
)
from samovar.server.settings import Limits

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
    nothing = dict.fromkeys(field_names(GenerationBody) - {"prompt"})
    assert read(**nothing) == read(), "null is the same as nothing"
    assert read(size="auto").params() == read().params()
    sound = read(SpeechBody, audio_length="2.5", audio_start=1, voice="auto", speed=1.0)
    assert (sound.params().seconds, sound.params().options, sound.format) == (2.5, {"audio_start_in_s": 1.0}, "mp3")


@pytest.mark.parametrize(
    ("values", "param", "code", "message"),
    [
        ({"prompt": " \n"}, "prompt", "invalid_value", "prompt is empty. Say what to make"),
        ({"prompt": "x" * 32_001}, "prompt", "string_above_max_length", "32001 characters; the limit is 32000"),
        ({"steps": 4}, "steps", "unknown_field", "Did you mean 'num_inference_steps'"),
        ({"n": 11}, "n", "invalid_value", "n should be less than or equal to 10, not 11"),
        ({"n": True}, "n", "invalid_type", "n should be a valid integer, not True"),
        ({"seed": 2**63 - 1, "n": 2}, "seed", "invalid_value", "seed + n - 1 must be at most"),
        ({"response_format": "url"}, "response_format", "unsupported_value", "should be 'b64_json', not 'url'"),
        ({"quality": "best"}, "quality", "unsupported_value", "should be 'auto', 'high', 'medium', 'low', 'hd' or"),
        (
            {"tolerance": "fats"},
            "tolerance",
            "invalid_type",
            "a valid number or be 'exact', 'high' or 'fast', not 'fats'",
        ),
        ({"output_compression": 50}, "output_compression", "invalid_value", "png is lossless"),
        ({"partial_images": 2}, "partial_images", "invalid_value", "needs stream=true"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "invalid_value", "a finite number"),
        ({"lora": {"name": "a", "path": "/etc"}}, "lora", "unknown_field", "lora: 'path' is not taken. Adapters are"),
        ({"lora": ["a", {"name": "b", "scale": "1"}]}, "lora", "invalid_type", "lora.1.scale should be a valid number"),
        ({"strength": 0.5}, "strength", "unknown_field", "is not a known field"),
    ],
)
def test_refusals_name_the_field_and_the_remedy(values: dict[str, Any], param: str, code: str, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        read(**values)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert message in refused.value.message
    assert len(refused.value.message) < 300


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
        ({"shfit": 1}, "unknown_field", "Did you mean 'shift'?"),
        ({"sigmas": [1.0] * 51}, "invalid_value", "sigmas should have at most 50 items"),
        ({"sigmas": [1.0, "a"]}, "invalid_type", "sigmas.1 should be a valid number, not 'a'"),
        ({"sigmas": 1}, "invalid_type", "sigmas should be a valid list, not 1"),
        ({"shift": float("nan")}, "invalid_value", "shift should be a finite number"),
        ({"mode": 2**63}, "invalid_value", "9223372036854775808"),
        ({"prompt_2": "x" * 32_001}, "string_above_max_length", "prompt_2 has 32001 characters; the limit is 32000"),
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
