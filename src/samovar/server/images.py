"""How does an HTTP request become images? /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL.Image import Image
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine import Done, Event, Failed, Job, Preview
from ..errors import SamovarError
from .app_state import AppState
from .bodies import GenerationBody, ImageBody, check_sides, read_body, read_form, read_object
from .responses import completed_events, images_response, preview_event, server_event, step_event
from .uploads import decode, find_image, receive_form, receive_json

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Images:
    """The two routes, which differ in how a request is written and in the names of events."""

    state: AppState

    async def generate(self, request: Request) -> Response:
        limits = self.state.config.limits
        content = await receive_json(request, limits.max_json_bytes)
        body = read_body(GenerationBody, read_object(content), limits)
        return await self._respond(request, body, "image_generation")

    async def edit(self, request: Request) -> Response:
        limits = self.state.config.limits
        texts, files = await receive_form(request, limits.max_upload_bytes)
        try:
            body = read_form(texts, limits)
            self.state.check_can_edit()
            # In a thread even for the header: a PNG may have a hundred thousand chunks before its pixels.
            image = await asyncio.to_thread(find_image, files, limits.max_pixels)
            check_sides(body.format, *image.size)
            pixels = await asyncio.to_thread(decode, image)
        finally:
            for file in files.values():
                await file.close()
        return await self._respond(request, body, "image_edit", pixels)

    async def _respond(self, request: Request, body: ImageBody, prefix: str, image: Image | None = None) -> Response:
        self.state.check_model(body.model)
        self.state.check_open()
        try:
            job = self.state.omni.submit(
                body.prompt,
                body.params(),
                image=image,
                priority=body.priority or 0,
                deadline_s=body.deadline,
                num_previews=body.partial_images or 0,
                exact=body.cache is False,
            )
        except SamovarError as error:
            raise self.state.api_error(error) from error
        if body.stream:
            return await self._stream(request, body, prefix, job)
        try:
            outcome = await _unless_gone(request, job.outcome())
        finally:
            job.cancel()  # Does nothing if it is over.
        if isinstance(outcome, SamovarError):
            raise self.state.api_error(outcome) from outcome
        content = await asyncio.to_thread(images_response, body, outcome, self._extra())
        return Response(content, media_type="application/json")

    async def _stream(self, request: Request, body: ImageBody, prefix: str, job: Job) -> Response:
        """Events as they come. Nothing is sent before the first one, so a failure in the queue has its own status."""
        events = job.__aiter__()
        try:
            first = await _unless_gone(request, events.__anext__())
        except BaseException:
            job.cancel()
            raise
        if isinstance(first, Failed):
            raise self.state.api_error(first.error) from first.error
        return _EventStream(self._events(first, events, body, prefix), job)

    async def _events(
        self, event: Event, events: AsyncIterator[Event], body: ImageBody, prefix: str
    ) -> AsyncIterator[bytes]:
        num_previews = 0
        while True:
            if isinstance(event, Preview):
                yield await asyncio.to_thread(preview_event, prefix, body, event, num_previews)
                num_previews += 1
            elif isinstance(event, Done):
                yield await asyncio.to_thread(completed_events, prefix, body, event.result, self._extra())
                return
            elif isinstance(event, Failed):
                yield server_event("error", self.state.api_error(event.error).body())
                return
            elif body.progress:
                yield step_event(event)
            event = await events.__anext__()

    def _extra(self) -> dict[str, Any]:
        return {"memory_bytes": self.state.omni.status().memory_bytes}


class _EventStream(StreamingResponse):
    """A stream that cancels its job when it ends, however it ends."""

    def __init__(self, content: AsyncIterator[bytes], job: Job) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _unless_gone(request: Request, work: Awaitable[Answer]) -> Answer:
    """Wait for some work; ClientDisconnect if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
