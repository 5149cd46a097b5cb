"""How long may a connection stay, and what may it send? As little as serves everybody else."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import re
import resource
import socket
import sys
import termios
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..core.errors import SettingError
from .api_errors import ApiError

ACCEPTED_AT_ONCE = 32
"""Connections that are accepted before any of them is looked at."""
_KEPT_FILES = 96
"""Open files that are kept for workers, forms and logs, beside those that are open when the server starts."""
_LOG_S = 60.0
_PIECE = 2**16
"""Bytes that are read from a connection before all others have a turn. asyncio would read 256 KiB."""
_CHUNKED_PIECE, _TURN_S = 2**9, 0.001
"""Bytes of a body in chunks that are parsed at once, and for how long before all others have a turn: a chunk may be of
one byte, and takes as long as one of many."""
_FREE_LINES, _LEAST_LINE = 1000, 8
"""Lines that a body in chunks may have (two for each chunk), and bytes that pay for one more."""
_MAX_BEHIND = 2**16
"""Bytes that a client may send behind a request before it has the answer."""
MAX_HEADER_BYTES, _MAX_LINES = 2**14, 100
"""Of a request's header."""
_END_OF_HEADER = re.compile(rb"\n\r?\n")

log = logging.getLogger("samovar.server")


class Door:
    """Which connections are open, and which one goes when there is no room for another?"""

    def __init__(self, most: int, most_per_address: int | None = None) -> None:
        self.most, self.most_per_address = most, most_per_address or -(-most // 2)
        self._open: dict[Connection, str] = {}
        """With their addresses; the one that has sent nothing for longest first."""
        self._counts: Counter[str] = Counter()
        self._num_closed, self._last_log = 0, -_LOG_S
        self._turns: deque[Callable[[], None]] = deque()

    def call_in_turn(self, parse: Callable[[], None]) -> None:
        """Call this after those of other connections, one in each turn of the event loop."""
        self._turns.append(parse)
        if len(self._turns) == 1:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        try:
            self._turns[0]()
        finally:
            self._turns.popleft()
        if self._turns:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def enter(self, connection: Connection, address: str) -> bool:
        """Let a connection in, if need be in the place of one that waits for its client; False if there is none."""
        if self._counts[address] >= self.most_per_address:
            is_welcome = self._make_room(address)
        else:
            is_welcome = len(self._open) < self.most or self._make_room(None)
        if is_welcome:
            self._open[connection] = address
            self._counts[address] += 1
        return is_welcome

    def leave(self, connection: Connection) -> None:
        address = self._open.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def touch(self, connection: Connection) -> None:
        """It has sent something, or been sent an answer: it goes last."""
        if connection in self._open:
            self._open[connection] = self._open.pop(connection)

    def _make_room(self, address: str | None) -> bool:
        """Close the one of an address, or of any, that has kept the server waiting for longest."""
        self._note_closed()
        first = next((one for one, at in self._open.items() if address in (None, at) and one.is_waiting), None)
        if first is None:
            return False
        self.leave(first)
        first.transport.abort()
        return True

    def _note_closed(self) -> None:
        """Tell the log, but not more often than once a minute: it must not fill a disk."""
        self._num_closed += 1
        now = time.monotonic()
        if now - self._last_log >= _LOG_S:
            log.warning(
                "too many connections (%d, at most %d, and %d for each address): closed %d, those that waited first",
                len(self._open), self.most, self.most_per_address, self._num_closed,
            )  # fmt: skip
            self._num_closed, self._last_log = 0, now


def available_connections(wanted: int) -> int:
    """As many connections as wanted, or as the system's limit on open files leaves room for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    is_linux = os.path.isdir("/proc/self/fd")
    room = limit - (len(os.listdir("/proc/self/fd")) if is_linux else 64) - _KEPT_FILES - ACCEPTED_AT_ONCE
    if room < 1:
        message = f"The limit on open files is {limit}, which leaves none for connections. Raise it with ulimit -n."
        raise SettingError(message, param="max_connections")
    return min(wanted, room)


class Connection(H11Protocol):
    """A connection with limits, which uvicorn lacks. A request must arrive completely in time, or slow senders would
    hold connections forever. A response must be read, or its images would stay in memory. Nothing that is sent takes
    long to parse, and nothing that is sent behind a request hides that the client has left."""

    def __init__(self, *args: Any, timeout_s: float, door: Door, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s, self._door = timeout_s, door
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._head = bytearray()
        """What has come of the header of a request."""
        self._unread = bytearray()
        """What has come and is not parsed yet."""
        self._lines_left = 0.0
        """Lines that the body may still have, if it comes in chunks."""
        self._num_counted = 0
        """Bytes of `_unread` whose lines are counted."""

    @property
    def is_waiting(self) -> bool:
        """Whether it is the client's turn: no request has come, or not all of it."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        with contextlib.suppress(AttributeError):  # Another loop than asyncio's has its own limit.
            transport.max_size = _PIECE  # type: ignore[attr-defined]
        self._start("arrival", transport.abort)
        if not self._door.enter(self, self.client[0] if self.client else ""):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._door.touch(self)
        if not self._unread and self.conn.their_state is h11.SEND_BODY and not self._is_chunked():
            super().data_received(data)  # As below, without copies.
            data = b""
        self._unread += data
        self._parse()

    def _parse(self, until: float = 0.0) -> None:
        """Parse what has come, but chunks only until then, and the others in turn: they may take long."""
        while self._unread and not self.transport.is_closing():
            state, size = self.conn.their_state, _PIECE
            is_chunked = state is h11.SEND_BODY and self._is_chunked()
            if state is h11.IDLE:
                self._lines_left = _FREE_LINES
                size = self._header_bytes()
            elif is_chunked:
                if not self._allows_lines():
                    break
                if time.perf_counter() >= until:
                    self.transport.pause_reading()
                    self._door.call_in_turn(self._parse_more)
                    break
                size = _CHUNKED_PIECE
            elif state is not h11.SEND_BODY:
                break  # This is behind a request that is being served. Parsing it would pause reading.
            if self.transport.is_closing():
                break
            piece = bytes(self._unread[:size])
            del self._unread[:size]
            self._num_counted = max(0, self._num_counted - size)
            super().data_received(piece)
        if len(self._unread) > _MAX_BEHIND and self.conn.their_state is not h11.SEND_BODY:
            self.transport.abort()
        self._watch_arrival()

    def _allows_lines(self) -> bool:
        """Whether a body in chunks may go on: tiny ones take a hundred times as long to parse as what they hold. They
        are counted long before they are parsed, or those who send many at once would take that time."""
        new = self._unread[self._num_counted : _PIECE]
        self._num_counted += len(new)
        self._lines_left += len(new) / _LEAST_LINE - new.count(b"\r\n")
        if self._lines_left < 0:
            self.send_400_response("The body comes in tiny chunks. Send larger ones, or a Content-Length.")
        return self._lines_left >= 0

    def _is_chunked(self) -> bool:
        return any(name == b"transfer-encoding" for name, _ in self.headers)

    def _parse_more(self) -> None:
        if not self.transport.is_closing() and not self.flow.read_paused:
            self.transport.resume_reading()
        self._parse(time.perf_counter() + _TURN_S)

    def _header_bytes(self) -> int:
        """How much of what has come belongs to a header. One of many lines would take long to parse."""
        before = len(self._head)
        self._head += self._unread[:_PIECE]
        end = _END_OF_HEADER.search(self._head, max(0, before - 2))
        length = end.end() if end else len(self._head)
        if length > MAX_HEADER_BYTES or self._head.count(b"\n", 0, length) > _MAX_LINES:
            self.send_400_response(f"The header has more than {MAX_HEADER_BYTES} bytes or {_MAX_LINES} lines.")
        if end:
            self._head.clear()
        return length - before

    def on_response_complete(self) -> None:
        """What follows the request is parsed only now, and may be half a request too."""
        self._door.touch(self)
        super().on_response_complete()
        self._parse()
        if "reading" not in self._timers and self.transport.get_write_buffer_size():
            self._watch_reading(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("arrival")
        self._stop("reading")
        self._door.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets the same body as every other error, unless a response has begun."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # It must not respond as well.
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            content = json.dumps(ApiError(400, msg, code="invalid_http").body()).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            events = (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=content),
                h11.EndOfMessage(),
            )
            answer = b""
            with contextlib.suppress(h11.LocalProtocolError):  # No body goes to a HEAD.
                for event in events:
                    answer += self.conn.send(event) or b""
            self.transport.write(answer)  # At once: sending takes longer than all else here.
        self.transport.close()

    def _watch_arrival(self) -> None:
        """Set a timeout while a request has arrived in part."""
        state = self.conn.their_state
        is_partial = state is h11.SEND_BODY or (state is h11.IDLE and bool(self._head))
        if self.transport.is_closing() or not is_partial:
            self._stop("arrival")
        elif "arrival" not in self._timers:
            self._start("arrival", self.transport.abort)

    def _watch_reading(self, before: int | None) -> None:
        """Close the connection if the client has read nothing since the last look."""
        self._stop("reading")
        ours = self.transport.get_write_buffer_size()
        waiting = ours + _bytes_in_flight(self.transport.get_extra_info("socket"))
        if before is not None and waiting >= before:
            self.transport.abort()
        elif ours:
            self._start("reading", self._watch_reading, waiting)

    def _start(self, name: str, on_timeout: Callable[..., None], *args: Any) -> None:
        self._timers[name] = self.loop.call_later(self._timeout_s, on_timeout, *args)

    def _stop(self, name: str) -> None:
        if timer := self._timers.pop(name, None):
            timer.cancel()


def _bytes_in_flight(connection: socket.socket) -> int:
    """What the system holds for a client. It takes more only once megabytes are gone, which may take minutes."""
    found = bytearray(4)
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, found)
    except OSError:  # Closed meanwhile, or not a socket that can tell.
        return 0
    return int.from_bytes(found, sys.byteorder)
