"""Worker processes: what is said to them arrives as it was said, and they end when nobody is left to work for."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asking import LIMIT_S, ask, is_alive, wait_for, worker_of
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import CancelledRequestError, EngineError, ModelError, NanLatentsError
from samovar.engine import Failed, OmniDiffusionConfig, PipelineFacts, Request
from samovar.engine.messages import Cancel, Fatal, Finished, Ready, Run, Update, receive, send
from samovar.engine.process import WorkerGroup, _open_store
from samovar.engine.worker import Usage
from samovar.engine.worker_main import EXIT_BAD_MESSAGE, EXIT_GPU_LOST, Inbox, Place, rank_environment, serve_next

HERE = Place(0, 1, os.getpid(), None)


def through(*messages: Any) -> list[Any]:
    """The messages, as they arrive at the other end of a pipe."""
    here, there = Pipe()
    with here, there:
        sender = threading.Thread(target=lambda: [send(here, message, os.getpid()) for message in messages])
        sender.start()
        received = [receive(there) for _ in messages]
        sender.join()
    return received


def test_every_message_survives_the_pipe() -> None:
    facts = PipelineFacts("FluxPipeline", frozenset({"prompt", "height"}), 16, OmniDiffusionSamplingParams(height=64))
    checked = facts.check(Request("a cat", OmniDiffusionSamplingParams(seed=1), priority=3))
    messages = [Run(1, checked), Cancel(1), Ready(facts, 2.5, Usage(10, 0), 4), Finished(1, None, Usage(1, 2))]
    assert through(*messages) == messages
    fatal, update, run = through(
        Fatal(ModelError("no such model")),
        Update(1, Failed(NanLatentsError("black", 3))),
        Run(2, Request("a cat", image=Image.new("RGB", (9, 7)))),
    )
    assert (str(fatal.error), update.event.error.step, run.request.image.size) == ("no such model", 3, (9, 7))
    assert through(("x" * 3_000_000, None)) == [("x" * 3_000_000, None)]


@pytest.mark.parametrize("mode", ["RGB", "P", "I;16"])
def test_images_arrive_bit_for_bit(mode: str) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    image = Image.fromarray(levels).convert("L" if mode == "I;16" else mode).convert(mode)
    ((copy, nested, array),) = through((image, {"deep": [image]}, levels))
    for each in (copy, nested["deep"][0]):
        assert (each.mode, each.size) == (image.mode, image.size)
        assert each.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    assert np.array_equal(array, levels)
    copy.putpixel((0, 0), 0)
    array[0] = 0


def test_nothing_is_left_open_or_in_shared_memory_and_the_end_of_a_pipe_is_an_error() -> None:
    through(Image.new("RGB", (8, 8)))  # Whatever is opened once and for all.
    before, shared = len(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    for _ in range(20):
        through([Image.new("RGB", (64, 64))] * 3)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [name for name in set(os.listdir("/dev/shm")) - shared if "samovar" in name]
    here, there = Pipe()
    here.close()
    with pytest.raises((EOFError, OSError)):
        receive(there)


def test_a_group_is_heard_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["own", "Own"]}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "own.py").write_text("raise SystemExit('must not be run')")
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    group = WorkerGroup(OmniDiffusionConfig(str(tmp_path), device="cpu"), lambda *news: heard.put(news))
    (process_id,) = group.process_ids
    who, rank, message = heard.get(timeout=LIMIT_S)
    assert (who, rank) == (group, 0)
    assert isinstance(message, Fatal)
    assert "own.py" in str(message.error)
    assert heard.get(timeout=LIMIT_S) == (group, 0, None)
    assert group.describe_end() == f"process {process_id}, exit code 0"
    group.end(1.0)
    group.end()
    assert not is_alive(process_id)


def test_ranks_meet_where_no_other_machine_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store, bound = _open_store(), list[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as file:
            bound += [line.split()[1] for line in file if line.split()[3] == "0A"]
    assert [each for each in bound if each.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    variables = rank_environment(Place(1, 2, os.getpid(), 4321))
    assert variables["MASTER_PORT"] == "4321"
    assert (variables["GLOO_SOCKET_IFNAME"], variables["NCCL_SOCKET_IFNAME"]) == ("lo", "eth7")


def test_ranks_end_if_one_of_them_cannot_be_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = WorkerGroup._start, list[int]()

    def start_one(group: WorkerGroup, config: OmniDiffusionConfig, rank: int) -> None:
        if rank == 1:
            started.extend(group.process_ids)
            raise OSError("no more processes")
        start(group, config, rank)

    monkeypatch.setattr(WorkerGroup, "_start", start_one)
    with pytest.raises(OSError, match="no more processes"):
        WorkerGroup(OmniDiffusionConfig(str(folder), device="cpu", cfg_parallel_size=2), lambda *news: None)
    assert len(started) == 1
    wait_for(lambda: not is_alive(started[0]))


def test_a_rank_that_is_not_understood_or_cannot_be_told_is_lost() -> None:
    here, there = Pipe()
    group, heard = WorkerGroup.__new__(WorkerGroup), list[Any]()
    group._on_message = lambda *news: heard.append(news)
    group._pipes, group._processes = [here], [multiprocessing.current_process()]
    there.send_bytes(b"\0nonsense")
    with pytest.raises(pickle.UnpicklingError):
        group._read(0)
    group._outbox = queue.SimpleQueue()
    group._outbox.put(Cancel(lambda: None))  # type: ignore[arg-type]
    with pytest.raises((pickle.PicklingError, AttributeError)):
        group._write()
    assert heard == [(group, 0, None)] * 2


# ------------------------------------------------------------------------------------------------ the process itself

CHILD = """
import os, signal
from samovar.engine.worker_main import die_with

die_with(os.getppid())
print(os.getpid(), flush=True)
signal.pause()
"""
PARENT = (
    "import subprocess, sys\nwith subprocess.Popen([sys.executable, '-c', sys.argv[1]]) as child:\n    child.wait()"
)


def test_it_dies_with_a_parent_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(signal.SIGKILL)
    wait_for(lambda: not is_alive(child))


def obey(pipe: multiprocessing.connection.Connection) -> None:
    inbox = Inbox(pipe)
    run = inbox.next()
    while not inbox.is_cancelled(run.number):
        pass
    pipe.send_bytes(str((run.request.prompt, inbox.is_cancelled(8))).encode())
    inbox.next()


@pytest.mark.parametrize(("last", "code"), [(None, 0), (b"\0nonsense", EXIT_BAD_MESSAGE)])
def test_it_hears_while_it_works_and_the_end_of_the_pipe_or_nonsense_is_its_end(last: bytes | None, code: int) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=obey, args=(there,), daemon=True)
    process.start()
    there.close()
    send(here, Run(7, Request("a cat")), os.getpid())
    send(here, Cancel(7), os.getpid())
    assert here.poll(LIMIT_S)
    assert here.recv_bytes().decode() == "('a cat', False)"
    if last is not None:
        here.send_bytes(last)
    else:
        here.close()
    process.join(LIMIT_S)
    assert process.exitcode == code


class Exited(BaseException):
    """In the place of an end of the process."""


@pytest.mark.parametrize("is_healthy", [True, False])
def test_a_process_whose_gpu_is_lost_says_why_and_ends(is_healthy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("samovar.engine.worker_main.os._exit", leave)
    here, there = Pipe()
    worker: Any = SimpleNamespace(
        make=lambda request, listener: EngineError("an illegal access"),
        is_healthy=lambda: is_healthy,
        usage=lambda: Usage(0, 0),
    )
    inbox: Any = SimpleNamespace(next=lambda: Run(1, Request("a cat")), forget=lambda number: None)
    ending = contextlib.nullcontext() if is_healthy else pytest.raises(Exited, match=str(EXIT_GPU_LOST))
    with ending:
        serve_next(worker, inbox, there, HERE)
    message = receive(here)
    assert isinstance(message, Finished if is_healthy else Fatal)
    assert "an illegal access" in str(message)


def test_nothing_is_left_of_a_request_that_was_cancelled(folder: Path) -> None:
    here, there = Pipe()
    worker = worker_of(folder, cache="tea_cache")

    def num_tensors() -> int:
        return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())

    def drop_one() -> None:
        glances = iter(range(100))
        inbox: Any = SimpleNamespace(
            next=lambda: Run(1, worker.facts.check(ask())),
            is_cancelled=lambda number: next(glances) > 0,
            forget=lambda number: None,
        )
        serve_next(worker, inbox, there, HERE)
        assert isinstance(receive(here), Update)
        assert isinstance(receive(here).outcome, CancelledRequestError)

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


HOLES = """
import os
import psutil
from samovar.offload.pinned import trim_heap

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
