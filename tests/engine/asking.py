"""Asks workers and supervisors for images."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samovar.core.errors import SamovarError
from samovar.engine import (
    Done,
    Event,
    Failed,
    GenerationResult,
    Job,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    Progress,
    Request,
    Supervisor,
    Worker,
)

LIMIT_S = 300.0
"""How long anything may take on a busy machine before a test gives up."""
LONG = 100_000
"""Steps that nobody waits for: they take longer than any test does."""


def ask(prompt: str = "a cat", how: dict[str, Any] | None = None, **params: Any) -> Request:
    params = {"seed": 3, "num_inference_steps": 5, **params}
    return Request(prompt, OmniDiffusionSamplingParams(**params), **(how or {}))


def worker_of(folder: Path | None = None, pipe: Any = None, **settings: Any) -> Worker:
    """A worker on a CPU, by default of one request at a time."""
    model = {} if folder is None else {"model": str(folder)}
    return Worker(OmniDiffusionConfig(**{"device": "cpu", "progress": False, **model, **settings}), pipe)


def result_of(outcome: Any) -> GenerationResult:
    """The result; raises the error if there is none."""
    if isinstance(outcome, SamovarError):
        raise outcome
    assert isinstance(outcome, GenerationResult)
    return outcome


def pixels(outcome: Any, index: int = 0) -> Any:
    return np.asarray(result_of(outcome).images[index]).astype(int)


def together(tasks: Sequence[Callable[[], Any]]) -> list[Any]:
    """What tasks return that are called in threads of their own, all of them begun before any goes on."""
    gate, made = threading.Barrier(len(tasks)), dict[int, Any]()

    def run(index: int) -> None:
        gate.wait()
        made[index] = tasks[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [made[index] for index in range(len(tasks))]


class Asked:
    """A request to a supervisor, and what it said about it."""

    def __init__(self, supervisor: Supervisor, prompt: str = "a cat", **how: Any) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.events: list[Event] = []
        extra = {name: how.pop(name) for name in ("priority", "deadline_s", "image", "num_previews") if name in how}
        request = Request(prompt, OmniDiffusionSamplingParams(**{"seed": 3, **how}), **extra)
        self.job: Job = supervisor.submit(request, self._queue.put)

    def until(self, is_it: Callable[[Event], bool] = lambda event: False) -> Event:
        """The first event of a kind, or the last one of all."""
        while True:
            event = self._queue.get(timeout=LIMIT_S)
            self.events.append(event)
            if is_it(event) or isinstance(event, (Done, Failed)):
                return event

    def result(self) -> GenerationResult:
        end = self.until()
        if isinstance(end, Failed):
            raise end.error
        assert isinstance(end, Done)
        return end.result


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_step(event: Event) -> bool:
    return isinstance(event, Progress)


def is_alive(process_id: int) -> bool:
    """Whether a process runs; one that has ended and was not asked how does not."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(process_id: int) -> set[int]:
    """The processes that a process has started and that still run."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                state, parent = file.read().rsplit(")", 1)[1].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == process_id and state != "Z":
            found.add(int(name))
    return found
