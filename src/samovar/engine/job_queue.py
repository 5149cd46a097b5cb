"""The queue of jobs, and whether one that runs is still alive. Nothing here knows of threads, processes or clocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import EngineError, OutOfMemoryError, QueueFullError, SamovarError, StepTimeoutError, WorkerLostError
from .job import Job
from .messages import Finished
from .worker import RAISED_BY_ALL_RANKS

SETTLE_S = 5.0
"""How long the other ranks have to answer after one has failed. They may be waiting for it forever."""
MARGIN = 10
"""How many times longer than the longest silence so far one may be."""


@dataclass
class JobQueue:
    """A bounded queue, by priority and then by arrival."""

    max_jobs: int
    jobs: list[Job] = field(default_factory=list)
    """The next one first."""

    def check_room(self, seconds_each: float) -> None:
        """QueueFullError if there is no room for another job."""
        count = len(self.jobs)
        if count >= self.max_jobs:
            retry_after_s = max(1.0, seconds_each * (count + 1))
            message = f"{count} requests are waiting, which is the limit. Try again in {retry_after_s:.0f} s."
            raise QueueFullError(message, retry_after_s)

    def add(self, job: Job, seconds_each: float) -> None:
        """Insert a job; QueueFullError if there is no room."""
        self.check_room(seconds_each)
        behind = (i for i, other in enumerate(self.jobs) if other.priority < job.priority)
        self.jobs.insert(next(behind, len(self.jobs)), job)

    def position(self, job: Job) -> int:
        """1 is next; 0 if it does not wait."""
        return self.jobs.index(job) + 1 if job in self.jobs else 0

    def remove(self, jobs: list[Job]) -> None:
        self.jobs = [job for job in self.jobs if job not in jobs]

    def pop_overdue(self, now: float) -> list[Job]:
        """Remove and return the jobs that have waited too long."""
        late = [job for job in self.jobs if job.deadline is not None and job.deadline <= now]
        self.remove(late)
        return late

    def next_deadline(self) -> float | None:
        return min((job.deadline for job in self.jobs if job.deadline is not None), default=None)

    def pop(self) -> Job | None:
        """Remove and return the next job."""
        return self.jobs.pop(0) if self.jobs else None


@dataclass
class Running:
    """A job that a worker runs, and what its ranks have said."""

    number: int
    job: Job
    last_heard: float
    limit_s: float = 0.0
    """How long the worker may be silent."""
    longest_s: float = 0.0
    """The longest silence so far."""
    step: str = "before its first step"
    answers: dict[int, Finished] = field(default_factory=dict)
    """By rank."""
    must_settle_by: float | None = None

    def hear(self, now: float) -> None:
        """The worker has said something."""
        self.longest_s = max(self.longest_s, now - self.last_heard)
        self.last_heard = now

    def note(self, rank: int, answer: Finished, now: float) -> None:
        """A rank has finished."""
        self.answers[rank] = answer
        if self.must_settle_by is None and isinstance(answer.outcome, SamovarError):
            self.must_settle_by = now + SETTLE_S

    @property
    def can_go_on(self) -> bool:
        """Whether the ranks can take the next job: all ended this one in the same way."""
        endings = {
            type(answer.outcome) if isinstance(answer.outcome, SamovarError) else None
            for answer in self.answers.values()
        }
        if len(self.answers) == 1 or endings == {None}:
            return True
        shared = (*RAISED_BY_ALL_RANKS, OutOfMemoryError)
        return len(endings) == 1 and all(kind is not None and issubclass(kind, shared) for kind in endings)

    def errors(self) -> str:
        """What went wrong, and on which rank."""
        outcomes = {rank: answer.outcome for rank, answer in sorted(self.answers.items())}
        return "; ".join(f"rank {rank}: {each}" for rank, each in outcomes.items() if isinstance(each, SamovarError))

    def next_timeout(self) -> float:
        """When the next message must have come."""
        timeout = self.last_heard + max(self.limit_s, MARGIN * self.longest_s)
        return timeout if self.must_settle_by is None else min(timeout, self.must_settle_by)

    def timeout_error(self, now: float) -> EngineError | None:
        """The error if the worker hangs, else None."""
        if self.must_settle_by is not None and now >= self.must_settle_by:
            problem = f"Other ranks did not answer after an error ({self.errors()})."
            return WorkerLostError(f"{problem} All ranks were stopped and are being replaced: try again.")
        if now < self.next_timeout():
            return None
        return StepTimeoutError(
            f"The worker sent nothing for {now - self.last_heard:.3g} s, {self.step}, and was stopped. Try again; if "
            "steps do take that long, raise step_timeout_s."
        )
