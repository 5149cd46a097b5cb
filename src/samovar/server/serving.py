"""Listening and ending: one socket, uvicorn behind it, and two signals."""

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
from .connections import ACCEPTED_AT_ONCE, Connection, available_connections, sweep
from .state import AppState

_FLUSH_S = 5
"""How long finished responses may take to be sent during shutdown."""
_BACKLOG = 512
"""Connections that the system keeps until they are accepted."""
_MAX_HEADER_BYTES = 2**14


async def serve(state: AppState, on_listening: Callable[[str], None], on_ready: Callable[[str], None]) -> None:
    """Serve until a signal comes. The callbacks get the address: when it answers, and when images can be made."""
    config = state.config
    listener = _bind(config.host, config.port, config.request_timeout_s)
    host, port = config.host, listener.getsockname()[1]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = _Server(state)
    stop = asyncio.Event()
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    with _first_signal(stop):
        try:
            on_listening(address)
            loading = asyncio.create_task(_load(state))
            if await _ended_before(loading, stop):
                loading.result()
                on_ready(address)
                _freeze_libraries()
                await _ended_before(answering, stop)
            loading.cancel()
        finally:
            await state.close()
            server.should_exit = True
            await answering


async def _load(state: AppState) -> None:
    await state.omni.start()
    state.open()


def _freeze_libraries() -> None:
    """Exclude the libraries from garbage collection, which would pause everything for a tenth of a second."""
    gc.collect()
    gc.freeze()
    # Old objects are searched again when a quarter of them is new, compared with the last count. That one included the
    # libraries, so closed connections, which are cycles, would stay for days.
    gc.collect()


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

    def __init__(self, state: AppState) -> None:
        most = available_connections(state.config.max_connections)
        self._timeout_s = state.config.request_timeout_s
        settings = uvicorn.Config(
            create_app(state),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=ACCEPTED_AT_ONCE,
            server_header=False,
            limit_concurrency=most + ACCEPTED_AT_ONCE,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        super().__init__(settings)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        sweep(self.server_state.connections, self._timeout_s)
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(_BACKLOG)  # asyncio accepts as many at once as it lets wait: too many for us.


def _bind(host: str, port: int, timeout_s: float) -> socket.socket:
    """A listening socket, before the model is loaded: a port that is taken should fail at once. What it accepts has its
    options."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        message = f"Cannot bind to {host}:{port} ({error.strerror}). Choose another --port, or 0 for a free one."
        raise SettingError(message, param="port") from error
    # Otherwise the end of a response waits 40 ms for an acknowledgement. asyncio sets this only on sockets that were
    # made with the protocol's number.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # On Linux the system closes the connections of clients that read nothing.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))
    return listener
