"""Asks a supervisor for images."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from samovar.engine import (
    Done,
    Event,
    Failed,
    GenerationResult,
    Job,
    OmniDiffusionSamplingParams,
    Progress,
    Request,
    Supervisor,
    Worker,
)

LIMIT_S = 300.0
"""How long anything may take on a busy machine before a test gives up."""


class Asked:
    """A request to a supervisor, and what it said about it."""

    def __init__(self, supervisor: Supervisor, prompt: str = "a cat", **how: Any) -> None:
        self._queue: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.events: list[Event] = []
        rest = {name: how.pop(name) for name in ("priority", "deadline_s") if name in how}
        extra = {name: how.pop(name) for name in ("image", "num_previews") if name in how}
        request = Request(prompt, OmniDiffusionSamplingParams(**{"seed": 3, **how}), **extra)
        self.job: Job = supervisor.submit(request, self._queue.put, **rest)

    def until(self, is_it: Callable[[Event], bool]) -> Event:
        """The first event of a kind, or the last one of all."""
        while True:
            event = self._queue.get(timeout=LIMIT_S)
            self.events.append(event)
            if is_it(event) or isinstance(event, (Done, Failed)):
                return event

    def result(self) -> GenerationResult:
        end = self.until(lambda event: False)
        if isinstance(end, Failed):
            raise end.error
        assert isinstance(end, Done)
        return end.result


def generate(worker: Worker, prompt: str, params: OmniDiffusionSamplingParams) -> GenerationResult:
    """Images of one prompt; raises the error if there are none."""
    (outcome,) = worker.run([Request(prompt, params)])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def pixels(result: GenerationResult) -> Any:
    return np.asarray(result.images[0])


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
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                    state, parent = file.read().rsplit(")", 1)[1].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(parent) == process_id and state != "Z":
                found.add(int(name))
    return found
