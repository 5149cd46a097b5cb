"""A worker's process ends when nobody is left to work for."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from asking import LIMIT_S, is_alive, wait_for

from samovar.core.errors import CancelledRequestError, EngineError
from samovar.engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, Request, Worker
from samovar.engine.messages import Cancel, Fatal, Finished, Run, Update, receive, send
from samovar.engine.worker import Usage
from samovar.engine.worker_main import (
    EXIT_BAD_MESSAGE,
    EXIT_GPU_LOST,
    Inbox,
    Place,
    _answer,
    rank_environment,
    serve_next,
)

CHILD = """
import os, signal, sys
from samovar.engine.worker_main import die_with

die_with(os.getppid())
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = """
import subprocess, sys
with subprocess.Popen([sys.executable, "-c", sys.argv[1]]) as child:
    child.wait()
"""


def test_it_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(child))


def obey(pipe: multiprocessing.connection.Connection) -> None:
    orders = Inbox(pipe)
    job = orders.next()
    while not orders.is_cancelled(job.number):
        pass
    pipe.send_bytes(str((job.request.prompt, orders.is_cancelled(8))).encode())
    orders.next()


def test_orders_are_heard_while_it_works_and_the_end_of_the_pipe_is_the_end() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=obey, args=(there,), daemon=True)
    process.start()
    there.close()
    send(here, Run(7, Request("a cat")), os.getpid())
    send(here, Cancel(7), os.getpid())
    assert here.poll(LIMIT_S)
    assert here.recv_bytes().decode() == "('a cat', False)"
    here.close()
    process.join(LIMIT_S)
    assert process.exitcode == 0


class Exited(BaseException):
    """In the place of an end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr("samovar.engine.worker_main.os._exit", leave)
    return codes


def test_an_order_that_is_not_understood_is_the_end_and_old_drops_are_forgotten(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = multiprocessing.Pipe()
    orders = Inbox.__new__(Inbox)
    orders._pipe, orders._cancelled, orders._runs = there, set(), SimpleNamespace(put=lambda job: None)  # type: ignore
    orders._sent = collections.deque(maxlen=2)
    one = Request("a cat")
    for order in (Run(6, one), Cancel(6), Run(7, one), Cancel(7), Run(8, one)):
        send(here, order, os.getpid())
    here.send_bytes(b"\0nonsense")
    with pytest.raises(Exited):
        orders._read()
    assert exits == [EXIT_BAD_MESSAGE]
    assert "UnpicklingError" in capsys.readouterr().err
    assert orders._cancelled == {7}, "the last ones may still run"


@pytest.mark.parametrize("is_healthy", [True, False])
def test_a_process_whose_gpu_is_lost_says_why_and_ends(exits: list[int], is_healthy: bool) -> None:
    here, there = multiprocessing.Pipe()
    worker: Any = SimpleNamespace(
        make=lambda request, listener, priority: EngineError("an illegal access"),
        is_healthy=lambda: is_healthy,
        usage=lambda: Usage(0, 0),
    )
    try:
        _answer(worker, Run(1, Request("a cat")), Inbox.__new__(Inbox), there, Place(0, 1, os.getpid(), None))
    except Exited:
        assert exits == [EXIT_GPU_LOST]
    message = receive(here)
    assert isinstance(message, Fatal) is not is_healthy
    assert "an illegal access" in str(message)
    assert len(exits) == (not is_healthy)


class Dropping:
    """Inbox of which the first is taken back after its first step."""

    def __init__(self, order: Run) -> None:
        self._order, self._asked = order, 0

    def next(self) -> Run:
        return self._order

    def is_cancelled(self, job: int) -> bool:
        self._asked += 1
        return self._asked > 1


def num_tensors() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_nothing_is_left_of_a_request_that_was_cancelled(folder: Path) -> None:
    here, there = multiprocessing.Pipe()
    worker = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, cache_backend="tea_cache"))
    place = Place(0, 1, os.getpid(), None)

    def drop_one() -> None:
        request = Request("a cat", OmniDiffusionSamplingParams(num_inference_steps=9, seed=3))
        orders: Any = Dropping(Run(1, request))
        serve_next(worker, orders, there, place)
        assert isinstance(receive(here), Update)
        answer = receive(here)
        assert isinstance(answer, Finished)
        assert isinstance(answer.outcome, CancelledRequestError)

    drop_one()
    gc.collect()
    before = num_tensors()
    gc.disable()
    try:
        for _ in range(3):
            drop_one()
        assert num_tensors() == before
    finally:
        gc.enable()


def test_ranks_of_one_machine_talk_within_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.engine.worker_main.os.environ", {"NCCL_SOCKET_IFNAME": "eth7"})
    variables = rank_environment(Place(1, 2, os.getpid(), 4321))
    assert variables["MASTER_PORT"] == "4321"
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")


HOLES = """
import os
import psutil
from samovar.offload.host import trim_heap

resident = psutil.Process(os.getpid()).memory_info
parts = [bytearray(20_000) for _ in range(5_000)]
kept = parts[::50]  # What is between them is free, and stays with the process.
del parts
before = resident().rss
trim_heap()
print((before - resident().rss) // 2**20)
"""


@pytest.mark.skipif(os.confstr("CS_GNU_LIBC_VERSION") is None, reason="this libc gives memory back itself, or cannot")
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    found = subprocess.run([sys.executable, "-c", HOLES], check=True, capture_output=True, text=True, timeout=LIMIT_S)
    assert int(found.stdout) > 50, "of about 95 MiB"
