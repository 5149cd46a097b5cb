"""Images over HTTP: /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from PIL.Image import Image
from starlette.responses import Response

from ..engine import Done, Event, Failed, Job, Preview, Request
from .decode_worker import JSON
from .errors import ApiError
from .request import FORM, HttpRequest, check_type, read_request, unless_gone
from .respond import (
    completed_events,
    images_pieces,
    in_thread,
    make_now,
    preview_event,
    result_of,
    server_event,
    step_event,
)
from .schemas import EditBody, GenerationBody, ImageBody, check_sides
from .state import AppState

EDIT_FILES = {"image": "image", "image[]": "image", "mask": "mask", "control_image": "control_image"}
"""The names of files, and which inputs they are."""


@dataclass(frozen=True)
class Images:
    """The two routes, which differ in how a request is written and in the names of events."""

    state: AppState

    async def generate(self, request: HttpRequest) -> Response:
        self.state.check_room()
        body, wanted = await read_request(self.state, request, GenerationBody, types=(JSON,))
        return await self._respond(request, body, wanted, "image_generation")

    async def edit(self, request: HttpRequest) -> Response:
        check_type(request, FORM)
        self.state.check_open()
        self.state.check_can_edit()
        self.state.check_room()
        body, wanted = await read_request(self.state, request, EditBody, types=(FORM,), files=EDIT_FILES)
        if not wanted.images:
            raise ApiError(400, "image is missing. Send it as a file.", param="image", code="invalid_value")
        check_sides(body.format, *wanted.images[0].size)
        if (mask := wanted.inputs.get("mask")) is not None:
            white = await asyncio.to_thread(_where_white, mask)
            wanted = replace(wanted, inputs={**wanted.inputs, "mask": white})
        return await self._respond(request, body, wanted, "image_edit")

    async def _respond(self, http: HttpRequest, body: ImageBody, request: Request, prefix: str) -> Response:
        self.state.check_kind("image")

        async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
            """Nothing is sent before the first event, so a failure in the queue has its own status."""
            if not body.stream:
                result = await result_of(self.state, http, job)
                return in_thread(images_pieces(body, result, self._extra())), JSON
            events = job.__aiter__()
            first = await unless_gone(http, events.__anext__())
            if isinstance(first, Failed):
                raise self.state.api_error(first.error) from first.error
            return self._events(first, events, body, prefix), "text/event-stream"

        return await make_now(self.state, http, body, request, answer)

    async def _events(
        self, event: Event, events: AsyncIterator[Event], body: ImageBody, prefix: str
    ) -> AsyncIterator[bytes]:
        num_previews = 0
        while True:
            if isinstance(event, Preview):
                async for piece in in_thread(preview_event(prefix, body, event, num_previews)):
                    yield piece
                num_previews += 1
            elif isinstance(event, Done):
                async for piece in in_thread(completed_events(prefix, body, event.result, self._extra())):
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


def _where_white(mask: Image) -> Image:
    """A mask in OpenAI's way, which is transparent where the image is redrawn, in ours, which is white there."""
    alpha = mask.getchannel("A") if "A" in mask.getbands() else None
    if alpha is None or alpha.getextrema()[0] == 255:
        return mask
    return alpha.point(lambda level: 255 - level)
