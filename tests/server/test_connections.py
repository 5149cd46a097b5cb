"""Who may stay connected, and for how long: real sockets and uvicorn's connections, behind the door."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from samovar.core.errors import SettingError
from samovar.server.connections import ACCEPTED_AT_ONCE, Connection, available_connections, sweep
from samovar.server.serving import _bind

App = Callable[[Any, Any, Any], Awaitable[None]]


class Seen:
    """An application that notes what it gets, and answers when it may."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.num_gone = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.num_gone += 1
                return
            body += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(body)
        leaving = asyncio.ensure_future(receive())
        answering = asyncio.ensure_future(self.may_answer.wait())
        await asyncio.wait([leaving, answering], return_when=asyncio.FIRST_COMPLETED)
        self.num_gone += leaving.done()
        leaving.cancel()
        answering.cancel()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def listening(app: App, most: int = 9, timeout_s: float = 60.0) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """A server in this process; gives how to connect to it, from which address."""
    limit = most + ACCEPTED_AT_ONCE
    config, state = uvicorn.Config(app, log_config=None, lifespan="off", limit_concurrency=limit), ServerState()

    async def sweeps() -> None:
        while True:
            sweep(state.connections, timeout_s)
            await asyncio.sleep(0.01)

    loop = asyncio.get_running_loop()
    listener = _bind("127.0.0.1", 0, timeout_s)
    server = await loop.create_server(lambda: Connection(config, server_state=state, app_state={}), sock=listener)
    sweeping = asyncio.create_task(sweeps())
    writers: list[asyncio.StreamWriter] = []

    async def connect(
        address: str = "127.0.0.1", buffer: int = 2**16
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        one.bind((address, 0))
        one.setblocking(False)
        await loop.sock_connect(one, listener.getsockname())
        reader, writer = await asyncio.open_connection(sock=one, limit=buffer)
        writers.append(writer)
        await asyncio.sleep(0.01)
        return reader, writer

    try:
        yield connect
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()
        await asyncio.sleep(0.05)
        sweeping.cancel()
        await asyncio.gather(*state.tasks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def long_answers(num_bytes: int) -> App:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": bytes(num_bytes // 10), "more_body": True})
        await send({"type": "http.response.body"})
        ended.set()

    ended = asyncio.Event()
    app.ended = ended  # type: ignore[attr-defined]
    return app


def test_an_answer_that_nobody_reads_is_let_go() -> None:
    async def run() -> None:
        app = long_answers(50 * 2**20)
        async with listening(app, timeout_s=0.2) as connect:
            _, writer = await connect(buffer=4096)
            writer.transport.pause_reading()
            writer.write(GET)
            await asyncio.wait_for(app.ended.wait(), 60)  # type: ignore[attr-defined]

    asyncio.run(run())


def test_who_is_served_has_no_deadline() -> None:
    async def run() -> None:
        app = Seen()
        async with listening(app, timeout_s=0.1) as connect:
            reader, writer = await connect()
            writer.write(GET)
            await until(lambda: len(app.bodies) == 1)
            await asyncio.sleep(0.4)
            app.may_answer.set()
            assert b"200 OK" in await reader.read(1000)

    asyncio.run(run())


def test_a_body_in_chunks_of_a_byte_arrives_between_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing them takes long, so others come first: here after every reading."""
    monkeypatch.setattr("samovar.server.connections._LONG_READ_S", 0.0)
    monkeypatch.setattr("samovar.server.connections._REST", 1)
    body = bytes(range(256)) * 20

    async def run() -> None:
        app = Seen()
        async with listening(app) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n")
            await until(lambda: app.bodies == [body])
            app.may_answer.set()
            assert b"200 OK" in await reader.read(1000)

    asyncio.run(run())


def test_those_who_wait_make_room_and_those_who_are_served_do_not(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        app = Seen()
        async with listening(app, 4) as connect:
            served, served_writer = await connect()
            served_writer.write(GET)
            await until(lambda: len(app.bodies) == 1)
            _, arriving = await connect()
            arriving.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 51\r\n\r\n")
            idle = [(await connect())[0] for _ in range(2)]
            late = []
            for _ in range(50):
                arriving.write(b"1")
                await asyncio.sleep(0.01)
                late.append((await connect())[0])
            assert [await each.read() for each in (*idle, *late[:-2])] == [b""] * 50
            arriving.write(b"1")
            await until(lambda: len(app.bodies) == 2)
            app.may_answer.set()
            assert b"200 OK" in await served.read(1000)

    with caplog.at_level(logging.WARNING, "samovar.server"):
        asyncio.run(run())
    assert len([record for record in caplog.records if "too many connections" in record.message]) == 1


def test_there_are_fewer_connections_where_the_system_allows_fewer_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        assert available_connections(100) == 100
        assert 600 < available_connections(10_000) < 1024 - 96
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
        with pytest.raises(SettingError, match=r"limit on open files is 128, .* ulimit -n"):
            available_connections(100)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
