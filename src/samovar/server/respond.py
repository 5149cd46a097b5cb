"""Answers: made while their client waits, given up when it leaves, and held in the budget until they are sent."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..core.errors import SamovarError
from ..engine import GenerationResult, Job
from ..media import check_suffix, encode
from .decode import JSON
from .request import ClientRequest, HttpRequest, unless_gone
from .state import AppState
from .traces import keep_account

_PIECE = 2**18
"""Bytes that are sent at once: a longer piece would hold up others."""
MEDIA_TYPES = {"mp4": "video/mp4", "wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "aac": "audio/aac",
               "opus": "audio/ogg", "pcm": "audio/pcm"}  # fmt: skip


async def respond_with_file(http: HttpRequest, wanted: ClientRequest[Any]) -> Response:
    """The file of the only video or sound that is made. Nothing is sent before all of it is there."""
    suffix = check_suffix(f"output.{wanted.body.format}", wanted.state.omni.output.kind)

    async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
        result = await result_of(http, job)
        content = await unless_gone(http, asyncio.to_thread(encode, result.outputs[0], suffix))
        return in_thread(iter([content])), MEDIA_TYPES[wanted.body.format]

    return await make_now(http, wanted, answer)


async def make_now(
    http: HttpRequest, wanted: ClientRequest[Any], answer: Callable[[Job], Awaitable[tuple[AsyncIterator[bytes], str]]]
) -> Response:
    """Submit a request, and send what `answer` makes of its job: pieces and their type."""
    with contextlib.ExitStack() as held:
        held.enter_context(wanted.state.images.hold(wanted.size.num_bytes))
        job = wanted.submit(wanted.body.deadline)
        held.callback(keep_account, http.scope, job)
        held.callback(job.cancel)  # Does nothing if it is over.
        pieces, kind = await answer(job)
        return HeldResponse(pieces, kind, held.pop_all(), {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


async def result_of(http: HttpRequest, job: Job) -> GenerationResult:
    """What a job has made, if its client waits for it."""
    outcome = await unless_gone(http, job.outcome())
    if isinstance(outcome, SamovarError):
        raise outcome
    return outcome


def details_of(result: GenerationResult) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    return {
        "seconds": round(result.seconds, 4),
        "num_inference_steps": result.params.num_inference_steps,
        "lora": [adapter._asdict() for adapter in result.lora],
        "notes": list(result.notes),
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def in_thread(contents: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same contents, made in a thread, in pieces that are short."""

    def pieces() -> Iterator[bytes]:
        for content in contents:
            for first in range(0, len(content), _PIECE):
                yield content[first : first + _PIECE]

    return iterate_in_threadpool(pieces())


async def json_response(
    state: AppState, build: Callable[[], Any], num_bytes: int, headers: dict[str, str] | None = None
) -> Response:
    """JSON that is built in a thread, where it takes `num_bytes` at most, and held in the budget until it is sent."""
    with contextlib.ExitStack() as held:
        hold = held.enter_context(state.images.hold(num_bytes))
        content = await asyncio.to_thread(lambda: json.dumps(build(), ensure_ascii=False).encode())
        hold.release()
        hold.add(len(content))
        headers = {"Content-Length": str(len(content))} | (headers or {})
        return HeldResponse(in_thread(iter([content])), JSON, held.pop_all(), headers)


class HeldResponse(StreamingResponse):
    """An answer that releases what it held when it ends, however it ends."""

    def __init__(
        self, pieces: AsyncIterator[bytes], kind: str, held: contextlib.ExitStack, headers: Mapping[str, str]
    ) -> None:
        super().__init__(pieces, media_type=kind, headers=headers)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await super().__call__(scope, receive, send)
