"""The state of the engine, for health probes and dashboards."""

from __future__ import annotations

from dataclasses import dataclass, field

from .events import Progress


@dataclass
class ReplicaStatus:
    """One worker at one moment; counts are totals of this place, whichever worker was in it."""

    gpus: tuple[int, ...] = ()
    """Its GPUs; empty on a CPU, or if the only worker was left to choose."""
    is_ready: bool = False
    running: int = 0
    restarts: int = 0
    images: int = 0
    bytes_moved: int = 0
    memory_bytes: int = 0
    worker_ids: tuple[int, ...] = ()
    alone: str = ""
    """Why it serves one request at a time, if it does."""


@dataclass
class EngineStatus:
    """The engine at one moment; counts are totals since its start."""

    model: str
    is_ready: bool = False
    """A worker is up and takes requests."""
    is_alive: bool = False
    """The engine will be ready again without help."""
    queued: int = 0
    steps_computed: int = 0
    steps_skipped: int = 0
    step_seconds: float = 0.0
    request_seconds: float = 0.0
    """Recent mean duration of a request."""
    failures: dict[str, int] = field(default_factory=dict)
    """By error code."""
    replicas: tuple[ReplicaStatus, ...] = ()
    running: int = 0
    restarts: int = 0
    images: int = 0
    bytes_moved: int = 0
    """Weights copied to the device by offload."""
    memory_bytes: int = 0
    """GPU memory, or the worker processes' memory without a GPU."""
    worker_ids: tuple[int, ...] = ()

    @property
    def replicas_ready(self) -> int:
        """How many take requests now."""
        return sum(replica.is_ready for replica in self.replicas)

    @property
    def step_count(self) -> int:
        return self.steps_computed + self.steps_skipped

    def note_step(self, step: Progress) -> None:
        self.steps_skipped += step.is_computed is False
        self.steps_computed += step.is_computed is not False
        self.step_seconds += step.seconds

    def note_request(self, seconds: float) -> None:
        self.request_seconds = 0.7 * self.request_seconds + 0.3 * seconds if self.request_seconds else seconds
