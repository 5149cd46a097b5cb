"""Other arguments of a pipeline may be set by requests, but for those that say how much is computed."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest

from samovar.engine import OutputKind, PipelineFacts
from samovar.engine.facts import _plain_types
from samovar.engine.input_media import find_inputs
from samovar.server import Limits
from samovar.server.errors import ApiError
from samovar.server.options import check_options, find_options


def facts_of_class(name: str, **output: Any) -> PipelineFacts:
    """What is known of a pipeline by its class alone."""
    import inspect

    cls = getattr(diffusers, name)
    parameters = inspect.signature(cls.__call__).parameters
    types = {each: plain for each, value in parameters.items() if (plain := _plain_types(value.annotation))}
    return PipelineFacts(
        name, frozenset(parameters), 8, types=types, inputs=find_inputs(cls), output=OutputKind(**output)
    )


@pytest.mark.parametrize(
    ("facts", "has", "has_not"),
    [
        (
            facts_of_class("WanPipeline", kind="video", frames_argument="num_frames"),
            {"guidance_scale_2": False},
            {"num_videos_per_prompt", "latents", "output_type", "num_frames", "prompt", "height", "attention_kwargs"},
        ),
        (
            facts_of_class("StableAudioPipeline", kind="audio", duration_argument="audio_end_in_s"),
            {"audio_start_in_s": False},
            {"audio_end_in_s", "num_waveforms_per_prompt", "initial_audio_waveforms"},
        ),
        (
            facts_of_class("FluxPipeline"),
            {"prompt_2": True, "sigmas": False},
            {"num_images_per_prompt", "max_sequence_length", "return_dict", "ip_adapter_image"},
        ),
        (facts_of_class("PixArtSigmaPipeline"), {"use_resolution_binning": False, "clean_caption": False}, {"width"}),
        (facts_of_class("WanAnimatePipeline", kind="video"), {"mode": True}, {"segment_frame_length", "pose_video"}),
    ],
)
def test_what_a_request_may_set(facts: PipelineFacts, has: dict[str, bool], has_not: set[str]) -> None:
    found = find_options(facts)
    assert has.items() <= found.items()
    assert not has_not & found.keys()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sigmas", [1.0] * 201, "sigmas has 201 steps; the limit is 200"),
        ("sigmas", [1.0, "a"], "takes a list of numbers"),
        ("sigmas", 1, "takes a list of numbers, not 1"),
        ("timesteps", "7", "takes a list of numbers, not '7'"),
        ("sigmas", [1.0, True], "takes a list of numbers"),
        ("sigmas", [1.0, float("inf")], "takes a list of numbers"),
        ("guidance_2", [1.0], "takes a plain value, not [1.0]"),
        ("guidance_2", {"a": 1}, "takes a plain value, not {'a': 1}"),
        ("guidance_2", float("nan"), "takes a plain value, not nan"),
        ("guidance_2", 2**63, "takes a plain value, not 9223372036854775808"),
        ("prompt_2", "x" * 32_001, "prompt_2 has 32001 characters; the limit is 32000"),
        ("prompt_2", "a\ud800", "takes a plain value, not 'a"),
    ],
)
def test_values_have_limits(name: str, value: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_options({name: value}, PipelineFacts("Pipe", frozenset(), 8), Limits())
    assert (refused.value.status, refused.value.param) == (400, name)
    assert message in refused.value.message


def test_plain_values_are_taken() -> None:
    values = {"sigmas": [1, 0.5], "a": True, "b": -3, "c": 1.5, "prompt_2": "a\ncat", "d": None}
    check_options(values, PipelineFacts("Pipe", frozenset(), 8), Limits())
