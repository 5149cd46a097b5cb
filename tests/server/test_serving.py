"""How a server begins and ends, and what it does with those who dawdle."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from samovar.server.serving import _bind

from .conftest import KEY
from .running import PATIENCE_S, PROMPT, RunningServer, running, until

GENERATE = "/v1/images/generations"


def connect(server: RunningServer) -> socket.socket:
    host, port = server.address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


def test_slow_senders_are_closed_and_disturb_nobody(guarded: RunningServer) -> None:
    """A hundred sockets that send a little and stop: within a header, within a body, after an answer, or
    nothing; or a second request behind a whole one."""
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    body = f"{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n" + '{"prompt":'
    after = "GET /live HTTP/1.1\r\nHost: localhost\r\n\r\nGET /live HTTP/1.1\r\n"
    behind = f"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n{body}"
    beginnings = [head, body, after, behind, ""]
    sockets = [connect(guarded) for _ in range(100)]
    try:
        for index, one in enumerate(sockets):
            one.sendall(beginnings[index % 5].encode())
        times = []
        with guarded.client() as http:
            for _ in range(100):
                started = time.perf_counter()
                assert http.get("/live").status_code == 200
                times.append(time.perf_counter() - started)
        assert statistics.median(times) < 1.0
        for one in sockets:
            with contextlib.suppress(ConnectionResetError):
                while one.recv(65536):
                    pass
    finally:
        for one in sockets:
            one.close()


def test_a_body_that_dribbles_is_closed(guarded: RunningServer) -> None:
    """A byte now and then is no reason to wait longer."""
    with connect(guarded) as one:
        one.sendall(b"POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        one.settimeout(0.2)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(10_000):
                one.sendall(b" ")
                with contextlib.suppress(TimeoutError):
                    if not one.recv(65536):
                        return
            pytest.fail("it was not closed")


def test_options_that_mean_nothing_to_a_model_are_named(server: RunningServer) -> None:
    assert "--jobs is for videos, and 'tiny' makes images: it is not used" in server.text


def test_the_first_signal_lets_what_runs_finish(folder: Path) -> None:
    """One running and five waiting: 200 for the one, 503 at once for the five, exit code 0, nobody left behind."""
    with running(folder, "--max-steps", "100000", "--shutdown-timeout", "120") as server, ThreadPoolExecutor(6) as pool:
        workers = server.workers()
        with server.client() as http:
            body = {"prompt": PROMPT, "num_inference_steps": 400}
            first = pool.submit(http.post, GENERATE, json=body)
            until(lambda: server.status()["running"] == 1, "one runs")
            others = [pool.submit(http.post, GENERATE, json=body) for _ in range(5)]
            until(lambda: server.status()["queued"] == 5, "five wait")
            server.process.send_signal(signal.SIGTERM)
            refused = [other.result(PATIENCE_S) for other in others]
            assert [answer.status_code for answer in refused] == [503] * 5
            assert {answer.json()["error"]["code"] for answer in refused} == {"shutting_down"}
            assert first.result(PATIENCE_S).status_code == 200
        assert server.process.wait(PATIENCE_S) == 0
        assert not any(worker.is_running() for worker in workers)
    assert "Traceback" not in server.text
    server.end()
    assert "the server has ended: 1 images, videos and sounds were made" in server.text


@pytest.mark.slow
def test_two_workers_serve_one_queue_and_one_that_dies_is_not_missed(folder: Path) -> None:
    """Two at once; with one killed the server stays ready, loses what ran there, and replaces it; then both drain."""
    options = ("--replicas", "2", "--max-steps", "100000", "--max-queue", "40", "--shutdown-timeout", "120")
    with running(folder, *options) as server, ThreadPoolExecutor(42) as pool, server.client() as http:

        def ready() -> tuple[int, int, int]:
            answer = http.get("/ready")
            return answer.status_code, answer.json()["replicas"], answer.json()["replicas_ready"]

        def post(num_steps: int) -> Future[httpx.Response]:
            body = {"prompt": PROMPT, "num_inference_steps": num_steps, "seed": 3}
            return pool.submit(httpx.post, server.address + GENERATE, json=body, timeout=PATIENCE_S)

        assert ready() == (200, 2, 2)
        alone = post(5).result().json()["data"][0]["b64_json"]
        answers = [post(100_000), post(100_000)]
        until(lambda: server.status()["running"] == 2, "two run")
        answers += [post(5) for _ in range(20)]
        until(lambda: server.status()["queued"] == 20, "twenty wait")
        killed, kept = server.status()["worker_ids"]
        os.kill(killed, signal.SIGKILL)
        until(lambda: ready() == (200, 2, 1), "one is left")
        for answer in answers[2:]:
            assert answer.result().json()["data"][0]["b64_json"] == alone, "by the new one"
        assert ready() == (200, 2, 2)
        (lost,) = [answer.result() for answer in answers[:2] if answer.done()]
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "worker_restarted")
        text = http.get("/metrics").text
        assert 'samovar_replica_restarts_total{replica="0"} 1.0' in text
        assert 'samovar_replica_restarts_total{replica="1"} 0.0' in text
        assert server.status()["replicas"][1]["worker_ids"] == [kept]
        os.kill(kept, signal.SIGKILL)
        until(lambda: ready() == (200, 2, 2) and all(answer.done() for answer in answers), "it is replaced")
        both = [post(300), post(300)]
        until(lambda: server.status()["running"] == 2, "two run")
        server.process.send_signal(signal.SIGTERM)
        assert [answer.result().status_code for answer in both] == [200, 200]
        assert server.process.wait(PATIENCE_S) == 0
    assert "Traceback" not in server.text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(folder: Path, number: int) -> None:
    with running(folder, "--max-steps", "100000") as server, ThreadPoolExecutor(1) as pool, server.client() as http:
        workers = server.workers()
        answer = pool.submit(http.post, GENERATE, json={"prompt": PROMPT, "num_inference_steps": 50_000})
        until(lambda: server.status()["running"] == 1, "one runs")
        server.process.send_signal(number)
        until(lambda: httpx.get(f"{server.address}/ready", timeout=60).status_code == 503, "it drains")
        server.process.send_signal(number)
        assert server.process.wait(30) == -number
        with pytest.raises(httpx.TransportError):
            answer.result(PATIENCE_S)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
    assert "Traceback" not in server.text


def test_a_second_signal_ends_even_what_does_not_listen() -> None:
    """The event loop is busy: nothing in the process would handle a signal."""
    ended = subprocess.run(
        [sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "busy\n", "")


BUSY = """
import asyncio, os, signal, threading, time
from samovar.server.serving import _first_signal

async def main():
    stop = asyncio.Event()
    with _first_signal(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        print("busy", flush=True)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        time.sleep(300)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_server_that_is_killed_takes_its_workers_along(folder: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    with running(folder) as server:
        workers = server.workers()
        assert workers
        server.process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
    mine = {name for name in set(os.listdir("/dev/shm")) - before if str(server.process.pid) in name}
    assert not mine


@pytest.mark.slow
def test_a_signal_while_it_loads_ends_it(folder: Path) -> None:
    server = RunningServer(folder)
    try:
        server.wait_listening()
        assert httpx.get(f"{server.address}/live", timeout=60).status_code == 200
        assert server.end(signal.SIGTERM) == 0
    finally:
        server.end(signal.SIGKILL)
    assert "Traceback" not in server.text


def test_answers_are_not_held_back_for_an_acknowledgement() -> None:
    """What is accepted inherits it: without, every answer took 44 ms."""
    with _bind("127.0.0.1", 0, 30.0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


OLD_GARBAGE = """
import gc, weakref
from samovar.server.serving import _freeze_libraries

class Connection:
    def __init__(self):
        self.itself = self

libraries = [[] for _ in range(400_000)]
_freeze_libraries()
connection = Connection()
gc.collect(1)
gc.collect(1)
is_there = weakref.ref(connection)
del connection
for _ in range(300):
    requests = [[] for _ in range(800)]
assert is_there() is None, gc.get_stats()
"""
"""In a process of its own: what is set aside stays so."""


def test_old_garbage_is_found_though_the_libraries_are_set_aside() -> None:
    subprocess.run([sys.executable, "-c", OLD_GARBAGE], check=True, timeout=PATIENCE_S)
