"""Which connections stay: those that are served, and of those that wait for their client as many as there is room for.

uvicorn closes a connection that is idle between two requests. It would wait for ever for the first request, for the
rest of one, for a client that reads no answer, and for one that sent something behind its request and left.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import resource
import socket
import sys
import termios
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..core.errors import SettingError

ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before any of them is looked at."""
_KEPT_FILES = 160
"""Open files that are kept for libraries, workers, forms and logs."""
_LOG_S = 60.0
_READ_BYTES = 2**12
"""What is read from a connection before all others have a turn: it may be hundreds of chunks of a byte."""
_LEFT = (7, 8)
"""States of a TCP connection whose client has left: CLOSE, if it was reset, and CLOSE_WAIT."""

log = logging.getLogger("samovar.server")


@dataclass(eq=False)
class _Client:
    """A connection, and since when it is its client's turn."""

    protocol: H11Protocol
    waits_since: float | None
    """None while a request is served."""
    heard_at: float
    """When something came of it, or was sent to it."""
    unread: int = 0
    unread_since: float = 0.0

    @property
    def address(self) -> str:
        return self.protocol.client[0] if self.protocol.client else ""


class Door:
    """Makes uvicorn's connections, and closes those that wait for too long, or longest when there are too many."""

    def __init__(self, most: int, timeout_s: float) -> None:
        self._most, self._timeout_s = most, timeout_s
        self._clients: dict[H11Protocol, _Client] = {}
        self._by_address: dict[tuple[str, int] | None, _Client] = {}
        self._num_closed, self._last_log = 0, -_LOG_S

    def __call__(self, *args: Any, **more: Any) -> H11Protocol:
        """A new connection, as uvicorn's `http` class would make it."""
        if len(self._clients) >= self._most:
            self._make_room()
        protocol = H11Protocol(*args, **more)
        self._clients[protocol] = _Client(protocol, time.monotonic(), time.monotonic())
        protocol.loop.call_soon(protocol.loop.call_soon, self._enter, protocol)  # Once it is connected.
        return protocol

    def _enter(self, protocol: H11Protocol) -> None:
        if protocol in self._clients:
            self._by_address[protocol.client] = self._clients[protocol]
        with contextlib.suppress(AttributeError):  # Another loop than asyncio's has its own limit.
            protocol.transport.max_size = _READ_BYTES  # type: ignore[attr-defined]

    def sweep(self) -> None:
        """Close connections of clients that have left, that send too slowly, or that read nothing."""
        now = time.monotonic()
        for protocol, client in list(self._clients.items()):
            transport: asyncio.Transport | None = protocol.transport
            if transport is None:
                continue
            if transport.is_closing():
                self._forget(client)
            elif self._is_late(client, transport, now) or _has_left(transport):
                transport.abort()

    def _forget(self, client: _Client) -> None:
        del self._clients[client.protocol]
        if self._by_address.get(client.protocol.client) is client:
            del self._by_address[client.protocol.client]

    def _is_late(self, client: _Client, transport: asyncio.Transport, now: float) -> bool:
        """Whether it was the client's turn for too long: to send, or to read."""
        unread = transport.get_write_buffer_size()
        if not unread:
            client.unread = 0
            return client.waits_since is not None and now - client.waits_since > self._timeout_s
        unread += _bytes_in_flight(transport)
        if not 0 < client.unread <= unread:
            client.unread_since = now
        client.unread = unread
        return now - client.unread_since > self._timeout_s

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest, of the address that has most that wait."""
        waiting = [each for each in self._clients.values() if each.waits_since is not None and each.protocol.transport]
        counts = Counter(each.address for each in waiting)
        if waiting:
            first = max(waiting, key=lambda each: (counts[each.address], -each.heard_at))
            self._forget(first)
            first.protocol.transport.abort()
        self._num_closed += 1
        if time.monotonic() - self._last_log >= _LOG_S:  # It must not fill a disk.
            message = "too many connections (at most %d): closed %d, those that waited longest"
            log.warning(message, self._most, self._num_closed)
            self._num_closed, self._last_log = 0, time.monotonic()

    def watching(self, app: ASGIApp) -> ASGIApp:
        """The same application. It is the client's turn until its request has come as a whole, and again after the
        answer. Nothing is sent on a connection that uvicorn closes, such as for a body that is no HTTP."""

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            client = self._by_address.get(scope["client"] and tuple(scope["client"]))
            if client is None:
                await app(scope, receive, send)
                return
            headers = Headers(scope=scope)
            client.heard_at = time.monotonic()
            if "transfer-encoding" not in headers and headers.get("content-length", "0") == "0":
                client.waits_since = None

            async def noting() -> Message:
                message = await receive()
                if message["type"] == "http.request":
                    client.heard_at = time.monotonic()
                    client.waits_since = client.waits_since if message.get("more_body") else None
                return message

            async def sending(message: Message) -> None:
                if not client.protocol.transport.is_closing():
                    await send(message)

            try:
                await app(scope, noting, sending)
            finally:
                client.waits_since = client.heard_at = time.monotonic()

        return watched


def available_connections(wanted: int) -> int:
    """As many connections as wanted, or as the system's limit on open files leaves room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    room = limit - _KEPT_FILES - ACCEPTED_AT_ONCE
    if room < 1:
        message = f"The limit on open files is {limit}, which leaves none for connections. Raise it with ulimit -n."
        raise SettingError(message, param="max_connections")
    return min(wanted, room)


def _has_left(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side, which uvicorn does not see behind half a request."""
    try:
        line = transport.get_extra_info("socket")
        return sys.platform == "linux" and line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT
    except OSError:
        return False


def _bytes_in_flight(transport: asyncio.Transport) -> int:
    """What the system holds for a client. It takes more only once megabytes are gone, which may take minutes."""
    found = bytearray(4)
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, found)
    except OSError:  # Closed meanwhile, or not a socket that can tell.
        return 0
    return int.from_bytes(found, sys.byteorder)
