"""How does the server listen, and how does it end? One socket, timeouts on what arrives, and two signals."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import signal
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import SettingError
from .api_errors import ApiError
from .app import create_app
from .app_state import AppState

_FLUSH_S = 5
"""How long finished responses may take to be sent during shutdown."""
_MAX_HEADER_BYTES = 16 * 2**10


async def serve(state: AppState, on_listening: Callable[[str], None], on_ready: Callable[[str], None]) -> int:
    """Serve until a signal comes, and return the exit code. The callbacks get the address: when it answers, and when
    images can be made."""
    listener = _bind(state.config.host, state.config.port)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(_uvicorn_config(state))
    stop, hurry = asyncio.Event(), asyncio.Event()
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _signals(stop, hurry) as received:
            on_listening(address)
            if await _load(state, stop):
                on_ready(address)
                _freeze_libraries()
                await _ended_before(answering, stop)
            state.phase = "draining"
            await _drain(state, hurry)
            return 128 + received[-1] if hurry.is_set() else 0
    finally:
        server.should_exit = True
        server.force_exit = hurry.is_set()
        await answering


def _freeze_libraries() -> None:
    """Exclude the libraries from garbage collection, which would pause everything for a tenth of a second."""
    gc.collect()
    gc.freeze()
    # Old objects are searched again when a quarter of them is new, compared with the last count. That one included the
    # libraries, so closed connections, which are cycles, would stay for days.
    gc.collect()


async def _load(state: AppState, stop: asyncio.Event) -> bool:
    """Start the engine; False if the server should stop before it is ready."""
    loading = asyncio.ensure_future(state.omni.start())
    if not await _ended_before(loading, stop):
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # Nobody asks how it ended.
        loading.cancel()
        return False
    try:
        loading.result()
        state.open()
    except BaseException:
        await state.omni.close()
        raise
    return True


async def _drain(state: AppState, hurry: asyncio.Event) -> None:
    """Refuse what waits, and let what runs finish; a second signal ends that too."""
    closing = asyncio.ensure_future(state.omni.close(state.config.shutdown_timeout_s))
    if not await _ended_before(closing, hurry):
        await state.omni.close()
    await closing


async def _ended_before(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for the first of the two; whether it was the work."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[list[int]]:
    """The first SIGINT or SIGTERM sets `stop`, the second `hurry`. Gives the signals that came."""
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would drop the queue without a response."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(state: AppState) -> uvicorn.Config:
    def protocol(*args: Any, **kwargs: Any) -> TimeoutProtocol:
        return TimeoutProtocol(*args, timeout_s=state.config.request_timeout_s, **kwargs)

    return uvicorn.Config(
        create_app(state),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=_FLUSH_S,
    )


class TimeoutProtocol(H11Protocol):
    """A connection with timeouts, which uvicorn lacks. A request must arrive completely in time, or slow senders would
    hold connections forever. A response must be read, or its images would stay in memory."""

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start("arrival", transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_arrival()

    def on_response_complete(self) -> None:
        """What follows the request is parsed only now, and may be half a request too."""
        super().on_response_complete()
        self._watch_arrival()
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
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets the same body as every other error."""
        content = json.dumps(ApiError(400, msg, code="invalid_http").body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_arrival(self) -> None:
        """Set a timeout while a request has arrived in part."""
        state = self.conn.their_state
        is_partial = state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))
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


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: a port that is taken should fail at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        message = f"Cannot bind to {host}:{port} ({error.strerror}). Choose another --port, or 0 for a free one."
        raise SettingError(message, param="port") from error
    # Otherwise the end of a response waits 40 ms for an acknowledgement. asyncio sets this only on sockets that were
    # made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
