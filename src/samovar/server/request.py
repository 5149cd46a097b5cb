"""Requests of clients: received, read, and judged by the limits and by what the model takes."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Mapping
from typing import Any, NamedTuple, TypeVar

import starlette.requests
from PIL.Image import Image
from starlette.requests import ClientDisconnect

from ..core.errors import SettingError
from ..engine import Request
from .decode import IMAGE, JSON, Found, Task, reference_of
from .errors import ApiError, api_error
from .memory import Hold
from .output_size import OutputSize, output_size
from .schemas import RequestBody, read_body
from .state import AppState

FORM = "multipart/form-data"
_OTHER_CHARSET = re.compile(r'charset=(?!"?utf-?8\b)')
_STALL_S = 1.0
"""How long a sender may pause while memory is short."""
HttpRequest = starlette.requests.Request
Answer = TypeVar("Answer")
Images = dict[str, list[Image]]
"""By what they are."""


class ClientRequest(NamedTuple):
    """What a client asks for: its fields, the request for the engine that they are, and how much that makes."""

    state: AppState
    body: Any
    request: Request
    size: OutputSize


def client_request(
    state: AppState, kind: type[RequestBody], values: Mapping[str, Any], images: Images
) -> ClientRequest:
    """A request from the values of its fields. What the model does not take, or is above the limits, is refused before
    anything is allocated."""
    facts, several = state.omni.facts, images.get("image", [])
    body = read_body(state.schema(kind), values, facts)
    body.check()
    state.check_model(body.model)
    try:
        request = Request(
            body.prompt,
            body.params(),
            several[0] if len(several) == 1 else several or None,
            num_previews=body.num_previews,
            exact=state.is_exact(body.cache, body.quality),
            lora=state.adapters_of(body.model, [adapter.model_dump() for adapter in body.lora or ()]),
            tolerance=state.tolerance_of(body.tolerance, body.quality),
            inputs={name: each[0] for name, each in images.items() if name != "image"},
            priority=body.priority or 0,
            deadline_s=body.deadline,
        )
        request = facts.check(request)
        size = output_size(facts, request, state.config.limits)
    except SettingError as error:  # By the names that parameters have in this kind of request.
        refused = api_error(error)
        refused.param = body.wire_name(refused.param)
        raise refused from error
    if size.num_bytes > state.images.most:
        message = (
            f"The {facts.output} would take {size.num_bytes:,} bytes of memory; the limit is {state.images.most:,}"
        )
        param = "n" if facts.output.kind == "image" else "size"
        raise ApiError(f"{message} (--max-memory). Ask for less.", param, "size_above_limit")
    return ClientRequest(state, body, request, size)


async def read_values(
    state: AppState, http: HttpRequest, kind: str, files: Mapping[str, str]
) -> tuple[dict[str, Any], Images]:
    """Receive a body: the values of its fields, those of a form as text, and its images. Its files have these names,
    and are these inputs."""
    limits = state.config.limits
    task = Task(http.headers["content-type"] if kind == FORM else JSON, limits.max_pixels, limits.max_prompt_characters,
                limits.max_body_s, tuple(files))  # fmt: skip
    with state.bodies.hold() as hold:
        parts = await receive_body(http, limits.max_upload_bytes if files else limits.max_json_bytes, hold)
        values, images = await unless_gone(http, _read(state, task, parts, hold))
    found = Images()
    for name, image in images:
        found.setdefault(files[name], []).append(image)
    return values, found


async def _read(state: AppState, task: Task, parts: list[bytes], hold: Hold) -> Found:
    """What a body holds, with the images that it names by URL."""
    values, images = await state.decode_pool.read(task, parts)
    for name in [name for name in values if name.partition("[")[0] in task.files]:
        field = name.partition("[")[0]
        if field in dict(images):
            raise ApiError(f"The field {field!r} is given twice.", field, "invalid_form")
        content = await state.fetcher.fetch(field, reference_of(name, values.pop(name)))
        hold.add(len(content))
        one = task._replace(content_type=IMAGE, files=(field,))
        images += (await state.decode_pool.read(one, [content]))[1]
    return values, images


def check_type(http: HttpRequest, *expected: str) -> str:
    """The kind of a body; others are refused. A page of another site could send some kinds without a preflight."""
    header = http.headers.get("content-type", "").lower()
    kind = header.partition(";")[0].strip()
    if kind not in expected or _OTHER_CHARSET.search(header):
        message = f"Content-Type must be {' or '.join(expected)} in UTF-8, not {header[:80]!r}."
        raise ApiError(message, None, "unsupported_media_type", 415)
    return kind


async def receive_body(http: HttpRequest, max_bytes: int, hold: Hold) -> list[bytes]:
    """The body of a request, in pieces: joining them would stop everybody else."""
    too_large = ApiError(f"The body is longer than {max_bytes:,} bytes.", None, "body_too_large", 413)
    announced = http.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts, received = list[bytes](), 0
    async for part in HttpRequest(http.scope, functools.partial(_next, http, hold)).stream():
        received += len(part)
        if received > max_bytes:
            raise too_large
        hold.add_part(part)
        parts.append(part)
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
                raise ApiError(message, None, "body_stalled", 408) from None


async def unless_gone(http: HttpRequest, work: Awaitable[Answer]) -> Answer:
    """Wait for some work; ClientDisconnect if the client leaves first."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(http))
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
