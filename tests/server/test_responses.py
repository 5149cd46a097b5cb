"""What goes back: images that can be opened, and events that OpenAI's types accept."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import PIL.Image
import pytest
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent, ImagesResponse

from samovar.engine import GenerationResult, OmniDiffusionSamplingParams, Preview, Progress, Started
from samovar.server import Limits
from samovar.server.respond import completed_events, gathered, images_pieces, preview_event, step_event
from samovar.server.schemas import GenerationBody, read_body

PICTURE = PIL.Image.effect_mandelbrot((40, 24), (-2, -1.5, 1, 1.5), 50).convert("RGB")
RESULT = GenerationResult(
    "a grey cat", (PICTURE, PICTURE), (7, 8), OmniDiffusionSamplingParams(num_inference_steps=4), 1.5, ("a note",)
)


def asked(**values: Any) -> GenerationBody:
    return read_body(GenerationBody, {"prompt": "a grey cat", **values}, Limits())


def events(raw: bytes) -> list[dict[str, Any]]:
    found = []
    for part in raw.decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        found.append(body)
    return found


def events_of(pieces: Iterator[bytes]) -> list[dict[str, Any]]:
    return events(b"".join(pieces))


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_images_come_in_the_format_asked_for(kind: str) -> None:
    body = json.loads(b"".join(images_pieces(asked(output_format=kind), RESULT, {"memory_bytes": 5})))
    answer = ImagesResponse.model_validate(body)
    assert answer.data is not None
    assert answer.usage is not None
    picture = PIL.Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json or "")))
    assert (picture.format, picture.size, answer.size) == (kind.upper(), (40, 24), "40x24")
    assert [item["seed"] for item in body["data"]] == [7, 8]
    assert body["samovar"] == {
        "seconds": 1.5, "num_inference_steps": 4, "notes": ["a note"], "cache": [], "lora": [], "memory_bytes": 5,
    }  # fmt: skip
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (3, 8, 11)
    if kind == "png":
        assert picture.tobytes() == PICTURE.tobytes()


def test_what_means_nothing_to_these_models_is_taken_with_a_note() -> None:
    plain = asked(background="auto", moderation="auto", style=None)
    openai = asked(style="vivid", input_fidelity="high", background="transparent", moderation="low", user="u1")
    for body, noted in ((plain, []), (openai, ["user", "background", "moderation", "style", "input_fidelity"])):
        whole = json.loads(b"".join(images_pieces(body, RESULT, {})))["samovar"]["notes"]
        streamed = events_of(completed_events("image_generation", body, RESULT, {}))[0]["samovar"]["notes"]
        assert whole == streamed
        assert (whole[0], [note.partition("=")[0] for note in whole[1:]]) == ("a note", noted)


def test_compression_is_obeyed() -> None:
    bodies = [asked(output_format="jpeg", output_compression=q) for q in (0, 50, 100)]
    sizes = [len(b"".join(images_pieces(body, RESULT, {}))) for body in bodies]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[2]


def test_events_are_openais() -> None:
    (partial,) = events_of(preview_event("image_generation", asked(), Preview(1, 4, 0, PICTURE), 0))
    ImageGenPartialImageEvent.model_validate(partial, strict=True)
    completed = events_of(completed_events("image_generation", asked(), RESULT, {}))
    assert [ImageGenCompletedEvent.model_validate(body, strict=True).size for body in completed] == ["40x24"] * 2
    assert [(body["seed"], body["image_index"]) for body in completed] == [(7, 0), (8, 1)]


def test_steps_are_told_in_our_words() -> None:
    assert events(step_event(Started(0.25))) == [{"type": "samovar.started", "seconds_queued": 0.25}]
    (told,) = events(step_event(Progress(2, 4, 0, 1, 0.5, False)))
    assert told == {
        "type": "samovar.progress", "step": 2, "num_steps": 4, "image_index": 0, "num_images": 1, "seconds": 0.5,
        "is_computed": False,
    }  # fmt: skip


def test_no_piece_is_long_and_small_answers_are_one() -> None:
    """What is sent at once holds up everybody else."""
    noise = PIL.Image.effect_noise((2000, 1000), 100).convert("RGB")
    result = GenerationResult("a cat", (noise,) * 2, (7, 8), OmniDiffusionSamplingParams(), 1.5)
    pieces = list(gathered(images_pieces(asked(), result, {})))
    assert max(map(len, pieces)) < 2**19
    found = [
        PIL.Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) for item in json.loads(b"".join(pieces))["data"]
    ]
    assert [image.tobytes() for image in found] == [noise.tobytes()] * 2
    assert len(list(gathered(images_pieces(asked(), RESULT, {})))) == 1
