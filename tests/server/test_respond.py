"""What goes back: images that can be opened, events that OpenAI's types accept, in short pieces."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest

from samovar.engine import (
    Done,
    GenerationResult,
    OmniDiffusionSamplingParams,
)
from samovar.server.images import event_pieces, images_pieces
from samovar.server.respond import in_thread
from samovar.server.schemas import GenerationBody, read_body

PICTURE = PIL.Image.effect_mandelbrot((40, 24), (-2, -1.5, 1, 1.5), 50).convert("RGB")
RESULT = GenerationResult(
    "a grey cat", (PICTURE, PICTURE), (7, 8), OmniDiffusionSamplingParams(num_inference_steps=4), 1.5, ("a note",),
    (SimpleNamespace(to_dict=lambda: {"error": float("nan")}),),
)  # fmt: skip


def asked(**values: Any) -> GenerationBody:
    return read_body(GenerationBody, {"prompt": "a grey cat", **values})


def events(pieces: Iterator[bytes]) -> list[dict[str, Any]]:
    found = []
    for part in b"".join(pieces).decode().split("\n\n")[:-1]:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: "), parse_constant=lambda name: pytest.fail(name)))
        assert name == "event: error" or name == f"event: {found[-1]['type']}"
    return found


def test_what_means_nothing_to_these_models_is_taken_with_a_note() -> None:
    plain = asked(background="auto", moderation="auto", style=None)
    openai = asked(style="vivid", input_fidelity="high", background="transparent", moderation="low", user="u1")
    for body, noted in ((plain, []), (openai, ["user", "background", "moderation", "style", "input_fidelity"])):
        whole = json.loads(b"".join(images_pieces(body, RESULT, 0)))["samovar"]["notes"]
        streamed = events(event_pieces(body, Done(RESULT), 0, 0))[0]["samovar"]["notes"]
        assert whole == streamed
        assert (whole[0], [note.partition("=")[0] for note in whole[1:]]) == ("a note", noted)


def test_no_piece_is_long() -> None:
    """What is sent at once holds up everybody else."""
    noise = PIL.Image.effect_noise((2000, 1000), 100).convert("RGB")
    result = GenerationResult("a cat", (noise,) * 2, (7, 8), OmniDiffusionSamplingParams(), 1.5)

    async def pieces() -> list[bytes]:
        return [piece async for piece in in_thread(images_pieces(asked(), result, 0))]

    found = asyncio.run(pieces())
    assert max(map(len, found)) <= 2**18
    data = json.loads(b"".join(found))["data"]
    images = [PIL.Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) for item in data]
    assert [image.tobytes() for image in images] == [noise.tobytes()] * 2
