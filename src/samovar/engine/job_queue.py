"""Which jobs run next, and is the batch that runs still alive? Nothing here knows of threads, processes or clocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from ..core.errors import EngineError, OutOfMemoryError, QueueFullError, SamovarError, StepTimeoutError, WorkerLostError
from .job import Job
from .messages import Finished
from .patience import MARGIN
from .worker import RAISED_BY_ALL_RANKS

SETTLE_S = 5.0
"""How long the other ranks have to answer after one has failed. They may be waiting for it forever."""
Best = Callable[[Hashable, int], int]


def images_of(jobs: Iterable[Job]) -> int:
    return sum(job.request.num_images for job in jobs)


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

    def pop_batch(self, max_images: int, coming: int = 0, best: Best = lambda kind, images: images) -> list[Job]:
        """Remove and return the next job, with others that fit into the same pipeline call, as many as are `best`; none
        if more would be better and `coming` images are expected soon."""
        chosen = self.jobs[:1]
        for job in self.jobs[1:]:
            if images_of(chosen) + job.request.num_images <= max_images and chosen[0].request.fits_with(job.request):
                chosen.append(job)
        if chosen and not chosen[0].request.is_single:
            count, kind = images_of(chosen), chosen[0].request.kind
            if count < best(kind, min(max_images, count + coming)):
                return []
            most = best(kind, count)
            while len(chosen) > 1 and images_of(chosen) > most:
                chosen.pop()
        self.remove(chosen)
        return chosen


@dataclass
class Batch:
    """The jobs that the worker runs together, and what its ranks have said."""

    number: int
    jobs: list[Job]
    last_heard: float
    pixels: int = 0
    """Computed at once."""
    shape: Hashable = None
    """What is compiled for it."""
    longest_s: float = 0.0
    """The longest silence so far."""
    since: float = 0.0
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
        if self.must_settle_by is None and any(isinstance(outcome, SamovarError) for outcome in answer.outcomes):
            self.must_settle_by = now + SETTLE_S

    @property
    def can_go_on(self) -> bool:
        """Whether the ranks can take the next batch: all ended this one in the same way."""
        endings = [
            [type(outcome) if isinstance(outcome, SamovarError) else None for outcome in answer.outcomes]
            for answer in self.answers.values()
        ]
        if len(endings) == 1:
            return True
        shared = (*RAISED_BY_ALL_RANKS, OutOfMemoryError)
        are_shared = all(kind is None or issubclass(kind, shared) for kind in endings[0])
        return are_shared and all(ending == endings[0] for ending in endings)

    def errors(self) -> str:
        """What went wrong, and on which rank."""
        errors = {
            rank: outcome
            for rank, answer in sorted(self.answers.items())
            for outcome in answer.outcomes
            if isinstance(outcome, SamovarError)
        }
        return "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())

    def next_timeout(self, allowed_s: float) -> float:
        """When the next message must have come, if the worker may be silent for so long, or as it was in this batch."""
        timeout = self.last_heard + max(allowed_s, MARGIN * self.longest_s)
        return timeout if self.must_settle_by is None else min(timeout, self.must_settle_by)

    def timeout_error(self, allowed_s: float, now: float) -> EngineError | None:
        """The error if the worker hangs, else None."""
        if self.must_settle_by is not None and now >= self.must_settle_by:
            problem = f"Other ranks did not answer after an error ({self.errors()})."
            return WorkerLostError(f"{problem} All ranks were stopped and are being replaced: try again.")
        if now < self.next_timeout(allowed_s):
            return None
        return StepTimeoutError(
            f"The worker sent nothing for {now - self.last_heard:.3g} s, {self.step}, and was stopped. Try again; if "
            "steps do take that long, raise step_timeout_s."
        )
