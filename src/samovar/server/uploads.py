"""How is a body received? In pieces, up to a size limit, and not for long while memory is short."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import ClientDisconnect, Request

from .api_errors import ApiError
from .memory import Hold

_STALL_S = 1.0
"""How long a sender may pause while memory is short."""


def check_type(request: Request, *expected: str) -> str:
    """The kind of a body; others are refused. A page of another site could send some kinds without a preflight."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind not in expected:
        message = f"Content-Type must be {' or '.join(expected)}, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type")
    return kind


async def receive_body(request: Request, max_bytes: int, hold: Hold) -> list[bytes]:
    """The body of a request, in pieces: joining them would stop everybody else."""
    too_large = ApiError(413, f"The body is longer than {max_bytes:,} bytes.", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    received = 0
    while True:
        message = await _next(request, hold)
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


async def _next(request: Request, hold: Hold) -> Any:
    """The next piece. Those who send nothing give way when there is little room, or they would keep it from others."""
    while True:
        try:
            async with asyncio.timeout(_STALL_S):
                return await request.receive()
        except TimeoutError:
            if hold.ledger.is_tight:
                message = f"Nothing was received for {_STALL_S:g} s, and memory is short. Try again."
                raise ApiError(408, message, code="body_stalled") from None
