"""How does the server listen, and how does it end? One socket, time-outs on what arrives, and two signals."""

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
from .app import create_app
from .failures import Refusal
from .house import House

_LAST_WORDS_S = 5
"""How long answers that are written already may take to be sent."""
_MOST_HEADER_BYTES = 16 * 2**10


async def serve(house: House, on_listening: Callable[[str], None], on_ready: Callable[[str], None]) -> int:
    """Serve until a signal comes, and return the exit code. The address is told when it answers, and again when
    pictures can be made."""
    listener = _bind(house.config.host, house.config.port)
    address = _address(listener)
    server = _Server(_uvicorn_config(house))
    signals = _Signals()
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with signals:
            on_listening(address)
            if await _load(house, signals.first):
                on_ready(address)
                _set_libraries_aside()
                await _ended_before(answering, signals.first)
            house.phase = "draining"
            await _drain(house, signals.second)
            return 0 if not signals.second.is_set() else 128 + signals.last
    finally:
        server.should_exit = True
        server.force_exit = signals.second.is_set()
        await answering


def _set_libraries_aside() -> None:
    """Collect garbage without them from now on: to look through them all would hold everyone up for a tenth of a
    second."""
    gc.collect()
    gc.freeze()
    # What has survived twice is looked at again when a quarter of it is new, as counted the last time. That count had
    # the libraries in it: the connections that were closed meanwhile, which hold themselves, would wait for days.
    gc.collect()


async def _load(house: House, stop: asyncio.Event) -> bool:
    """Start the engine; False if the server was told to end before it was ready."""
    loading = asyncio.ensure_future(house.omni.start())
    if not await _ended_before(loading, stop):
        loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # Nobody asks how it ended.
        loading.cancel()
        return False
    try:
        loading.result()
        house.open()
    except BaseException:
        await _close(house, 0.0)
        raise
    return True


async def _drain(house: House, hurry: asyncio.Event) -> None:
    """What waits is refused at once, what runs may finish; a second signal ends that too."""
    closing = asyncio.ensure_future(_close(house, house.config.shutdown_timeout_s))
    if not await _ended_before(closing, hurry):
        await _close(house, 0.0)
    await closing


async def _ended_before(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for both, and say whether the work was first."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


async def _close(house: House, drain_s: float) -> None:
    await house.omni.close(drain_s)


class _Signals:
    """SIGINT and SIGTERM: the first asks for an end, the second for an end at once."""

    def __init__(self) -> None:
        self.first, self.second, self.last = asyncio.Event(), asyncio.Event(), 0

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    def _came(self, number: int) -> None:
        self.last = number
        (self.second if self.first.is_set() else self.first).set()


class _Server(uvicorn.Server):
    """Uvicorn, with the signals left to us: it would drop what waits in the queue without an answer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(house: House) -> uvicorn.Config:
    def protocol(*args: Any, **kwargs: Any) -> PatientProtocol:
        return PatientProtocol(*args, timeout_s=house.config.request_timeout_s, **kwargs)

    return uvicorn.Config(
        create_app(house),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        timeout_graceful_shutdown=_LAST_WORDS_S,
    )


class PatientProtocol(H11Protocol):
    """A connection whose requests must arrive whole within some time. Uvicorn would wait for ever, and a hundred
    clients that send a byte a minute would hold a hundred connections. And whose answers must be read: a client that
    never does would hold its pictures in our memory."""

    def __init__(self, *args: Any, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout_s = timeout_s
        self._deadline: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._timeout_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def on_response_complete(self) -> None:
        """What came behind the request is read only now, and may be half a request too."""
        super().on_response_complete()
        self._set_deadline()
        if self._watch is None and self.transport.get_write_buffer_size():
            self._watch_reader(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget_watch()
        self._watch_reader(None)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_watch()

    def _set_deadline(self) -> None:
        if self.transport.is_closing() or not self._is_arriving():
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._timeout_s, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._forget_watch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP gets the same body as every other error."""
        content = json.dumps(Refusal(400, msg, code="invalid_http").body()).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=content),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_arriving(self) -> bool:
        """Whether a request has begun and is not there as a whole."""
        state = self.conn.their_state
        return state is h11.SEND_BODY or (state is h11.IDLE and bool(self.conn.trailing_data[0]))

    def _watch_reader(self, before: int | None) -> None:
        """Close the connection if nothing of what waits was read since the last look."""
        ours = self.transport.get_write_buffer_size()
        waiting = ours + _bytes_on_the_way(self.transport.get_extra_info("socket"))
        if before is not None and waiting >= before:
            self.transport.abort()
            return
        self._watch = self.loop.call_later(self._timeout_s, self._watch_reader, waiting) if ours else None

    def _forget_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _bytes_on_the_way(connection: socket.socket) -> int:
    """What the system holds for a client. It takes more only when megabytes of that are gone, which a slow client may
    need minutes for."""
    found = bytearray(4)
    try:
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, found)
    except OSError:  # Closed meanwhile, or no socket that can be asked.
        return 0
    return int.from_bytes(found, sys.byteorder)


def _bind(host: str, port: int) -> socket.socket:
    """A socket at the address, before anything is loaded: a port that is taken should not cost a minute."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise SettingError(
            f"{host}:{port} cannot be listened at ({error.strerror}). Give another --port; 0 takes one that is free."
        ) from error
    # Else the end of an answer waits 40 ms for the client to acknowledge its beginning: asyncio sees to that only for
    # sockets that were made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
