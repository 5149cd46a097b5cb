"""What goes back: images that can be opened, events that OpenAI's types accept, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
from starlette.requests import ClientDisconnect, Request

from samovar import engine
from samovar.core.errors import NanLatentsError
from samovar.engine import (
    Done,
    Failed,
    GenerationResult,
    OmniDiffusionSamplingParams,
    PipelineFacts,
)
from samovar.server import AppState, ServerConfig
from samovar.server.images import event_pieces, images_pieces
from samovar.server.output_size import OutputSize
from samovar.server.request import ClientRequest
from samovar.server.respond import in_thread, make_now, result_of
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


# ------------------------------------------------------------------------------------------------ what is held


class Running:
    """A job that fails, or waits."""

    def __init__(self, error: Exception | None = None) -> None:
        self.id, self.since, self.events = "request-1", 0.0, (Failed(error),) if error else ()  # type: ignore[arg-type]
        self._error, self.is_cancelled = error, False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def outcome(self) -> Any:
        return self._error


async def never() -> Any:
    await asyncio.sleep(3600)


HTTP = Request({"type": "http"}, never)


def make(job: Running, answer: Any) -> tuple[AppState, Any]:
    """A response of a state, of whose memory it holds 800 bytes."""
    omni: Any = SimpleNamespace(
        facts=PipelineFacts("Pipe", frozenset({"prompt"}), 8), submit=lambda *_, **__: job,
        config=SimpleNamespace(attach_config=SimpleNamespace(cache=None)),
    )  # fmt: skip
    state = AppState(omni, ServerConfig())
    wanted = ClientRequest(state, asked(), engine.Request("a"), OutputSize(10, 10, 1, None, 100, 800))
    return state, make_now(HTTP, wanted, lambda running: answer(state, running))


def test_a_failure_is_told_and_nothing_is_held() -> None:
    async def answer(state: AppState, running: Any) -> Any:
        assert state.images.used == 800
        return in_thread(iter([await result_of(HTTP, running)])), "x"  # type: ignore[list-item]

    job = Running(NanLatentsError("After step 3 the latents contain NaN.", 3, None))
    state, response = make(job, answer)
    with pytest.raises(NanLatentsError):
        asyncio.run(response)
    assert job.is_cancelled
    assert state.images.used == 0


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_answer_ends_its_job_and_frees_memory(is_cut: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        if is_cut:
            raise OSError("the connection is gone")

    async def answer(state: AppState, running: Any) -> Any:
        return pieces(), "video/mp4"

    job, sent = Running(), list[Any]()
    state, coming = make(job, answer)

    async def main() -> None:
        response = await coming
        assert (response.media_type, state.images.used, job.is_cancelled) == ("video/mp4", 800, False)

        async def send(message: Any) -> None:
            sent.append(message)

        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, never, send)

    if is_cut:
        with pytest.raises(ClientDisconnect):
            asyncio.run(main())
    else:
        asyncio.run(main())
        assert b"".join(message.get("body", b"") for message in sent) == b"one"
    assert job.is_cancelled
    assert state.images.used == 0
