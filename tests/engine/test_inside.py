"""A worker's process ends when nobody is left to work for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

from asking import LIMIT_S, is_alive, wait_for

from samovar.engine import Request
from samovar.engine.inside import Orders
from samovar.engine.messages import Drop, Make
from samovar.engine.wire import send

CHILD = """
import os, signal, sys
from samovar.engine.inside import die_with

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
    orders = Orders(pipe)
    job = orders.next()
    while not orders.is_dropped(job.job, 1):
        pass
    pipe.send_bytes(str((job.requests[0].prompt, orders.is_dropped(job.job, 0))).encode())
    orders.next()


def test_orders_are_heard_while_it_works_and_the_end_of_the_pipe_is_the_end() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=obey, args=(there,), daemon=True)
    process.start()
    there.close()
    send(here, Make(7, (Request("a cat"), Request("a dog"))), os.getpid())
    send(here, Drop(6, 0), os.getpid())
    send(here, Drop(7, 1), os.getpid())
    assert here.poll(LIMIT_S)
    assert here.recv_bytes().decode() == "('a cat', False)"
    here.close()
    process.join(LIMIT_S)
    assert process.exitcode == 0
