"""Answers: made while their client waits, given up when it leaves, and held in the budget until they are sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine import GenerationResult, Job
from ..media import check_suffix, encode
from .request import ClientRequest, HttpRequest, unless_gone
from .traces import keep_account

_PIECE = 2**18
"""Bytes that are sent at once: a longer piece would hold up others."""
MEDIA_TYPES = {"mp4": "video/mp4", "wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "aac": "audio/aac",
               "opus": "audio/ogg", "pcm": "audio/pcm"}  # fmt: skip


async def respond_with_file(http: HttpRequest, wanted: ClientRequest) -> Response:
    """The file of the only video or sound that is made. Nothing is sent before all of it is there."""
    suffix = check_suffix(f"output.{wanted.body.format}", wanted.state.omni.output.kind)

    async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
        content = await asyncio.to_thread(encode, (await job.result()).outputs[0], suffix)
        return in_thread(iter([content])), MEDIA_TYPES[wanted.body.format]

    return await make_now(http, wanted, answer)


async def make_now(
    http: HttpRequest, wanted: ClientRequest, answer: Callable[[Job], Awaitable[tuple[AsyncIterator[bytes], str]]]
) -> Response:
    """Submit a request, and send what `answer` makes of its job: pieces and their type."""
    with contextlib.ExitStack() as held:
        held.enter_context(wanted.state.images.hold(wanted.size.num_bytes))
        job = wanted.state.omni.submit(wanted.request)
        held.callback(keep_account, http.scope, job)
        held.callback(job.cancel)  # Does nothing if it is over.
        pieces, kind = await unless_gone(http, answer(job))
        return HeldResponse.of(pieces, kind, held, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})


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


class HeldResponse(StreamingResponse):
    """An answer that releases what it held when it ends, however it ends."""

    held: contextlib.ExitStack

    @classmethod
    def of(
        cls, pieces: AsyncIterator[bytes], kind: str, held: contextlib.ExitStack, headers: Mapping[str, str]
    ) -> HeldResponse:
        """The answer takes over what is held."""
        made = cls(pieces, media_type=kind, headers=headers)
        made.held = held.pop_all()
        return made

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.held:
            await super().__call__(scope, receive, send)
