"""Who may stay connected, for how long, and what may be sent."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from samovar.core.errors import SettingError
from samovar.server.connections import Connection, Door, available_connections


@asynccontextmanager
async def connection(num_bytes: int, timeout_s: float) -> AsyncIterator[tuple[Connection, socket.socket]]:
    """A connection in this process, whose answers are that long."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": bytes(num_bytes // 10), "more_body": True})
        await send({"type": "http.response.body"})

    config, state = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState()
    made: list[Connection] = []

    def protocol() -> Connection:
        made.append(Connection(config, server_state=state, app_state={}, timeout_s=timeout_s, door=Door(99)))
        return made[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        await loop.sock_connect(one, server.sockets[0].getsockname())
        while not state.connections:
            await asyncio.sleep(0.01)
        yield made[0], one
    server.close()
    await asyncio.gather(*state.tasks)


async def is_closed_within(protocol: Connection, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while protocol.connections and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return not protocol.connections


def test_an_answer_that_nobody_reads_is_let_go() -> None:
    async def run() -> None:
        async with connection(50 * 2**20, timeout_s=0.2) as (protocol, one):
            await asyncio.get_running_loop().sock_sendall(one, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert await is_closed_within(protocol, 10)

    asyncio.run(run())


def test_an_answer_that_is_read_slowly_comes_whole() -> None:
    async def run() -> int:
        loop, seen = asyncio.get_running_loop(), 0
        async with connection(6 * 2**20, timeout_s=0.2) as (_, one):
            await loop.sock_sendall(one, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while part := await loop.sock_recv(one, 2**20):
                seen += len(part)
                await asyncio.sleep(1 / 2**20 * len(part) / 16)
            return seen

    assert asyncio.run(run()) > 6 * 2**20 * 0.99


def test_a_request_behind_another_has_a_deadline_too() -> None:
    async def run() -> None:
        async with connection(100, timeout_s=0.2) as (protocol, one):
            whole, half = "GET / HTTP/1.1\r\nHost: x\r\n\r\n", "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
            protocol.timeout_keep_alive = 60
            await asyncio.get_running_loop().sock_sendall(one, (whole + half).encode())
            assert await is_closed_within(protocol, 10)

    asyncio.run(run())


MADE: list[Connection] = []
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
async def listening(app: App, door: Door, timeout_s: float = 60.0) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """A server in this process; gives how to connect to it."""
    config, state = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState()
    loop = asyncio.get_running_loop()
    MADE.clear()

    def made() -> Connection:
        MADE.append(Connection(config, server_state=state, app_state={}, timeout_s=timeout_s, door=door))
        return MADE[-1]

    server = await loop.create_server(made, "127.0.0.1", 0)
    writers: list[asyncio.StreamWriter] = []

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
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
        await asyncio.gather(*state.tasks)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("behind", [b"", b"G", GET, GET + b"x" * 1000, b"x" * 60_000])
@pytest.mark.parametrize("is_at_once", [True, False])
def test_who_leaves_is_seen_to_leave_whatever_was_sent_behind_the_request(behind: bytes, is_at_once: bool) -> None:
    async def run() -> None:
        app = Seen()
        async with listening(app, Door(9)) as connect:
            _, writer = await connect()
            post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
            writer.write(post + behind if is_at_once else post)
            await until(lambda: app.bodies == [b"abc"])
            writer.write(b"" if is_at_once else behind)
            await asyncio.sleep(0.05)
            assert app.num_gone == 0
            writer.close()
            await until(lambda: app.num_gone == 1)

    asyncio.run(run())


def test_requests_behind_others_are_answered_in_turn() -> None:
    async def run() -> bytes:
        app = Seen()
        app.may_answer.set()
        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            for number in range(5):
                body = b"x" * 5_000 * number
                head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(body) + body)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer: bytes = await reader.read()
            assert [len(body) for body in app.bodies] == [0, 5_000, 10_000, 15_000, 20_000, 0]
            return answer

    assert asyncio.run(run()).count(b"HTTP/1.1 200") == 6


def test_too_much_behind_a_request_ends_the_connection() -> None:
    async def run() -> None:
        app = Seen()
        async with listening(app, Door(9)) as connect:
            _, writer = await connect()
            writer.write(GET + b"x" * 10_000)
            await until(lambda: len(app.bodies) == 1)
            writer.write(b"x" * 300_000)
            await until(lambda: app.num_gone == 1)

    asyncio.run(run())


@pytest.mark.parametrize(("num_chunks", "status"), [(400, b"200 OK"), (40_000, b"400 Bad Request")])
def test_many_chunks_of_one_byte_are_refused(num_chunks: int, status: bytes) -> None:
    """Parsing them takes a hundred times as long as parsing what they hold. A short body may come so."""

    async def run() -> None:
        app = Seen()
        app.may_answer.set()
        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"1\r\na\r\n" * num_chunks + b"0\r\n\r\n")
            assert status in await reader.read(1000)
            assert [len(body) for body in app.bodies] == [num_chunks] * (num_chunks == 400)

    asyncio.run(run())


def test_tiny_chunks_that_come_at_once_are_refused_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do not wait for an answer would have the server parse some of each."""
    parsed: list[int] = []
    parse = H11Protocol.data_received
    monkeypatch.setattr(H11Protocol, "data_received", lambda self, data: [parsed.append(len(data)), parse(self, data)])

    async def run() -> None:
        async with listening(Seen(), Door(9)) as connect:
            reader, writer = await connect()
            head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(head + b"1\r\na\r\n" * 10_000)
            assert b"400 Bad Request" in await reader.read(1000)
            assert parsed == [len(head)]

    asyncio.run(run())


def test_a_long_body_is_read_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends megabytes takes turns with the others."""
    sizes: list[int] = []
    receive = Connection.data_received
    monkeypatch.setattr(Connection, "data_received", lambda self, data: [sizes.append(len(data)), receive(self, data)])

    async def run() -> None:
        app = Seen()
        app.may_answer.set()
        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n" + bytes(2_000_000))
            assert b"200 OK" in await reader.read(1000)
            assert app.bodies == [bytes(2_000_000)]
            assert max(sizes) <= 2**16

    asyncio.run(run())


def test_a_body_in_small_chunks_is_parsed_a_little_at_a_time() -> None:
    """All of them at once would stop everybody else."""

    async def run() -> None:
        app = Seen()
        app.may_answer.set()
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            task = asyncio.create_task(others())
            writer.write((b"c\r\n" + b"a" * 12 + b"\r\n") * 10_000)
            writer.write(b"0\r\n\r\n")
            assert b"200 OK" in await reader.read(1000)
            assert app.bodies == [b"a" * 120_000]
            assert turns > 10, "not one for each time that the socket was read"
            task.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 90, 200),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 100, 400),
        (b"GET / HTTP/1.1\nHost: x\n" + b"a: b\n" * 100, 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 15_000 + b"\r\n", 200),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"b" * 17_000 + b"\r\n", 400),
    ],
    ids=range(5),
)
@pytest.mark.parametrize("size", [100, 1000, 100_000])
def test_a_header_has_few_lines(head: bytes, status: int, size: int) -> None:
    """However it arrives; the lines of a body do not count."""

    async def run() -> bytes:
        app = Seen()
        app.may_answer.set()
        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            body = b"\n" * 1000
            sent = head + b"Content-Length: 1000\r\nConnection: close\r\n\r\n" + body
            for first in range(0, min(len(sent), 20 * size), size):
                writer.write(sent[first : first + size])
                await asyncio.sleep(0)
            writer.write(sent[20 * size :])
            try:
                answer: bytes = await reader.read()
            except ConnectionResetError:  # What it had not read when it closed.
                return b"HTTP/1.1 400 "
            return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 %d " % status)


def test_what_is_no_http_within_a_body_is_refused_once(caplog: pytest.LogCaptureFixture) -> None:
    """Before and after an answer, which may come early."""

    async def early(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 415, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def run(app: App) -> bytes:
        async with listening(app, Door(9)) as connect:
            reader, writer = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            await asyncio.sleep(0.05)
            writer.write(b"zzz\r\n")
            answer: bytes = await reader.read()
            return answer

    async def late(scope: Any, receive: Any, send: Any) -> None:
        """Answers between the refusal and the end of the connection."""
        (connection,) = MADE
        while not connection.transport.is_closing():
            await asyncio.sleep(0)
        await early(scope, receive, send)

    answer = asyncio.run(run(late))
    assert answer.startswith(b"HTTP/1.1 400")
    answer = asyncio.run(run(early))
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 415")
    answer = asyncio.run(run(Seen()))
    assert answer.count(b"HTTP/1.1") == 1
    assert answer.startswith(b"HTTP/1.1 400")
    assert not [record for record in caplog.records if record.exc_info]


def test_what_is_no_http_within_the_body_of_a_head_is_refused_without_a_body(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> bytes:
        async with listening(Seen(), Door(9)) as connect:
            reader, writer = await connect()
            writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzzz\r\n")
            answer: bytes = await reader.read()
            return answer

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.endswith(b"\r\n\r\n")
    assert not [record for record in caplog.records if record.exc_info]


def test_those_who_wait_make_room_and_those_who_are_served_do_not(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        app = Seen()
        door = Door(4, 4)
        async with listening(app, door) as connect:
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


def test_who_has_just_come_stays_before_those_who_send_slowly() -> None:
    async def run() -> None:
        app = Seen()
        app.may_answer.set()
        async with listening(app, Door(4, 4)) as connect:
            for _ in range(4):
                _, slow = await connect()
                slow.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n")
                await asyncio.sleep(0.02)
            reader, writer = await connect()
            for _ in range(2):
                await connect()
            writer.write(GET)
            assert b"200 OK" in await reader.read(1000)

    asyncio.run(run())


def test_one_address_has_half_and_takes_no_room_from_others() -> None:
    door = Door(10)
    assert door.most_per_address == 5
    connections = [_Fake() for _ in range(20)]
    assert all(door.enter(each, "a") for each in connections[:5])
    assert door.enter(connections[5], "b")
    assert door.enter(connections[6], "a")
    assert [each.is_aborted for each in connections[:7]] == [True] + [False] * 6
    for each in connections[1:7]:
        each.is_waiting = False
    assert not door.enter(connections[7], "a"), "all of this address are being served"
    assert all(door.enter(each, "b") for each in connections[8:12])
    assert door.enter(connections[12], "c") is True
    assert connections[8].is_aborted, "there is no more room in all, and this is the first that waits"
    door.leave(connections[1])
    assert door.enter(connections[13], "a")


class _Fake:
    """As much of a connection as a door sees: a real one has one address only."""

    def __init__(self) -> None:
        self.is_waiting = True
        self.is_aborted = False
        self.transport = self

    def abort(self) -> None:
        self.is_aborted = True


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
