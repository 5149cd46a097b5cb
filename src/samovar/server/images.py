"""How does an HTTP request become images? /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from PIL.Image import Image
from starlette.concurrency import iterate_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ..engine import Done, Event, Failed, Job, Preview
from ..errors import SamovarError
from .api_errors import ApiError
from .app_state import AppState
from .bodies import GenerationBody, ImageBody, check_sides, read_body, read_form
from .memory import BYTES_PER_PIXEL, Hold
from .responses import completed_events, gathered, images_pieces, preview_event, server_event, step_event
from .traces import keep_account
from .uploads import check_type, receive_body

_USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Images:
    """The two routes, which differ in how a request is written and in the names of events."""

    state: AppState

    async def generate(self, request: Request) -> Response:
        state, limits = self.state, self.state.config.limits
        check_type(request, "application/json")
        with state.bodies.hold() as hold:
            parts = await receive_body(request, limits.max_json_bytes, hold)
            values = await _unless_gone(request, state.body_readers.read_object(parts))
        body = read_body(GenerationBody, values, limits)
        return await self._respond(request, body, "image_generation")

    async def edit(self, request: Request) -> Response:
        state, limits = self.state, self.state.config.limits
        check_type(request, "multipart/form-data")
        state.check_open()
        state.check_can_edit()
        with state.bodies.hold() as hold:
            parts = await receive_body(request, limits.max_upload_bytes, hold)
            reading = state.body_readers.read_form(request.headers["content-type"], parts)
            texts, image = await _unless_gone(request, reading)
        body = read_form(texts, limits)
        check_sides(body.format, *image.size)
        return await self._respond(request, body, "image_edit", image)

    async def _respond(self, request: Request, body: ImageBody, prefix: str, image: Image | None = None) -> Response:
        self.state.check_model(body.model)
        self.state.check_open()
        hold = self.state.images.hold()
        try:
            hold.add(self._image_bytes(body, image))
            job = self._submit(body, image)
            try:
                pieces, kind = await self._pieces(request, body, prefix, job)
            except BaseException:
                job.cancel()  # Does nothing if it is over.
                keep_account(request.scope, job)
                raise
        except BaseException:
            hold.release()
            raise
        return _Answer(pieces, kind, job, hold)

    def _image_bytes(self, body: ImageBody, image: Image | None) -> int:
        """What the images of a request take at most: the one to edit, those that are made, and their previews."""
        params = body.params().over(self.state.omni.defaults)
        given = 0 if image is None else image.width * image.height
        made = (params.width or 0) * (params.height or 0) or given or _USUAL_PIXELS
        count = (params.num_outputs_per_prompt or 1) * (1 + (body.partial_images or 0))
        amount, most = BYTES_PER_PIXEL * (given + count * made), self.state.images.most
        if amount > most:
            message = f"The images and previews take {amount:,} bytes of memory; the limit is {most:,}. Ask for fewer."
            raise ApiError(400, message, param="n", code="size_above_limit")
        return amount

    def _submit(self, body: ImageBody, image: Image | None) -> Job:
        try:
            return self.state.omni.submit(
                body.prompt,
                body.params(),
                image=image,
                priority=body.priority or 0,
                deadline_s=body.deadline,
                num_previews=body.partial_images or 0,
                exact=body.cache is False,
                tolerance=self.state.tolerance_of(body.tolerance, body.quality),
                lora=self.state.adapters_of(body.model, [adapter.model_dump() for adapter in body.lora or ()]),
            )
        except SamovarError as error:
            raise self.state.api_error(error) from error

    async def _pieces(
        self, request: Request, body: ImageBody, prefix: str, job: Job
    ) -> tuple[AsyncIterator[bytes], str]:
        """The answer and its type. Nothing is sent before the first event, so a failure in the queue has its own
        status."""
        if not body.stream:
            outcome = await _unless_gone(request, job.outcome())
            if isinstance(outcome, SamovarError):
                raise self.state.api_error(outcome) from outcome
            return _in_thread(images_pieces(body, outcome, self._extra())), "application/json"
        events = job.__aiter__()
        first = await _unless_gone(request, events.__anext__())
        if isinstance(first, Failed):
            raise self.state.api_error(first.error) from first.error
        return self._events(first, events, body, prefix), "text/event-stream"

    async def _events(
        self, event: Event, events: AsyncIterator[Event], body: ImageBody, prefix: str
    ) -> AsyncIterator[bytes]:
        num_previews = 0
        while True:
            if isinstance(event, Preview):
                async for piece in _in_thread(preview_event(prefix, body, event, num_previews)):
                    yield piece
                num_previews += 1
            elif isinstance(event, Done):
                async for piece in _in_thread(completed_events(prefix, body, event.result, self._extra())):
                    yield piece
                return
            elif isinstance(event, Failed):
                yield server_event("error", self.state.api_error(event.error).body())
                return
            elif body.progress:
                yield step_event(event)
            event = await events.__anext__()

    def _extra(self) -> dict[str, Any]:
        return {"memory_bytes": self.state.omni.status().memory_bytes}


class _Answer(StreamingResponse):
    """An answer that cancels its job and releases its memory when it ends, however it ends."""

    def __init__(self, pieces: AsyncIterator[bytes], kind: str, job: Job, hold: Hold) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(pieces, media_type=kind, headers=headers)
        self._job, self._hold = job, hold

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()
            keep_account(scope, self._job)
            self._hold.release()


def _in_thread(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    return iterate_in_threadpool(gathered(pieces))


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
        # It may fail all the same, and nobody asks any more.
        working.add_done_callback(lambda task: task.cancelled() or task.exception())


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
