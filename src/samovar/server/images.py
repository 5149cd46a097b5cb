"""How does a request become pictures? /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL.Image import Image
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine import Done, Event, Failed, GeneratedPictures, Preview, Progress, Started, Ticket
from ..errors import SamovarError
from .failures import Refusal
from .house import House
from .protocol import ImageRequest, check_sides
from .replies import completed_events, images_body, partial_event, progress_event, server_event, started_event
from .strict import read_object
from .uploads import decode, picture_in, read_body, read_form

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Images:
    """The two routes, which differ in how a request is written and in what its events are called."""

    house: House

    async def generate(self, request: Request) -> Response:
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":  # A page of another site could send anything else without being asked.
            message = f"Content-Type must be application/json, not {kind[:80]!r}."
            raise Refusal(415, message, code="unsupported_media_type")
        limits = self.house.config.limits
        body = await read_body(request, limits.max_json_bytes)
        asked = ImageRequest.from_values(read_object(body), limits)
        return await self._answer(request, asked, "image_generation")

    async def edit(self, request: Request) -> Response:
        limits = self.house.config.limits
        texts, files = await read_form(request, limits.max_upload_bytes)
        try:
            asked = ImageRequest.from_form(texts, limits)
            self.house.check_can_edit()
            self.house.check_has_room()  # Before the pixels are decoded, which takes memory.
            # In a thread even for the header: a PNG may have a hundred thousand chunks before its pixels.
            image = await asyncio.to_thread(picture_in, files, limits.max_pixels)
            check_sides(asked.output_format, *image.size)
            pixels = await asyncio.to_thread(decode, image)
        finally:
            for file in files.values():
                await file.close()
        return await self._answer(request, asked, "image_edit", pixels)

    async def _answer(self, request: Request, asked: ImageRequest, prefix: str, image: Image | None = None) -> Response:
        omni = self.house.engine_for(asked)
        try:
            ticket = omni.submit(
                asked.prompt,
                asked.params,
                image=image,
                priority=asked.priority,
                deadline_s=asked.deadline_s,
                num_previews=asked.num_previews,
                exact=not asked.is_cached,
            )
        except SamovarError as error:
            raise self.house.refusal_of(error) from error
        if asked.is_streamed:
            return await self._stream(request, asked, prefix, ticket)
        try:
            end = await _unless_gone(request, ticket.end())
        finally:
            ticket.cancel()  # Of no effect on one that has ended.
        if isinstance(end, SamovarError):
            raise self.house.refusal_of(end) from end
        body = await asyncio.to_thread(images_body, asked, end, self._figures())
        return Response(body, media_type="application/json")

    async def _stream(self, request: Request, asked: ImageRequest, prefix: str, ticket: Ticket) -> Response:
        """Events as they come. Nothing is sent before the first one, so that what fails in the queue has its status."""
        events = ticket.__aiter__()
        try:
            first = await _unless_gone(request, events.__anext__())
        except BaseException:
            ticket.cancel()
            raise
        if isinstance(first, Failed):
            raise self.house.refusal_of(first.error) from first.error
        return _EventStream(self._events(first, events, asked, prefix), ticket)

    async def _events(
        self, first: Event, events: AsyncIterator[Event], asked: ImageRequest, prefix: str
    ) -> AsyncIterator[bytes]:
        event, num_partial = first, 0
        while True:
            if isinstance(event, Preview):
                yield await asyncio.to_thread(partial_event, prefix, asked, event, num_partial)
                num_partial += 1
            elif isinstance(event, Done):
                yield await self._completed(asked, prefix, event.result)
                return
            elif isinstance(event, Failed):
                yield server_event("error", self.house.refusal_of(event.error).body())
                return
            elif asked.has_progress:
                yield _told(event)
            event = await events.__anext__()

    async def _completed(self, asked: ImageRequest, prefix: str, result: GeneratedPictures) -> bytes:
        return await asyncio.to_thread(completed_events, prefix, asked, result, self._figures())

    def _figures(self) -> dict[str, Any]:
        return {"memory_bytes": self.house.omni.status().memory_bytes}


class _EventStream(StreamingResponse):
    """A stream whose end, however it comes, is the end of its request."""

    def __init__(self, content: AsyncIterator[bytes], ticket: Ticket) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


async def _unless_gone(request: Request, work: Awaitable[Answer]) -> Answer:
    """What comes of some work, unless the client goes away before."""
    doing = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        leaving.cancel()
        doing.cancel()


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(event: Started | Progress) -> bytes:
    return started_event(event) if isinstance(event, Started) else progress_event(event)
