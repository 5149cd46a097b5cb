"""How are worker processes started, heard and ended? A group of them, one for each rank, makes one picture."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .inside import Place, serve
from .messages import Drop, FromWorker, Make
from .settings import OmniDiffusionConfig
from .wire import receive, send

Hear = Callable[["WorkerGroup", int, FromWorker | None], None]
"""Told the group, the rank and what it said; None when it has ended. Called from other threads."""


class WorkerGroup:
    """The processes of one worker. They end with the thread that started them, whatever happens to it."""

    def __init__(self, config: OmniDiffusionConfig, hear: Hear) -> None:
        self.since = time.monotonic()
        self._hear = hear
        num_ranks = config.num_ranks
        self._store = _open_store() if num_ranks > 1 else None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outbox: queue.SimpleQueue[Make | Drop | None] = queue.SimpleQueue()
        try:
            with _environment(config):
                for rank in range(num_ranks):
                    self._start(config, rank, num_ranks)
            for rank in range(num_ranks):
                threading.Thread(target=self._listen, args=(rank,), daemon=True, name=f"samovar ear {rank}").start()
            threading.Thread(target=self._speak, daemon=True, name="samovar mouth").start()
        except BaseException:  # Those that were started would wait for the others.
            self.end()
            raise

    def _start(self, config: OmniDiffusionConfig, rank: int, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        place = Place(rank, num_ranks, os.getpid(), None if self._store is None else self._store.port)
        process = context.Process(target=serve, args=(config, place, there), daemon=True, name=f"samovar worker {rank}")
        with there:
            process.start()
        self._processes.append(process)
        self._pipes.append(here)

    @property
    def num_ranks(self) -> int:
        return len(self._processes)

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def send(self, order: Make | Drop) -> None:
        """Tell all ranks; this never waits, not even for a process that has stopped reading."""
        self._outbox.put(order)

    def describe_end(self) -> str:
        """Which process has ended, and how."""
        ended = connection.wait([process.sentinel for process in self._processes], 2.0)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ended:
                process.join(2.0)  # It may still be giving its memory back.
            if process.exitcode is not None:
                of = f"rank {rank} of {self.num_ranks}, " if self.num_ranks > 1 else ""
                code = process.exitcode
                return f"{of}process {process.pid}, {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        return f"process {self.process_ids[0]}, which closed its pipe or was not understood"

    def end(self, wait_s: float = 0.0) -> None:
        """Let the processes go, and kill what is left of them."""
        self._outbox.put(None)
        if wait_s:  # At the end of its pipe a process leaves by itself, at once.
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    _hang_up(pipe)
        deadline = time.monotonic() + wait_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10.0)

    def _listen(self, rank: int) -> None:
        try:
            while True:
                self._hear(self, rank, receive(self._pipes[rank]))
        except (EOFError, OSError):
            pass  # It has ended.
        finally:  # Also if it cannot be understood, which is an error for the log: nothing it says is heard any more.
            self._hear(self, rank, None)

    def _speak(self) -> None:
        while (order := self._outbox.get()) is not None:
            for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
                try:
                    send(pipe, order, process.pid or 0)
                except ConnectionError:
                    continue  # It has ended; who listens to it will say so.
                except BaseException:  # It will never hear of this order, and would be waited for in vain.
                    self._hear(self, rank, None)
                    raise


def _hang_up(pipe: Connection) -> None:
    """Shut a pipe in both directions. Closing it would not wake those who read from it."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _open_store() -> Any:
    """Where ranks meet. On a socket of ours: one that the store opens itself can be reached from other machines."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


@contextlib.contextmanager
def _environment(config: OmniDiffusionConfig) -> Iterator[None]:
    """What must be in the environment before a process loads its libraries, for as long as it takes to start it."""
    # Processes whose threads spin for long while they wait starve each other.
    wanted = {"GOMP_SPINCOUNT": "10000", "TRANSFORMERS_VERBOSITY": "error"}
    if not config.trust_remote_code:
        wanted["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
