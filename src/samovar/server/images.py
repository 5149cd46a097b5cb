"""Images over HTTP, as in OpenAI's API: whole, or as a stream of events."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from typing import Any

from PIL.Image import Image
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response

from ..engine import Done, Event, Failed, GenerationResult, Job, Preview
from .decode import JSON
from .errors import api_error
from .request import ClientRequest, HttpRequest
from .respond import details_of, in_thread, make_now
from .schemas import EditBody, ImageBody

_PIXELS_PER_TOKEN = 16 * 16
_PIECE = 3 * 2**16
"""Bytes of a file that are written at once; a multiple of three, so that base64 goes on."""


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


async def respond_with_images(http: HttpRequest, wanted: ClientRequest) -> Response:
    body: ImageBody = wanted.body
    status = wanted.state.omni.status

    async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
        """Nothing is sent before the first event, so a failure in the queue has its own status."""
        if not body.stream:
            return in_thread(images_pieces(body, await job.result(), status().memory_bytes)), JSON
        events = job.__aiter__()
        first = await anext(events)
        if isinstance(first, Failed):
            raise first.error
        return stream(first, events), "text/event-stream"

    async def stream(event: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        num_previews = 0
        while True:
            async for piece in in_thread(event_pieces(body, event, num_previews, status().memory_bytes)):
                yield piece
            if isinstance(event, (Done, Failed)):
                return
            num_previews += isinstance(event, Preview)
            event = await anext(events)

    return await make_now(http, wanted, answer)


def event_pieces(body: ImageBody, event: Event, num_previews: int, memory_bytes: int) -> Iterator[bytes]:
    """What is sent of an event. Slow: use a thread."""
    prefix = "image_edit" if isinstance(body, EditBody) else "image_generation"
    shared = {"created_at": int(time.time()), "quality": "auto", "background": "opaque", "output_format": body.format}
    if isinstance(event, Preview):
        more = {"size": _size(event.image), "partial_image_index": num_previews, "image_index": event.image_index}
        yield from _with_image(_event(f"{prefix}.partial_image", shared | more), event.image, body)
    elif isinstance(event, Done):
        result = event.result
        shared |= {"usage": _usage(body, result), "samovar": _details(body, result, memory_bytes)}
        for index, (image, seed) in enumerate(zip(result.images, result.seeds, strict=True)):
            more = {"size": _size(image), "seed": seed, "image_index": index}
            yield from _with_image(_event(f"{prefix}.completed", shared | more), image, body)
    elif isinstance(event, Failed):
        yield _event("error", api_error(event.error).body())
    elif body.progress:
        yield _event(f"samovar.{type(event).__name__.lower()}", asdict(event))


def images_pieces(body: ImageBody, result: GenerationResult, memory_bytes: int) -> Iterator[bytes]:
    """The answer without a stream. Slow: use a thread."""
    shared = {
        "created": int(time.time()),
        "background": "opaque",
        "output_format": body.format,
        "size": _size(result.images[0]),
        "usage": _usage(body, result),
        "samovar": _details(body, result, memory_bytes),
    }
    before = _json(shared)[:-1] + b', "data": ['
    for image, seed in zip(result.images, result.seeds, strict=True):
        yield from _with_image(before + _json({"seed": seed}), image, body)
        before = b", "
    yield b"]}"


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: ".encode() + _json({"type": kind} | data) + b"\n\n"


def _json(data: dict[str, Any]) -> bytes:
    return to_json(data, inf_nan_mode="null")


def _size(image: Image) -> str:
    return f"{image.width}x{image.height}"


def _with_image(content: bytes, image: Image, body: ImageBody) -> Iterator[bytes]:
    """JSON whose last object also has an image file in base64, which is made as it is sent."""
    file = io.BytesIO()
    if body.format == "png":
        image.save(file, "PNG", compress_level=1)  # A third of the time for a tenth more bytes.
    else:
        quality = 100 if body.output_compression is None else body.output_compression
        image.convert("RGB").save(file, body.format.upper(), quality=quality)
    before, _, end = content.rpartition(b"}")
    before += b', "b64_json": "'
    for first in range(0, file.tell(), _PIECE):
        yield before + base64.b64encode(file.getbuffer()[first : first + _PIECE])
        before = b""
    yield b'"}' + end


def _details(body: ImageBody, result: GenerationResult, memory_bytes: int) -> dict[str, Any]:
    return details_of(result) | {"notes": [*result.notes, *body.notes], "memory_bytes": memory_bytes}


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
