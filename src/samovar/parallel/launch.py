"""How are ranks started, watched and stopped?

`Ranks` starts the processes of one world and runs functions in all of them. When one fails or dies, the others may wait
for it in an exchange that never comes: all are stopped, and the error names the one that failed first. Under torchrun
the processes exist already: `join_world`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ..core.errors import RankError, SettingError

_SETTLE_S = 0.5
"""How long to keep listening after a first failure: the first one heard is often not the first to fail."""

_START = timedelta(minutes=10)
"""How long a rank waits for others to start, however short its later timeouts: on a busy machine one may be there long
before another."""


class _Answer(NamedTuple):
    """What a rank sends at the end of a call."""

    result: Any
    error: str | None = None
    is_echo: bool = False
    """Whether the error is that another rank could not be reached."""


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
        backend = backend or default_backend(num_ranks)
        # The parent holds the store, so that it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        threads = num_threads or max(1, torch.get_num_threads() // num_ranks)
        for rank in range(num_ranks):
            here, there = context.Pipe()
            world = (rank, num_ranks, self._store.port, backend, timeout_s)
            process = context.Process(target=_serve, args=(there, threads, world), daemon=True, name=f"rank {rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    @property
    def is_running(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> list[Any]:
        """Run a function in all ranks; the result of each. If one fails or dies, or the time limit passes, all are
        stopped and RankError says which and why."""
        if not self._processes:
            raise RankError(-1, "These ranks have ended. Start new ones.")
        task = pickle.dumps((function, args))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(task)
            except OSError:
                continue  # Its process is dead, which shows below.
        answers: dict[int, _Answer] = {}
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while len(answers) < len(self._pipes):
            self._listen(answers, deadline)
            if any(answer.error is not None for answer in answers.values()):
                self._fail(answers)
            if deadline is not None and time.monotonic() >= deadline:
                missing = next(rank for rank in range(len(self._pipes)) if rank not in answers)
                self.close(wait_s=0.0)
                raise RankError(missing, f"Rank {missing} did not answer within {limit_s} s; all were stopped.")
        return [answers[rank].result for rank in range(len(self._pipes))]

    def close(self, wait_s: float = 5.0) -> None:
        """Stop all ranks: ask, then terminate, then kill."""
        for pipe in self._pipes:
            pipe.close()  # A rank leaves its loop when its pipe closes.
        deadline = time.monotonic() + wait_s
        for stop in (None, "terminate", "kill"):
            for process in self._processes:
                if process.is_alive() and stop is not None:
                    getattr(process, stop)()
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()) if stop is None else 2.0)
        self._processes, self._pipes = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(wait_s=5.0 if error is None else 0.0)

    def _listen(self, answers: dict[int, _Answer], deadline: float | None) -> None:
        """Wait until some rank answers or dies."""
        ranks = [rank for rank in range(len(self._pipes)) if rank not in answers]
        sources = {self._pipes[rank]: rank for rank in ranks} | {self._processes[r].sentinel: r for r in ranks}
        ready = connection.wait(list(sources), deadline and max(deadline - time.monotonic(), 0.0))
        for rank in {sources[source] for source in ready}:
            try:
                answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
            except (EOFError, OSError):
                self._processes[rank].join(2.0)
                answers[rank] = _Answer(None, f"the process ended with exit code {self._processes[rank].exitcode}")

    def _fail(self, answers: dict[int, _Answer]) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while len(answers) < len(self._pipes) and time.monotonic() < deadline:
            self._listen(answers, deadline)
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        # A rank that cannot reach another fails after that one, though it may be heard first.
        rank = min(failed, key=lambda r: (failed[r].is_echo, r))
        size = len(self._processes)
        silent = [str(other) for other in range(size) if other not in answers]
        self.close(wait_s=0.0)
        hint = f" Not heard from: rank {', '.join(silent)}." if silent and failed[rank].is_echo else ""
        raise RankError(rank, f"Rank {rank} of {size} failed, and all were stopped.{hint} {failed[rank].error}")


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
    local = dist.get_node_local_rank(fallback_rank=0)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def default_backend(num_ranks: int) -> str:
    """NCCL if this machine has a GPU for each rank, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks else "gloo"


def _serve(pipe: Any, num_threads: int, world: tuple[int, int, int, str, float]) -> None:
    """What a rank does until its pipe closes."""
    torch.set_num_threads(num_threads)
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            if not dist.is_initialized():
                _enter_world(*world)
            function, args = pickle.loads(task)
            payload = pickle.dumps(_Answer(function(*args)))
        except BaseException as error:
            pipe.send_bytes(pickle.dumps(_failure(error)))
            raise SystemExit(1) from None
        pipe.send_bytes(payload)


def _failure(error: BaseException) -> _Answer:
    last = "".join(traceback.format_tb(error.__traceback__)[-3:])
    words = ("gloo/", "Connection", "NCCL")
    is_echo = isinstance(error, dist.DistError) or any(word in str(error) for word in words)
    return _Answer(None, f"{type(error).__name__}: {error}\n{last}".rstrip(), is_echo)


def _enter_world(rank: int, num_ranks: int, port: int, backend: str, timeout_s: float) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_START)
    store.set(f"rank {rank} is here", "yes")
    store.wait([f"rank {other} is here" for other in range(num_ranks)], _START)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
