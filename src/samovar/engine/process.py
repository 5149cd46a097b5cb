"""The processes of a worker: started, heard and stopped. There is one for each rank; together they make one image."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from .messages import Cancel, FromWorker, Run, receive, send
from .settings import OmniDiffusionConfig
from .worker_main import Place, worker_main

_VISIBLE = "CUDA_VISIBLE_DEVICES"
OnMessage = Callable[["WorkerGroup", int, FromWorker | None], None]
"""Gets the group, the rank and its message, or None when it has ended. Called from other threads."""


class WorkerGroup:
    """The processes of one worker. They end with this process, even if it is killed."""

    def __init__(self, config: OmniDiffusionConfig, on_message: OnMessage, replica: int = 0) -> None:
        self._on_message = on_message
        self.num_ranks = config.num_ranks
        self._store = _open_store() if self.num_ranks > 1 else None
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._outbox: queue.SimpleQueue[Run | Cancel | None] = queue.SimpleQueue()
        try:
            with _environment(config, config.gpus[replica]):
                for rank in range(self.num_ranks):
                    self._start(config, rank)
            for rank in range(self.num_ranks):
                threading.Thread(target=self._read, args=(rank,), daemon=True, name=f"samovar reader {rank}").start()
            threading.Thread(target=self._write, daemon=True, name="samovar writer").start()
        except BaseException:  # The processes that did start would wait for the others.
            self.end()
            raise

    def _start(self, config: OmniDiffusionConfig, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        place = Place(rank, self.num_ranks, os.getpid(), None if self._store is None else self._store.port)
        name = f"samovar worker {rank}"
        process = context.Process(target=worker_main, args=(config, place, theirs), daemon=True, name=name)
        with theirs:
            process.start()
        self._processes.append(process)
        self._pipes.append(ours)

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def send(self, message: Run | Cancel) -> None:
        """Send to all ranks. Never waits, not even for a process that has stopped reading."""
        self._outbox.put(message)

    def describe_end(self) -> str:
        """Which process has ended, and how."""
        ended = connection.wait([process.sentinel for process in self._processes], 2.0)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ended:
                process.join(2.0)  # It may still be freeing its memory.
            if process.exitcode is not None:
                of = f"rank {rank} of {self.num_ranks}, " if self.num_ranks > 1 else ""
                code = process.exitcode
                return f"{of}process {process.pid}, {f'signal {-code}' if code < 0 else f'exit code {code}'}"
        return f"process {self.process_ids[0]}, which closed its pipe or sent a bad message"

    def end(self, wait_s: float = 0.0) -> None:
        """Let the processes leave, and kill those that do not."""
        self._outbox.put(None)
        if wait_s:  # A process leaves at once when its pipe ends. Closing our end would not wake our own reader.
            for pipe in self._pipes:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + wait_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(10.0)

    def _read(self, rank: int) -> None:
        try:
            while True:
                self._on_message(self, rank, receive(self._pipes[rank]))
        except (EOFError, OSError):
            pass  # It has ended.
        finally:  # Also after a bad message, which goes to the log: nothing more is read from this process.
            self._on_message(self, rank, None)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes, strict=True)):
                try:
                    send(pipe, message, process.pid or 0)
                except ConnectionError:
                    continue  # It has ended, which its reader will notice.
                except BaseException:  # This rank would never answer.
                    self._on_message(self, rank, None)
                    raise


def _open_store() -> Any:
    """Where ranks meet, on a local socket: one that the store opens itself can be reached from other machines."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_one_at_a_time = threading.Lock()
"""Replicas start processes in threads of their own, and all see one environment."""


@contextlib.contextmanager
def _environment(config: OmniDiffusionConfig, gpus: Sequence[int] = ()) -> Iterator[None]:
    """Variables that a process must see before it loads its libraries. It sees no GPU but those of `gpus`, if any."""
    wanted = {"TRANSFORMERS_VERBOSITY": "error"}
    if not config.trust_remote_code:
        wanted["DIFFUSERS_DISABLE_REMOTE_CODE"] = "1"
    with _one_at_a_time:
        before = {name: os.environ.get(name) for name in (*wanted, _VISIBLE)}
        os.environ.update({name: value for name, value in wanted.items() if before[name] is None})
        if gpus:  # The first one that is visible is 0.
            names = (before[_VISIBLE] or "").split(",")
            os.environ[_VISIBLE] = ",".join(names[gpu].strip() if names[0] else str(gpu) for gpu in gpus)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
