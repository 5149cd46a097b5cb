"""How are ranks started, watched and ended?

`Ranks` starts processes that make up one world and runs functions in all of them. It watches them all: when one
fails or dies, the others, which may be waiting for it in an exchange that never comes, are ended, and the error
names the one that was first. Under torchrun the processes are there already: `join_world`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ..errors import SettingError
from .failures import RankError

_SETTLE_S = 0.5
"""How long to go on listening after a first failure: the first to be heard is often not the first to fail."""

_START = timedelta(minutes=10)
"""How long a rank waits for others to be started, however short it waits for them later: on a busy machine one may be
there long before another."""


class _Answer(NamedTuple):
    """What a rank says at the end of a call."""

    result: Any
    error: str | None = None
    is_echo: bool = False
    """Whether the error is that another rank could not be reached."""


class Ranks:
    """Processes of one world, on this machine."""

    def __init__(
        self,
        num_ranks: int,
        *,
        backend: str | None = None,
        timeout_s: float = 600.0,
        num_threads: int | None = None,
    ) -> None:
        """`timeout_s` is how long a rank waits for others in an exchange. The backend is NCCL if there are GPUs for
        all ranks, else gloo."""
        if type(num_ranks) is not int or num_ranks < 1:
            raise SettingError(f"num_ranks is {num_ranks!r}; a number of processes from 1 on was expected.")
        backend = backend or default_backend(num_ranks)
        # The parent holds the store, so that it outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        context = multiprocessing.get_context("spawn")
        for rank in range(num_ranks):
            here, there = context.Pipe()
            settings = _Settings(rank, num_ranks, self._store.port, backend, timeout_s, num_threads)
            process = context.Process(target=_serve, args=(settings, there), daemon=True, name=f"samovar rank {rank}")
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    @property
    def is_running(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float | None = None) -> list[Any]:
        """Run a function in all ranks and give what each returned. If one fails or dies, or the limit has passed,
        all are ended and RankError says which and why."""
        if not self._processes:
            raise RankError(-1, "These ranks have ended. Start new ones.")
        task = pickle.dumps((function, args))
        for pipe in self._pipes:
            try:
                pipe.send_bytes(task)
            except OSError:
                continue  # It is dead; it is found so below.
        answers: dict[int, _Answer] = {}
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while len(answers) < len(self._pipes):
            self._listen(answers, None if deadline is None else deadline - time.monotonic())
            if any(answer.error is not None for answer in answers.values()):
                self._fail(answers)
            if deadline is not None and time.monotonic() >= deadline:
                missing = [rank for rank in range(len(self._pipes)) if rank not in answers]
                self.close(wait_s=0.0)
                raise RankError(missing[0], f"Rank {missing[0]} did not answer within {limit_s} s; all were ended.")
        return [answers[rank].result for rank in range(len(self._pipes))]

    def close(self, wait_s: float = 5.0) -> None:
        """End all ranks: ask, then terminate, then kill."""
        for pipe in self._pipes:
            pipe.close()  # Each leaves its loop at the end of its pipe.
        deadline = time.monotonic() + wait_s
        for end in (None, "terminate", "kill"):
            for process in self._processes:
                if process.is_alive() and end is not None:
                    getattr(process, end)()
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()) if end is None else 2.0)
        self._processes, self._pipes = [], []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait_s=5.0 if error is None else 0.0)

    def _listen(self, answers: dict[int, _Answer], wait_s: float | None) -> None:
        """Wait until some rank answers or dies."""
        waiting = {self._pipes[rank]: rank for rank in range(len(self._pipes)) if rank not in answers}
        sentinels = {self._processes[rank].sentinel: rank for rank in waiting.values()}
        for ready in connection.wait([*waiting, *sentinels], None if wait_s is None else max(wait_s, 0.0)):
            rank = waiting[ready] if ready in waiting else sentinels[ready]
            if rank in answers:
                continue
            try:
                answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
            except (EOFError, OSError):
                self._processes[rank].join(2.0)
                answers[rank] = _Answer(None, f"the process ended with exit code {self._processes[rank].exitcode}")

    def _fail(self, answers: dict[int, _Answer]) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while len(answers) < len(self._pipes) and time.monotonic() < deadline:
            self._listen(answers, deadline - time.monotonic())
        failed = {rank: answer for rank, answer in answers.items() if answer.error is not None}
        # A rank that cannot reach another fails after that one, though it may be heard first.
        rank = min(failed, key=lambda r: (failed[r].is_echo, r))
        size = len(self._processes)
        silent = [str(other) for other in range(size) if other not in answers]
        self.close(wait_s=0.0)
        hint = f" Not heard from: rank {', '.join(silent)}." if silent and failed[rank].is_echo else ""
        raise RankError(rank, f"Rank {rank} of {size} failed, and all were ended.{hint} {failed[rank].error}")


def launch(function: Callable[..., Any], num_ranks: int, *args: Any, **settings: Any) -> list[Any]:
    """Run a function in the ranks of a new world; what each returned."""
    with Ranks(num_ranks, **settings) as ranks:
        return ranks.call(function, *args)


def join_world(timeout_s: float = 600.0, backend: str | None = None) -> int:
    """Become one of the ranks that torchrun has started, on one node or several; this process's rank."""
    if not dist.is_torchelastic_launched():
        raise SettingError(
            "This process was not started by torchrun. Start it so: torchrun --nproc-per-node 4 -m samovar generate "
            "..., or let Samovar start ranks of its own: samovar.parallel.Ranks."
        )
    local = dist.get_node_local_rank(fallback_rank=0)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    if backend == "nccl":
        torch.cuda.set_device(local % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_rank()


def default_backend(num_ranks: int) -> str:
    """NCCL if there is a GPU for each rank of this machine, else gloo."""
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks else "gloo"


class _Settings(NamedTuple):
    rank: int
    num_ranks: int
    port: int
    backend: str
    timeout_s: float
    num_threads: int | None


def _serve(settings: _Settings, pipe: Any) -> None:
    """What a rank does until its pipe ends."""
    torch.set_num_threads(settings.num_threads or max(1, torch.get_num_threads() // settings.num_ranks))
    timeout = timedelta(seconds=settings.timeout_s)
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            if not dist.is_initialized():
                _enter_world(settings, timeout)
            function, args = pickle.loads(task)
            answer = _Answer(function(*args))
            payload = pickle.dumps(answer)
        except BaseException as error:
            payload = pickle.dumps(_Answer(None, _described(error), _is_echo(error)))
        pipe.send_bytes(payload)


def _enter_world(settings: _Settings, timeout: timedelta) -> None:
    if settings.backend == "nccl":
        torch.cuda.set_device(settings.rank)
    store = TCPStore("127.0.0.1", settings.port, is_master=False, timeout=_START)
    store.set(f"rank {settings.rank} is here", "yes")
    store.wait([f"rank {rank} is here" for rank in range(settings.num_ranks)], _START)
    dist.init_process_group(
        settings.backend, store=store, rank=settings.rank, world_size=settings.num_ranks, timeout=timeout
    )


def _described(error: BaseException) -> str:
    last = "".join(traceback.format_tb(error.__traceback__)[-3:])
    return f"{type(error).__name__}: {error}\n{last}".rstrip()


def _is_echo(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in ("gloo/", "Connection", "NCCL"))
