"""Answers: made while their client waits, given up when it leaves, and held in the budget until they are sent."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.concurrency import iterate_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..core.errors import SamovarError
from ..engine import GenerationResult, Job, Preview, Progress, Request, Started
from ..media import encode
from .decode_worker import JSON
from .request import HttpRequest, memory_of, submit, unless_gone
from .schemas import ImageBody, RequestBody
from .state import AppState
from .traces import keep_account

_PIXELS_PER_TOKEN = 16 * 16
PIECE = 3 * 2**16
"""Bytes of a file that are sent at once; a multiple of three, so that base64 goes on."""


class ImageData(BaseModel):
    b64_json: str
    seed: int


class ImagesBody(BaseModel):
    """Images"""

    created: int
    data: list[ImageData]
    background: str = "opaque"
    output_format: str
    size: str
    usage: dict[str, Any]
    samovar: dict[str, Any]


class EventBody(BaseModel):
    """One event of a stream; `data` is JSON."""

    event: str
    data: str


def images_pieces(body: ImageBody, result: GenerationResult, extra: dict[str, Any]) -> Iterator[bytes]:
    """The response without a stream, in pieces. Slow: use a thread."""
    shared = {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": body.format,
        "size": _size(result.images[0]),
        "usage": _usage(body, result),
        "samovar": _details(body, result, extra),
    }
    yield to_json(shared, inf_nan_mode="null")[:-1] + b', "data": ['
    for index, (image, seed) in enumerate(zip(result.images, result.seeds, strict=True)):
        yield b", " * bool(index) + f'{{"seed": {seed}'.encode()
        yield from _image_pieces(image, body)
    yield b"]}"


def server_event(kind: str, data: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def preview_event(prefix: str, body: ImageBody, preview: Preview, index: int) -> Iterator[bytes]:
    """In pieces. Slow: use a thread."""
    more = {"partial_image_index": index, "image_index": preview.image_index}
    yield from _image_event(f"{prefix}.partial_image", body, preview.image, more)


def completed_events(prefix: str, body: ImageBody, result: GenerationResult, extra: dict[str, Any]) -> Iterator[bytes]:
    """One event for each image, in pieces. Slow: use a thread."""
    shared = {"usage": _usage(body, result), "samovar": _details(body, result, extra)}
    for index, (image, seed) in enumerate(zip(result.images, result.seeds, strict=True)):
        yield from _image_event(f"{prefix}.completed", body, image, {"seed": seed, "image_index": index} | shared)


def gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same, but few: each goes through a thread, and is sent at once."""
    small: list[bytes] = []
    for piece in pieces:
        small.append(piece)
        if sum(map(len, small)) >= PIECE:
            yield b"".join(small)
            small.clear()
    if small:
        yield b"".join(small)


def step_event(event: Started | Progress) -> bytes:
    kind = f"samovar.{type(event).__name__.lower()}"
    return server_event(kind, {"type": kind, **asdict(event)})


def _size(image: Image) -> str:
    return f"{image.width}x{image.height}"


def details_of(result: GenerationResult) -> dict[str, Any]:
    """What OpenAI's form has no place for."""
    return {
        "seconds": round(result.seconds, 4),
        "num_inference_steps": result.params.num_inference_steps,
        "lora": [adapter._asdict() for adapter in result.lora],
        "notes": list(result.notes),
        "cache": [stats.to_dict() if hasattr(stats, "to_dict") else str(stats) for stats in result.cache],
    }


def _details(body: ImageBody, result: GenerationResult, extra: dict[str, Any]) -> dict[str, Any]:
    return details_of(result) | {"notes": [*result.notes, *body.notes]} | extra


def _usage(body: ImageBody, result: GenerationResult) -> dict[str, Any]:
    """A measure of input and output: words of the prompt, and patches of 16x16 pixels."""
    words = len(body.prompt.split())
    patches = sum(-(-image.width * image.height // _PIXELS_PER_TOKEN) for image in result.images)
    return {
        "input_tokens": words,
        "output_tokens": patches,
        "total_tokens": words + patches,
        "input_tokens_details": {"text_tokens": words, "image_tokens": 0},
        "output_tokens_details": {"text_tokens": 0, "image_tokens": patches},
    }


def _image_event(kind: str, body: ImageBody, image: Image, more: dict[str, Any]) -> Iterator[bytes]:
    data = {
        "type": kind,
        "created_at": int(time.time()),
        "size": _size(image),
        "quality": "auto",
        "background": "opaque",
        "output_format": body.format,
    }
    yield server_event(kind, data | more)[:-3]
    yield from _image_pieces(image, body)
    yield b"\n\n"


def _image_pieces(image: Image, body: ImageBody) -> Iterator[bytes]:
    """The end of an object: an image file in base64. No piece is so long that sending it holds up others."""
    file = io.BytesIO()
    if body.format == "png":
        image.save(file, "PNG", compress_level=1)  # A third of the time for a tenth more bytes.
    else:
        quality = 100 if body.output_compression is None else body.output_compression
        image.convert("RGB").save(file, body.format.upper(), quality=quality)
    content = file.getbuffer()
    yield b', "b64_json": "'
    for first in range(0, len(content), PIECE):
        yield base64.b64encode(content[first : first + PIECE])
    yield b'"}'


async def make_now(
    state: AppState,
    http: HttpRequest,
    body: RequestBody,
    request: Request,
    answer: Callable[[Job], Awaitable[tuple[AsyncIterator[bytes], str]]],
) -> Response:
    """Submit a request, and send what `answer` makes of its job: pieces and their type."""
    with contextlib.ExitStack() as held:
        held.enter_context(state.images.hold()).add(memory_of(state, request))
        job = submit(state, body, request, body.deadline)
        held.callback(keep_account, http.scope, job)
        held.callback(job.cancel)  # Does nothing if it is over.
        pieces, kind = await answer(job)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return HeldResponse(pieces, kind, held.pop_all(), headers)


async def result_of(state: AppState, http: HttpRequest, job: Job) -> GenerationResult:
    """What a job has made, if its client waits for it."""
    outcome = await unless_gone(http, job.outcome())
    if isinstance(outcome, SamovarError):
        raise state.api_error(outcome) from outcome
    return outcome


async def encoded(state: AppState, http: HttpRequest, job: Job, suffix: str) -> AsyncIterator[bytes]:
    """The file of the only video or sound that a job makes, in pieces. Nothing is sent before all of it is there."""
    result = await result_of(state, http, job)
    try:
        content = await unless_gone(http, asyncio.to_thread(encode, result.outputs[0], suffix))
    except SamovarError as error:
        raise state.api_error(error) from error
    return _pieces_of(content)


def in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The same pieces, made in a thread."""
    return iterate_in_threadpool(gathered(pieces))


def _pieces_of(content: bytes) -> AsyncIterator[bytes]:
    return in_thread(content[first : first + PIECE] for first in range(0, len(content), PIECE))


async def json_response(
    state: AppState, build: Callable[[], Any], num_bytes: int, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON that is built in a thread, where it takes `num_bytes` at most, and held in the budget until it is sent."""
    with contextlib.ExitStack() as held:
        hold = held.enter_context(state.images.hold())
        hold.add(num_bytes)
        content = await asyncio.to_thread(lambda: json.dumps(build(), ensure_ascii=False).encode())
        hold.release()
        hold.add(len(content))
        return HeldResponse(
            _pieces_of(content), JSON, held.pop_all(), {"Content-Length": str(len(content)), **(headers or {})}
        )


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
