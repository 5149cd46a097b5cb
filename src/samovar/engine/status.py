"""How is the engine? What a probe or a dashboard asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .events import Progress
from .worker import Usage


@dataclass(frozen=True)
class EngineStatus:
    """The engine at one moment; figures are sums since its start."""

    model: str
    is_ready: bool
    """Whether a worker is there and takes requests."""
    is_alive: bool
    """Whether there will be one again without help."""
    queued: int
    running: int
    restarts: int
    steps_computed: int
    steps_skipped: int
    bytes_moved: int
    """Weights copied to the device by offload."""
    memory_bytes: int
    """Of the GPU, or of the worker processes where there is none."""
    step_seconds: float
    step_count: int
    pictures: int
    failures: Mapping[str, int]
    """By the code of the error."""
    worker_ids: tuple[int, ...]
    """The worker's processes."""


@dataclass
class Counters:
    """What is counted."""

    steps_computed: int = 0
    steps_skipped: int = 0
    step_seconds: float = 0.0
    step_count: int = 0
    pictures: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    request_seconds: float = 0.0
    """How long a request takes, by the most recent ones."""
    _moved_before: int = 0
    """By workers that have ended."""
    _usage: dict[int, Usage] = field(default_factory=dict)
    """By rank."""

    def status(self, **state: Any) -> EngineStatus:
        """What is counted, and the rest of what a status has, by name."""
        return EngineStatus(
            steps_computed=self.steps_computed,
            steps_skipped=self.steps_skipped,
            bytes_moved=self.bytes_moved,
            memory_bytes=self.memory_bytes,
            step_seconds=self.step_seconds,
            step_count=self.step_count,
            pictures=self.pictures,
            failures=dict(self.failures),
            **state,
        )

    def note_step(self, step: Progress) -> None:
        self.steps_skipped += step.is_computed is False
        self.steps_computed += step.is_computed is not False
        self.step_seconds += step.seconds
        self.step_count += 1

    def note_request(self, seconds: float) -> None:
        self.request_seconds = seconds if not self.request_seconds else 0.7 * self.request_seconds + 0.3 * seconds

    def note_usage(self, rank: int, usage: Usage) -> None:
        self._usage[rank] = usage

    def note_end_of_worker(self) -> None:
        self._moved_before += sum(usage.bytes_moved for usage in self._usage.values())
        self._usage = {}

    @property
    def bytes_moved(self) -> int:
        return self._moved_before + sum(usage.bytes_moved for usage in self._usage.values())

    @property
    def memory_bytes(self) -> int:
        return sum(usage.memory_bytes for usage in self._usage.values())
