"""How is something made while its client waits? It is given up when the client leaves, and frees what it held."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..core.errors import SamovarError
from ..engine import GenerationResult, Job
from ..media import encode
from .app_state import AppState
from .asking import Asked, unless_gone
from .responses import PIECE, gathered
from .traces import keep_account


async def make_now(
    state: AppState,
    request: Request,
    asked: Asked[Any],
    answer: Callable[[Job], Awaitable[tuple[AsyncIterator[bytes], str]]],
) -> Response:
    """Submit a request, and send what `answer` makes of its job: pieces and their type."""
    with contextlib.ExitStack() as held:
        held.enter_context(state.images.hold()).add(asked.num_bytes(state))
        job = asked.submit(state, asked.body.deadline)
        held.callback(keep_account, request.scope, job)
        held.callback(job.cancel)  # Does nothing if it is over.
        pieces, kind = await answer(job)
        return _Answer(pieces, kind, held.pop_all())


async def result_of(state: AppState, request: Request, job: Job) -> GenerationResult:
    """What a job has made, if its client waits for it."""
    outcome = await unless_gone(request, job.outcome())
    if isinstance(outcome, SamovarError):
        raise state.api_error(outcome) from outcome
    return outcome


async def encoded(state: AppState, request: Request, job: Job, suffix: str) -> AsyncIterator[bytes]:
    """The file of the only video or sound that a job makes, in pieces. Nothing is sent before all of it is there."""
    result = await result_of(state, request, job)
    try:
        content = await unless_gone(request, asyncio.to_thread(encode, result.outputs[0], suffix))
    except SamovarError as error:
        raise state.api_error(error) from error
    return in_thread(content[first : first + PIECE] for first in range(0, len(content), PIECE))


def in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces, made in a thread."""
    return iterate_in_threadpool(gathered(pieces))


class _Answer(StreamingResponse):
    """An answer that cancels its job and releases its memory when it ends, however it ends."""

    def __init__(self, pieces: AsyncIterator[bytes], kind: str, held: contextlib.ExitStack) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, media_type=kind, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)
