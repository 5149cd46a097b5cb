"""What is asked for becomes a request for the engine, with all that it needs, and within limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest

from samovar.engine import OmniDiffusionSamplingParams, OutputKind, PipelineFacts, Request
from samovar.omni import AsyncOmni
from samovar.server import AppState, Limits, ServerConfig
from samovar.server.errors import ApiError
from samovar.server.request import check_request, engine_request, memory_of, read_values
from samovar.server.schemas import AudioBody, GenerationBody, VideoBody

TAKES = frozenset({"prompt", "height", "width", "num_frames", "image", "mask_image", "shift", "num_layers", "prompt_2"})
VIDEO = OutputKind("video", fps=10.0, frames_argument="num_frames", frames=11)


def state(output: OutputKind, **settings: Any) -> AppState:
    """Of a model with these facts; nothing is loaded."""
    facts = PipelineFacts(
        "Pipe", TAKES, 8, output=output, types={"shift": (float,), "num_layers": (int,)}, size=(16, 32)
    )
    config = AsyncOmni("emoji", device="cpu").config
    omni: Any = SimpleNamespace(
        config=config, facts=facts, output=output, defaults=OmniDiffusionSamplingParams(), can_edit=True
    )
    return AppState(omni, ServerConfig(**settings), "serving", is_loaded=True)


def test_other_arguments_become_options() -> None:
    body = read_values(state(VIDEO), VideoBody, {"prompt": "a", "shift": 2, "prompt_2": "b", "num_frames": 5})
    assert body.params().options == {"shift": 2, "prompt_2": "b"}
    assert body.params().num_frames == 5
    assert read_values(state(VIDEO), VideoBody, body.values()) == body, "kept and read again"
    texts = {"prompt": "7", "shift": "2.5", "prompt_2": "7", "num_frames": "5", "seed": "3"}
    form = read_values(state(VIDEO), VideoBody, texts, is_form=True)
    assert (form.prompt, form.params().options, form.params().seed) == ("7", {"shift": 2.5, "prompt_2": "7"}, 3)


@pytest.mark.parametrize(
    ("kind", "values", "code", "message"),
    [
        (VideoBody, {"num_layers": 99}, "unsupported_value", "'num_layers' is an argument of the pipeline that"),
        (GenerationBody, {"height": 9999}, "unsupported_value", "for that there are size, n"),
        (GenerationBody, {"shfit": 1}, "unknown_field", "Did you mean 'shift'?"),
        (AudioBody, {"seconds": 1}, "unknown_field", "'seconds' is not a known field"),
    ],
)  # fmt: skip
def test_names_that_are_none_are_refused(kind: Any, values: dict[str, Any], code: str, message: str) -> None:
    prompt = "input" if kind is AudioBody else "prompt"
    with pytest.raises(ApiError) as refused:
        read_values(state(VIDEO), kind, {prompt: "a", **values})
    assert (refused.value.status, refused.value.code) == (400, code)
    assert message in refused.value.message


def test_other_names_wait_for_the_model() -> None:
    loading = AppState(AsyncOmni("emoji", device="cpu"), ServerConfig())
    with pytest.raises(ApiError, match="still loading"):
        read_values(loading, GenerationBody, {"prompt": "a", "shift": 1})


def wanted(state: AppState, body: Any, **images: list[PIL.Image.Image]) -> Request:
    return engine_request(state, body, images)


def test_images_travel_with_the_request() -> None:
    image, mask = PIL.Image.new("RGB", (32, 16)), PIL.Image.new("L", (32, 16))
    made = wanted(state(VIDEO), VideoBody(prompt="a"), image=[image], mask=[mask])
    assert (made.image, made.inputs, made.num_images) == (image, {"mask": mask}, 1)
    assert wanted(state(VIDEO), VideoBody(prompt="a"), image=[image, image]).image == [image, image]


def test_all_frames_count() -> None:
    """Eight bytes a pixel: of what is sent, of every frame, and of previews."""
    image = PIL.Image.new("RGB", (64, 32))
    films = state(VIDEO)
    request = wanted(films, VideoBody(prompt="a", partial_images=2, width=32, height=16), image=[image])
    assert memory_of(films, request) == 8 * (64 * 32 + (11 + 2) * 32 * 16)
    small = state(VIDEO, max_memory=2**30, limits=Limits(max_frames=10**6))
    with pytest.raises(ApiError, match=r"the limit is 805,306,368 .--max-memory"):
        memory_of(small, wanted(small, VideoBody(prompt="a", num_frames=400_000)))
    sound = state(OutputKind("audio", rate=44_100, duration_argument="shift"))
    assert memory_of(sound, wanted(sound, AudioBody(input="a", audio_length=10))) == 441_000 * 16


def test_a_video_server_has_memory_for_its_largest_video() -> None:
    assert state(VIDEO).images.most == 8 * Limits().max_video_pixels
    assert state(VIDEO, max_memory="1GiB").images.most == 3 * 2**28


def test_a_prompt_may_be_missing_only_where_none_is_taken() -> None:
    films = state(VIDEO)
    with pytest.raises(ApiError, match="prompt is missing"):
        check_request(films, VideoBody(), wanted(films, VideoBody()))
    assert check_request(films, VideoBody(prompt="a"), wanted(films, VideoBody(prompt="a"))).frames == 11
