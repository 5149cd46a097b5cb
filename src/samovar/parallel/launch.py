"""Starts, watches and stops ranks.

`Ranks` starts the processes of one world and runs functions in all of them. When one fails or dies, the others may wait
for it in an exchange that never comes: all are stopped, and the error names the one that failed first. Under torchrun
the processes exist already: `join_world`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch._C._distributed_c10d import TCPStore

from ..core.errors import RankError, SettingError

_SETTLE_S = 0.5
"""How long to keep listening after a first failure: the first one heard is often not the first to fail."""
_END_S = 10.0
"""How long a rank that has failed takes to end."""

_START = timedelta(minutes=10)
"""How long a rank waits for others to start, however short its later timeouts: on a busy machine one may be there long
before another."""

_spawn: Any = torch.multiprocessing.spawn  # type: ignore[attr-defined]

_UNREACHABLE = "DistNetworkError", "DistBackendError", "gloo/", "Connection", "NCCL"
"""Words of the errors of ranks that could not reach another."""


class Ranks:
    """The processes of one world, on this machine."""

    def __init__(
        self, num_ranks: int, *, backend: str | None = None, timeout_s: float = 600.0, num_threads: int | None = None
    ) -> None:
        """`timeout_s` is how long a rank waits for others in an exchange. The default backend is NCCL if there is a GPU
        for each rank, else gloo."""
        if type(num_ranks) is not int or num_ranks < 1:
            raise SettingError(
                f"num_ranks is {num_ranks!r}; expected a number of processes, 1 or more.", param="num_ranks"
            )
        # The parent holds the store, so that it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ends = [multiprocessing.Pipe() for _ in range(num_ranks)]
        self._pipes = [here for here, _ in ends]
        threads = num_threads or max(1, torch.get_num_threads() // num_ranks)
        world = num_ranks, self._store.port, backend or default_backend(num_ranks), timeout_s
        self._started = _spawn(_serve, ([there for _, there in ends], threads, world), num_ranks, False, True)
        self._processes: list[Any] = self._started.processes

    @property
    def is_running(self) -> bool:
        return bool(self._pipes) and all(process.is_alive() for process in self._processes)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> list[Any]:
        """Run a function in all ranks; the result of each. If one fails or dies, or the time limit passes, all are
        stopped and RankError says which and why."""
        if not self._pipes:
            raise RankError(-1, "These ranks have ended. Start new ones.")
        task, results = pickle.dumps((function, args)), dict[Any, Any]()
        for pipe in self._pipes if self.is_running else ():
            pipe.send_bytes(task)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while len(results) < len(self._pipes):
            waiting = [pipe for pipe in self._pipes if pipe not in results]
            sentinels = [process.sentinel for process in self._processes]
            ready = connection.wait([*waiting, *sentinels], deadline and max(deadline - time.monotonic(), 0.0))
            if not ready:
                silent = self._pipes.index(waiting[0])
                self.close(wait_s=0.0)
                raise RankError(silent, f"Rank {silent} did not answer within {limit_s} s; all were stopped.")
            try:
                results |= {pipe: pickle.loads(pipe.recv_bytes()) for pipe in waiting if pipe in ready}
            except (EOFError, OSError):  # All ranks are ending.
                raise self._failure() from None
            if any(sentinel in ready for sentinel in sentinels):
                raise self._failure()
        return [results[pipe] for pipe in self._pipes]

    def close(self, wait_s: float = 5.0) -> None:
        """Stop all ranks: ask, then kill."""
        for pipe in self._pipes:
            pipe.close()  # A rank leaves its loop when its pipe closes.
        self._pipes, deadline = [], time.monotonic() + wait_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(wait_s=5.0 if error is None else 0.0)

    def _failure(self) -> RankError:
        """Stop all ranks; the error that says which failed first."""
        for _ in range(2):  # For the first to end, and for those that end with it.
            running = {process.sentinel: process for process in self._processes if process.exitcode is None}
            has_begun = len(running) < len(self._processes)
            for sentinel in connection.wait([*running], _SETTLE_S if has_begun else _END_S):
                running[sentinel].join()
        ended = {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode is not None}
        self.close(wait_s=0.0)
        errors = {rank: self._error(rank) or f"the process ended with exit code {code}" for rank, code in ended.items()}
        # A rank that cannot reach another fails after that one, though it may be heard first.
        echoes = {rank: any(word in error for word in _UNREACHABLE) for rank, error in errors.items()}
        rank = min(errors, key=lambda each: (echoes[each], each))
        others = ", ".join(str(other) for other in range(len(self._processes)) if other not in ended)
        hint = f" Not heard from: rank {others}." if others and echoes[rank] else ""
        return RankError(
            rank, f"Rank {rank} of {len(self._processes)} failed, and all were stopped.{hint} {errors[rank]}"
        )

    def _error(self, rank: int) -> str:
        """What a rank raised, as torch has noted it."""
        file = Path(self._started.error_files[rank])
        return str(pickle.loads(file.read_bytes())).strip() if file.exists() and file.stat().st_size else ""


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, **settings: Any) -> list[Any]:
    """Run a function in the ranks of a new world; the result of each."""
    with Ranks(num_ranks, **settings) as ranks:
        return ranks.call(function, *args)


def join_world(timeout_s: float = 600.0, backend: str | None = None) -> int:
    """Become one of the ranks that torchrun has started, on one node or several; this process's rank."""
    if not dist.is_torchelastic_launched():
        raise SettingError(
            "This process was not started by torchrun. Start it with: torchrun --nproc-per-node 4 -m samovar generate "
            "..., or let Samovar start the ranks: samovar.parallel.Ranks."
        )
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(dist.get_node_local_rank(fallback_rank=0) % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def default_backend(num_ranks: int) -> str:
    """NCCL if this machine has a GPU for each rank, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks else "gloo"


def _serve(rank: int, pipes: list[Any], num_threads: int, world: tuple[int, int, str, float]) -> None:
    """What a rank does until its pipe closes."""
    torch.set_num_threads(num_threads)
    while True:
        try:
            task = pipes[rank].recv_bytes()
        except (EOFError, OSError):
            return
        if not dist.is_initialized():
            _enter_world(rank, *world)
        function, args = pickle.loads(task)
        pipes[rank].send_bytes(pickle.dumps(function(*args)))


def _enter_world(rank: int, num_ranks: int, port: int, backend: str, timeout_s: float) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_START)
    store.set(f"rank {rank} is here", "yes")
    store.wait([f"rank {other} is here" for other in range(num_ranks)], _START)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
