"""Connections: uvicorn's own, each of which knows since when it waits for its client.

uvicorn closes a connection that is idle after a request. It has no limit on the time until the first request has come
as a whole, and does not see a client leave that sent something behind its request.
"""

from __future__ import annotations

import contextlib
import logging
import math
import resource
import socket
import sys
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..core.errors import SettingError

ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before any of them is looked at."""
_KEPT_FILES = 160
"""Open files that are kept for libraries, workers, forms and logs."""
_LOG_S = 60.0
_READ_BYTES = 2**12
"""What is read from a connection before all others have a turn: it may be hundreds of chunks of a byte."""
_LONG_READ_S, _REST = 0.002, 40
"""Time to compute of one reading, above which it has chunks of a few bytes, and how many times as long others come
first."""
_LEFT = (7, 8)
"""States of a TCP connection whose client has left: CLOSE, if it was reset, and CLOSE_WAIT."""

log = logging.getLogger("samovar.server")


class Connection(H11Protocol):
    """A connection. When there are too many, the one that makes least of its place is closed."""

    _last_log: ClassVar[float] = -_LOG_S

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.waits_since = self.heard_at = time.monotonic()
        if len(self.connections) >= (self.limit_concurrency or math.inf) - ACCEPTED_AT_ONCE:
            self._make_room()

    @property
    def waits(self) -> bool:
        """Whether it is the client's turn to send."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        with contextlib.suppress(AttributeError):  # Another loop than asyncio's has its own limit.
            transport.max_size = _READ_BYTES

    def data_received(self, data: bytes) -> None:
        self.heard_at, begun = time.monotonic(), time.thread_time()
        super().data_received(data)
        if (spent := time.thread_time() - begun) > _LONG_READ_S:
            self.transport.pause_reading()
            self.loop.call_later(_REST * spent, self._go_on)

    def _go_on(self) -> None:
        if not self.flow.read_paused:
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        self.waits_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:
            self.cycle.disconnected = True  # Whoever serves the request sends nothing behind this answer.
        with contextlib.suppress(h11.LocalProtocolError):  # To HEAD it has no body, and a response may have begun.
            super().send_400_response(msg)
        self.transport.close()

    def has_left(self) -> bool:
        """Whether the client has closed its side, which uvicorn does not see behind half a request."""
        try:
            line = self.transport.get_extra_info("socket")
            return sys.platform == "linux" and line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _LEFT
        except OSError:
            return False

    def _make_room(self) -> None:
        """Close the connection that has been silent for longest, of those that wait for their clients."""
        connections: Any = self.connections
        waiting = [each for each in connections if each.waits and not each.transport.is_closing()]
        for victim in sorted(waiting, key=lambda each: each.heard_at)[:1]:
            victim.transport.abort()
        if time.monotonic() - Connection._last_log >= _LOG_S:  # It must not fill a disk.
            log.warning("too many connections: those that wait are closed, the longest idle first (--max-connections)")
            Connection._last_log = time.monotonic()


def sweep(connections: Iterable[Any], timeout_s: float) -> None:
    """Close connections of clients that have left, or that took too long to send a request."""
    since = time.monotonic() - timeout_s
    for each in list(connections):
        if not each.transport.is_closing() and ((each.waits and each.waits_since < since) or each.has_left()):
            each.transport.abort()


def available_connections(wanted: int) -> int:
    """As many connections as wanted, or as the system's limit on open files leaves room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = wanted if limit == resource.RLIM_INFINITY else limit - _KEPT_FILES - ACCEPTED_AT_ONCE
    if room < 1:
        message = f"The limit on open files is {limit}, which leaves none for connections. Raise it with ulimit -n."
        raise SettingError(message, param="max_connections")
    return min(wanted, room)
