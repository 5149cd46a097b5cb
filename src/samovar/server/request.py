"""Requests of clients: received, read, and judged by the limits and by what the model takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import starlette.requests
from PIL.Image import Image
from starlette.requests import ClientDisconnect

from ..core.errors import SamovarError
from ..engine import Job, Request
from .decode_worker import IMAGE, JSON, reference_of
from .errors import ApiError
from .memory import Hold
from .options import check_options
from .output_size import USUAL_PIXELS, OutputSize, check_output_size, output_size
from .schemas import Body, RequestBody, field_names, read_body, read_texts
from .settings import BYTES_PER_PIXEL
from .state import AppState

FORM = "multipart/form-data"
_USUAL_SECONDS, _BYTES_PER_SAMPLE = 60, 16
"""Of a sound that does not say how long it is; and of two channels, in memory and on their way."""
_STALL_S = 1.0
"""How long a sender may pause while memory is short."""
HttpRequest = starlette.requests.Request
Answer = TypeVar("Answer")


async def read_request(
    state: AppState,
    http: HttpRequest,
    kind: type[Body],
    *,
    types: tuple[str, ...],
    files: Mapping[str, str] | None = None,
) -> tuple[Body, Request]:
    """Receive and check a request: its fields, and what they ask of the engine. Its files have these names, and are
    these inputs."""
    limits, is_form, names = state.config.limits, check_type(http, *types) == FORM, tuple(files or ())
    found: dict[str, list[Image]] = {}
    with state.bodies.hold() as hold:
        most = limits.max_upload_bytes if is_form or names else limits.max_json_bytes
        parts = await receive_body(http, most, hold)
        kind_of_body = http.headers["content-type"] if is_form else JSON
        values, images = await unless_gone(http, state.decode_pool.read(kind_of_body, parts, names))
        for name in [name for name in values if name.partition("[")[0] in names]:
            field = name.partition("[")[0]
            if field in images:
                raise ApiError(400, f"The field {field!r} is given twice.", param=field, code="invalid_form")
            content = await unless_gone(http, state.fetcher.fetch(field, reference_of(name, values.pop(name))))
            hold.add(len(content))
            images |= (await unless_gone(http, state.decode_pool.read(IMAGE, [content], (field,))))[1]
        for name, several in images.items():
            found.setdefault((files or {})[name], []).extend(several)
    body = read_values(state, kind, values, is_form=is_form)
    state.check_model(body.model)
    state.check_open()
    return body, engine_request(state, body, found)


def engine_request(state: AppState, body: RequestBody, images: Mapping[str, list[Image]]) -> Request:
    """What the fields of a request ask of the engine, with its images by what they are."""
    several = images.get("image", [])
    try:
        return Request(
            body.prompt,
            body.params(),
            several[0] if len(several) == 1 else several or None,
            num_previews=body.num_previews,
            exact=state.is_exact(body.cache, body.quality),
            lora=state.adapters_of(body.model, [adapter.model_dump() for adapter in body.lora or ()]),
            tolerance=state.tolerance_of(body.tolerance, body.quality),
            inputs={name: each[0] for name, each in images.items() if name != "image"},
        )
    except SamovarError as error:
        raise state.api_error(error) from error


def read_values(state: AppState, kind: type[Body], values: Mapping[str, Any], *, is_form: bool = False) -> Body:
    """A body, whose other fields are arguments of the pipeline."""
    limits, fields = state.config.limits, field_names(kind)
    if values.keys() - fields:
        state.check_open()  # Nobody knows before the model is loaded.
    options = {name: state.options[name] for name in state.options.keys() - fields} if state.is_loaded else {}
    closed = state.omni.facts.takes - {"prompt"} if state.is_loaded else ()
    body = read_body(kind, read_texts(kind, values, options) if is_form else values, limits, options, closed)
    if body.options:
        check_options(body.options, state.omni.facts, limits)
    return body


def check_request(state: AppState, body: RequestBody, request: Request) -> OutputSize:
    """Refuse what the model does not take, and what is above the limits, before anything is allocated."""
    facts = state.omni.facts
    if not body.prompt.strip() and facts.takes_prompt:
        raise ApiError(400, "prompt is missing.", param="prompt", code="missing_required_parameter")
    try:
        facts.check(request)
        size = output_size(facts, request)
        check_output_size(size, facts, state.config.limits)
    except SamovarError as error:
        refusal = state.api_error(error)
        refusal.param = body.wire_names.get(refusal.param or "", refusal.param)
        raise refusal from error
    return size


def memory_of(state: AppState, request: Request) -> int:
    """What a request takes in this process at most: what was sent, what is made, and previews; ApiError if too much."""
    facts, most = state.omni.facts, state.images.most
    try:
        size = output_size(facts, request)
    except SamovarError as error:
        raise state.api_error(error) from error
    given = [image.width * image.height for image in request.images]
    sent: int = sum(given) + sum(image.width * image.height for image in request.inputs.values())
    frame = size.width * size.height or max(given, default=0)
    count = request.params.over(facts.defaults).num_outputs_per_prompt or 1
    amount = BYTES_PER_PIXEL * (sent + count * (frame or USUAL_PIXELS) * (size.frames + request.num_previews))
    if facts.output.kind == "audio":
        amount = int((size.seconds or _USUAL_SECONDS) * (facts.output.rate or 1)) * _BYTES_PER_SAMPLE
    if amount > most:
        what = {"image": "images and previews take", "video": "video takes"}.get(facts.output.kind, "sound takes")
        message = f"The {what} {amount:,} bytes of memory; the limit is {most:,} (--max-memory). Ask for less."
        raise ApiError(400, message, param="n" if facts.output.kind == "image" else "size", code="size_above_limit")
    return amount


def submit(state: AppState, body: RequestBody, request: Request, deadline_s: float | None) -> Job:
    """Put a request into the engine's queue."""
    try:
        return state.omni.submit(request, priority=body.priority or 0, deadline_s=deadline_s)
    except SamovarError as error:
        raise state.api_error(error) from error


def check_type(http: HttpRequest, *expected: str) -> str:
    """The kind of a body; others are refused. A page of another site could send some kinds without a preflight."""
    kind = http.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in expected:
        message = f"Content-Type must be {' or '.join(expected)}, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type")
    return kind


async def receive_body(http: HttpRequest, max_bytes: int, hold: Hold) -> list[bytes]:
    """The body of a request, in pieces: joining them would stop everybody else."""
    too_large = ApiError(413, f"The body is longer than {max_bytes:,} bytes.", code="body_too_large")
    announced = http.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    received = 0
    while True:
        message = await _next(http, hold)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        received += len(part)
        if received > max_bytes:
            raise too_large
        if part:
            hold.add_part(part)
            parts.append(part)
        if not message.get("more_body", False):
            return parts


async def _next(http: HttpRequest, hold: Hold) -> Any:
    """The next piece. Those who send nothing give way when there is little room, or they would keep it from others."""
    while True:
        try:
            async with asyncio.timeout(_STALL_S):
                return await http.receive()
        except TimeoutError:
            if hold.ledger.is_tight:
                message = f"Nothing was received for {_STALL_S:g} s, and memory is short. Try again."
                raise ApiError(408, message, code="body_stalled") from None


async def unless_gone(http: HttpRequest, work: Awaitable[Answer]) -> Answer:
    """Wait for some work; ClientDisconnect if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnect(http))
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


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
