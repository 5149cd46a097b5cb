"""Real processes over gloo, started once and asked many times: starting them takes longer than most of what they do."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

_start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]


class Ranks:
    """The processes of one world."""

    def __init__(self, num_ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        ends = [multiprocessing.Pipe() for _ in range(num_ranks)]
        self._pipes = [here for here, _ in ends]
        world = f"file://{self._folder.name}/store", num_ranks, [there for _, there in ends]
        self._context = _start(_serve, world, num_ranks, join=False, daemon=True, start_method="spawn")

    @property
    def is_running(self) -> bool:
        return all(process.is_alive() for process in self._context.processes)

    def call(self, function: Callable[..., Any], *args: Any, limit_s: float = 900.0) -> list[Any]:
        """Run a function in all ranks; the result of each. If one fails, all are ended, and its error is raised."""
        results: dict[Any, Any] = {}
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            while len(results) < len(self._pipes):
                waiting = [pipe for pipe in self._pipes if pipe not in results]
                ready = connection.wait(waiting, limit_s)
                assert ready, f"rank {self._pipes.index(waiting[0])} did not answer within {limit_s} s"
                results |= {pipe: pipe.recv() for pipe in waiting if pipe in ready}
        except BaseException as error:
            if isinstance(error, (EOFError, OSError)):  # A rank has ended.
                self._context.join(grace_period=0)  # Raises what the first one that failed has raised.
            self.close()
            raise
        return [results[pipe] for pipe in self._pipes]

    def close(self) -> None:
        for process in self._context.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(rank: int, store: str, num_ranks: int, pipes: list[Any]) -> None:
    """What a rank does until it is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, timedelta(minutes=5), num_ranks, rank)
    while True:
        function, args = pipes[rank].recv()
        pipes[rank].send(function(*args))
