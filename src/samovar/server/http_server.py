"""How does the server listen, and how does it end? One socket, timeouts on what arrives, and two signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from ..core.errors import SettingError
from .app import create_app
from .app_state import AppState
from .connections import ACCEPTED_AT_ONCE, MAX_HEADER_BYTES, Connection, Door, available_connections

_FLUSH_S = 5
"""How long finished responses may take to be sent during shutdown."""
_BACKLOG = 512
"""Connections that the system keeps until they are accepted."""


async def serve(state: AppState, on_listening: Callable[[str], None], on_ready: Callable[[str], None]) -> int:
    """Serve until a signal comes, and return the exit code. The callbacks get the address: when it answers, and when
    images can be made."""
    listener = _bind(state.config.host, state.config.port)
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(_uvicorn_config(state))
    stop = asyncio.Event()
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        with _first_signal(stop):
            on_listening(address)
            if await _load(state, stop):
                on_ready(address)
                _freeze_libraries()
                await _ended_before(answering, stop)
            state.drain()
            # What waits is refused, and what runs may finish.
            await state.close()
            return 0
    finally:
        state.body_readers.close()
        server.should_exit = True
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


async def _ended_before(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for the first of the two; whether it was the work."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


@contextlib.contextmanager
def _first_signal(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`. The second ends the process at once, whatever it is doing: that is left
    to the system. Workers end with their parent."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would drop the queue without a response."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # asyncio accepts as many at once as it lets wait: too many for us.


def _uvicorn_config(state: AppState) -> uvicorn.Config:
    config = state.config
    door = Door(available_connections(config.max_connections), config.max_connections_per_address)

    def protocol(*args: Any, **kwargs: Any) -> Connection:
        return Connection(*args, timeout_s=config.request_timeout_s, door=door, **kwargs)

    return uvicorn.Config(
        create_app(state),
        http=protocol,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=_FLUSH_S,
    )


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, before the model is loaded: a port that is taken should fail at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        message = f"Cannot bind to {host}:{port} ({error.strerror}). Choose another --port, or 0 for a free one."
        raise SettingError(message, param="port") from error
    # Otherwise the end of a response waits 40 ms for an acknowledgement. asyncio sets this only on sockets that were
    # made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
