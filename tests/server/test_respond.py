"""What is made for a client that waits frees what it held, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from samovar import engine
from samovar.core.errors import NanLatentsError
from samovar.engine import Failed, PipelineFacts
from samovar.server import AppState, ServerConfig
from samovar.server.errors import ApiError
from samovar.server.respond import in_thread, make_now, result_of
from samovar.server.schemas import GenerationBody

BODY = GenerationBody(prompt="a")


class Running:
    """A job that fails, or waits."""

    def __init__(self, error: Exception | None = None) -> None:
        self.id, self.since, self.events = "request-1", 0.0, (Failed(error),) if error else ()  # type: ignore[arg-type]
        self._error, self.is_cancelled = error, False

    def cancel(self) -> None:
        self.is_cancelled = True

    async def outcome(self) -> Any:
        return self._error


def run(answer: Callable[[AppState, Request, Any], Any], job: Running) -> tuple[AppState, Any]:
    async def never() -> Any:
        await asyncio.sleep(3600)

    async def main() -> tuple[AppState, Any]:
        facts = PipelineFacts("Pipe", frozenset({"prompt"}), 8, size=(10, 10))
        omni: Any = SimpleNamespace(facts=facts, submit=lambda *_, **__: job)
        state = AppState(omni, ServerConfig())
        request = Request({"type": "http"}, never)
        try:
            return state, await make_now(
                state, request, BODY, engine.Request("a"), lambda running: answer(state, request, running)
            )
        except ApiError as error:
            return state, error

    return asyncio.run(main())


def test_a_failure_is_told_and_nothing_is_held() -> None:
    async def answer(state: AppState, request: Request, job: Any) -> Any:
        assert state.images.used == 800
        return in_thread(iter([await result_of(state, request, job)])), "x"  # type: ignore[list-item]

    job = Running(NanLatentsError("After step 3 the latents contain NaN.", 3, None))
    state, error = run(answer, job)
    assert (error.status, error.code) == (500, "nan_latents")
    assert job.is_cancelled
    assert state.images.used == 0


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_answer_ends_its_job_and_frees_memory(is_cut: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"one"
        if is_cut:
            raise OSError("the connection is gone")

    async def answer(state: AppState, request: Request, job: Any) -> Any:
        return pieces(), "video/mp4"

    job = Running()
    state, response = run(answer, job)
    assert (response.media_type, state.images.used, job.is_cancelled) == ("video/mp4", 800, False)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(3600)

    async def main() -> None:
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)

    if is_cut:
        with pytest.raises(ClientDisconnect):
            asyncio.run(main())
    else:
        asyncio.run(main())
        assert b"".join(message.get("body", b"") for message in sent) == b"one"
    assert job.is_cancelled
    assert state.images.used == 0
