"""What does an HTTP request ask for, and may it? Its body and files, judged by the limits and what the model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from PIL.Image import Image
from starlette.requests import ClientDisconnect, Request

from .. import engine
from ..core.errors import SamovarError
from ..engine import Job
from .api_errors import ApiError
from .app_state import AppState
from .bodies import Body, RequestBody, field_names, read_body, read_texts
from .body_reader import reference_of
from .extents import USUAL_PIXELS, Extent, check_extent, extent_of
from .memory import BYTES_PER_PIXEL
from .options import check_options
from .uploads import check_type, receive_body

FORM = "multipart/form-data"
JSON = "application/json"
_USUAL_SECONDS, _BYTES_PER_SAMPLE = 60, 16
"""Of a sound that does not say how long it is; and of two channels, in memory and on their way."""
Answer = TypeVar("Answer")
AskedBody = TypeVar("AskedBody", bound=RequestBody, covariant=True)


@dataclass(frozen=True)
class Asked(Generic[AskedBody]):
    """A request that can be served."""

    body: AskedBody
    image: list[Image] = field(default_factory=list)
    inputs: Mapping[str, Image] = field(default_factory=dict)

    def request(self, state: AppState) -> engine.Request:
        """The same for the engine."""
        body = self.body
        return engine.Request(
            body.prompt,
            body.params(),
            None if not self.image else self.image[0] if len(self.image) == 1 else self.image,
            body.num_previews,
            state.is_exact(body.cache, body.quality),
            state.adapters_of(body.model, [adapter.model_dump() for adapter in body.lora or ()]),
            state.tolerance_of(body.tolerance, body.quality),
            self.inputs,
        )

    def submit(self, state: AppState, deadline_s: float | None) -> Job:
        """Put it into the engine's queue."""
        try:
            priority = self.body.priority or 0
            return state.omni.submit(self.request(state), priority=priority, deadline_s=deadline_s)
        except SamovarError as error:
            raise state.api_error(error) from error

    def num_bytes(self, state: AppState) -> int:
        """What it takes in this process at most: what was sent, what is made, and previews; ApiError if too much."""
        facts, most = state.omni.facts, state.images.most
        sent = sum(image.width * image.height for image in (*self.image, *self.inputs.values()))
        try:
            extent = extent_of(facts, self.request(state))
        except SamovarError as error:
            raise state.api_error(error) from error
        frame = extent.width * extent.height or max((image.width * image.height for image in self.image), default=0)
        count = self.body.params().over(facts.defaults).num_outputs_per_prompt or 1
        pixels = (frame or USUAL_PIXELS) * (extent.frames + self.body.num_previews)
        amount = BYTES_PER_PIXEL * (sent + count * pixels)
        if facts.output.kind == "audio":
            amount = int((extent.seconds or _USUAL_SECONDS) * (facts.output.rate or 1)) * _BYTES_PER_SAMPLE
        if amount > most:
            what = {"image": "images and previews take", "video": "video takes"}.get(facts.output.kind, "sound takes")
            message = f"The {what} {amount:,} bytes of memory; the limit is {most:,} (--max-memory). Ask for less."
            raise ApiError(400, message, param="n" if facts.output.kind == "image" else "size", code="size_above_limit")
        return amount


async def read_asked(
    state: AppState,
    request: Request,
    kind: type[Body],
    *,
    types: tuple[str, ...],
    files: Mapping[str, str] | None = None,
) -> Asked[Body]:
    """Receive and check a request; its files have these names, and are these inputs."""
    limits, is_form, names = state.config.limits, check_type(request, *types) == FORM, tuple(files or ())
    with state.bodies.hold() as hold:
        most = limits.max_upload_bytes if is_form or names else limits.max_json_bytes
        parts = await receive_body(request, most, hold)
        readers = state.body_readers
        if is_form:
            values, images = await unless_gone(
                request, readers.read_form(request.headers["content-type"], parts, names)
            )
        elif (short := readers.read_at_once(parts, names)) is not None:
            values, images = short, {}
        else:
            values, images = await unless_gone(request, readers.read_object(parts, names))
        for name in [name for name in values if name.partition("[")[0] in names]:
            field = name.partition("[")[0]
            if field in images:
                raise ApiError(400, f"The field {field!r} is given twice.", param=field, code="invalid_form")
            content = await unless_gone(request, state.fetcher.fetch(field, reference_of(name, values.pop(name))))
            hold.add(len(content))
            images[field] = [await unless_gone(request, state.body_readers.read_image(content, field))]
    body = read_values(state, kind, values, is_form=is_form)
    found: dict[str, list[Image]] = {}
    for name, several in images.items():
        found.setdefault((files or {})[name], []).extend(several)
    image = found.pop("image", [])
    state.check_model(body.model)
    state.check_open()
    return Asked(body, image, {name: each[0] for name, each in found.items()})


def read_values(state: AppState, kind: type[Body], values: Mapping[str, Any], *, is_form: bool = False) -> Body:
    """A body, whose other fields are arguments of the pipeline."""
    limits, fields = state.config.limits, field_names(kind)
    if values.keys() - fields:
        state.check_open()  # Nobody knows before the model is loaded.
    options = {name: is_text for name, is_text in state.options.items() if name not in fields}
    closed = state.omni.facts.takes - {"prompt"} if state.is_loaded else ()
    body = read_body(kind, read_texts(kind, values, options) if is_form else values, limits, options, closed)
    if body.options:
        check_options(body.options, state.omni.facts, limits)
    return body


def check_asked(state: AppState, asked: Asked[RequestBody]) -> Extent:
    """Refuse what the model does not take, and what is above the limits, before anything is allocated."""
    facts = state.omni.facts
    if not asked.body.prompt.strip() and facts.takes_prompt:
        raise ApiError(400, "prompt is missing.", param="prompt", code="missing_required_parameter")
    try:
        request = asked.request(state)
        facts.check(request)
        extent = extent_of(facts, request)
        check_extent(extent, facts, state.config.limits)
    except SamovarError as error:
        refusal = state.api_error(error)
        refusal.param = asked.body.wire_names.get(refusal.param or "", refusal.param)
        raise refusal from error
    return extent


async def unless_gone(request: Request, work: Awaitable[Answer]) -> Answer:
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
