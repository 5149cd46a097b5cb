"""Owns one worker: gives it jobs, watches it, and replaces it.

A replica has a thread of its own. It takes as many jobs as its worker can have at once from the queue that all replicas
share, passes on what the worker reports, stops it when it hangs and replaces it when it has ended. Meanwhile other
replicas go on. The engine's lock guards all state; messages from worker processes wait in an inbox for the thread's
next turn.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from ..core.errors import EngineError, OutOfMemoryError, SamovarError, StepTimeoutError, WorkerLostError
from .events import Done, GenerationResult, Progress, Started
from .facts import PipelineFacts
from .job import Job
from .messages import Cancel, Fatal, Finished, FromWorker, Ready, Run, Update
from .process import WorkerGroup
from .request import OmniDiffusionSamplingParams, Request
from .restarts import Restarts
from .settings import OmniDiffusionConfig
from .status import ReplicaStatus
from .worker import RAISED_BY_ALL_RANKS, Usage

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("samovar.engine")
USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""
MAX_PAUSE_S = 3600.0
"""The longest wait of the thread: the system cannot count centuries."""
MAX_SILENCES = 10
"""How many times longer than the longest silence so far one may be."""
SETTLE_S = 5.0
"""How long the other ranks have to answer after one has failed. They may be waiting for it forever."""


class Replica:
    """A worker, which may be several processes that compute one image, and the thread that looks after it."""

    def __init__(self, engine: Supervisor, number: int, restarts: Restarts) -> None:
        self.number = number
        self.restarts = restarts
        self.running: dict[int, Job] = {}
        """What the worker has, by number."""
        self.was_loaded = False
        """Whether a worker of this replica has loaded the model: before, its errors are raised by `start`."""
        self._engine = engine
        self._changed = engine.changed
        self._inbox: deque[tuple[WorkerGroup, int, FromWorker | None]] = deque()
        self._status = ReplicaStatus(engine.config.gpus[number])
        self._usage: dict[int, Usage] = {}
        self._group: WorkerGroup | None = None
        self._loaded: dict[int, Ready] = {}
        self._last_heard = self._longest_s = 0.0
        """When the worker last said something, and the longest silence while it had something to do."""
        self._settle_by: float | None = None
        """When the other ranks must have answered, after one has failed."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"samovar replica {number}")

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the worker, once the engine is over."""
        self._thread.join()

    @property
    def is_loaded(self) -> bool:
        """Whether all ranks of the worker have loaded the model."""
        return self._group is not None and len(self._loaded) == self._group.num_ranks

    def status(self) -> ReplicaStatus:
        usage = self._usage.values()
        return replace(
            self._status,
            is_ready=self.is_loaded,
            running=len(self.running),
            restarts=self.restarts.count,
            bytes_moved=self._status.bytes_moved + sum(each.bytes_moved for each in usage),
            memory_bytes=sum(each.memory_bytes for each in usage),
            worker_ids=() if self._group is None else self._group.process_ids,
            alone=next((each.alone for each in usage if each.alone), ""),
        )

    def cancel(self, job: Job) -> None:
        """Let the worker stop at its next step, if it runs this job."""
        if self._group is not None and job.number in self.running:
            self._group.send(Cancel(job.number))

    def fail_running(self, error: SamovarError) -> None:
        running, self.running = self.running, {}
        self._engine.fail(list(running.values()), error)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        with self._changed:
            try:
                while not self._engine.is_over:
                    self._turn(time.monotonic())
            except BaseException as error:  # Otherwise callers would wait forever.
                message = f"The engine failed with {type(error).__name__}: {error}. Make a new one; the log says where."
                self._engine.end(EngineError(message))
                raise
            finally:
                self._engine.end()
                self.fail_running(self._engine.reason)
                self._end_group(1.0)
                self._changed.notify_all()

    def _turn(self, now: float) -> None:
        engine = self._engine
        while self._inbox:
            self._receive(*self._inbox.popleft(), now)
        engine.fail_overdue(now)
        self._check_timeouts(now)
        if self._group is None and not engine.is_closing and now >= self.restarts.next_start(now):
            self._start_group(now)
        while self._group is not None and self._has_room() and not engine.is_closing and engine.queue.jobs:
            self._start_job(self._group, engine.queue.jobs.pop(0), now)
        if not self._inbox and not engine.is_over:
            self._changed.wait(self._pause(time.monotonic()))

    def _pause(self, now: float) -> float | None:
        """How long there is nothing to do unless a message comes."""
        times = [self._engine.queue.next_deadline(), self._timeout()]
        if self._group is None:
            times.append(self.restarts.next_start(now))
        due = [moment for moment in times if moment is not None]
        return min(MAX_PAUSE_S, max(0.0, min(due) - now)) if due else None

    def _timeout(self) -> float | None:
        """When the next message must have come."""
        if self.running:
            limit_s = max(MAX_SILENCES * self._longest_s, *(job.limit_s for job in self.running.values()))
            timeout = self._last_heard + limit_s
            return timeout if self._settle_by is None else min(timeout, self._settle_by)
        is_loading = self._group is not None and not self.is_loaded
        return self._last_heard + self._engine.config.load_timeout_s if is_loading else None

    def _check_timeouts(self, now: float) -> None:
        timeout = self._timeout()
        if timeout is None or now < timeout:
            return
        first = next(iter(self.running.values()), None)
        error: SamovarError
        if first is None:
            error = StepTimeoutError(
                f"The worker did not load the model within {self._engine.config.load_timeout_s:g} s, and was stopped. "
                "Is the disk or the network very slow? If loading does take that long, raise load_timeout_s."
            )
        elif self._settle_by is not None and now >= self._settle_by:
            error = WorkerLostError(
                f"Other ranks did not answer after an error ({_errors(first)}). All ranks were stopped and are being "
                "replaced: try again."
            )
        else:
            error = StepTimeoutError(
                f"The worker sent nothing for {now - self._last_heard:.3g} s, {first.step}, and was stopped. Try "
                "again; if steps do take that long, raise step_timeout_s."
            )
        self._lose_worker(now, error)

    def _start_group(self, now: float) -> None:
        try:
            with self._unlocked():
                group = WorkerGroup(self._engine.config, self._on_message, self.number)
        except SamovarError as error:  # A settings file has changed since it was checked.
            self._lose_worker(now, error)
        except (OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            self._lose_worker(now, EngineError(f"No worker process could be started: {reason}. Is enough memory free?"))
        else:
            self._group, self._last_heard = group, time.monotonic()
            self.restarts.count += self.was_loaded

    def _has_room(self) -> bool:
        """Whether the worker can take another job, and no other one has fewer of them."""
        if not self.is_loaded or len(self.running) >= self._loaded[0].max_runs:
            return False
        return len(self.running) <= self._engine.fewest_running()

    def _start_job(self, group: WorkerGroup, job: Job, now: float) -> None:
        if not self.running:
            self._last_heard, self._longest_s = now, 0.0
        self.running[job.number] = job
        job.limit_s = silence_limit(self._engine.config, self._engine.facts, job.request)
        job.tell(Started(now - job.since))
        self._changed.notify_all()  # Others may have the fewest now.
        left_s = None if job.deadline is None else max(1e-3, job.deadline - now)
        # What it starts from is among its arguments.
        group.send(Run(job.number, replace(job.request, image=None, inputs={}, deadline_s=left_s)))

    # ------------------------------------------------------------------------------------------ messages

    def _on_message(self, group: WorkerGroup, rank: int, message: FromWorker | None) -> None:
        with self._changed:
            self._inbox.append((group, rank, message))
            self._changed.notify_all()

    def _receive(self, group: WorkerGroup, rank: int, message: FromWorker | None, now: float) -> None:
        if group is not self._group:
            return  # From a group that was stopped.
        if message is None:
            self._worker_ended(now, group)
        elif isinstance(message, Fatal):
            self._lose_worker(now, message.error)
        elif isinstance(message, Ready):
            self._loaded[rank] = message
            self._usage[rank] = message.usage
            if self.is_loaded:
                self._engine.ready = self._loaded[0]
                self.was_loaded = True
                self._changed.notify_all()
        elif (job := self.running.get(message.number)) is not None:
            self._longest_s, self._last_heard = max(self._longest_s, now - self._last_heard), now
            if isinstance(message, Update):
                if isinstance(message.event, Progress):
                    job.step = f"after step {message.event.step} of {message.event.num_steps}"
                    self._engine.totals.note_step(message.event)
                job.tell(message.event)
            else:
                self._note_end(job, rank, message, group, now)

    def _note_end(self, job: Job, rank: int, message: Finished, group: WorkerGroup, now: float) -> None:
        """A rank has ended a job."""
        self._usage[rank] = message.usage
        job.outcomes[rank] = message.outcome
        if isinstance(message.outcome, SamovarError) and self._settle_by is None:
            self._settle_by = now + SETTLE_S
        if len(job.outcomes) == group.num_ranks:
            self._settle_by = None
            self._finish(job, now)

    def _finish(self, job: Job, now: float) -> None:
        """All ranks have answered."""
        if not can_go_on(job):
            self._lose_worker(now, WorkerLostError(f"The ranks failed and were stopped: {_errors(job)}"))
            return
        del self.running[job.number]
        outcome = job.outcomes[0]
        if isinstance(outcome, GenerationResult):
            self.restarts.note_success()
            self._engine.totals.note_request(outcome.seconds)
            if not job.is_over:
                self._status.images += len(outcome.outputs)
                job.end(Done(outcome))
        elif outcome is not None:
            self._engine.fail([job], outcome)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ failures

    def _worker_ended(self, now: float, group: WorkerGroup) -> None:
        with self._unlocked():
            how = group.describe_end()
        if self.running:
            step = next(iter(self.running.values())).step
            message = f"The worker ended ({how}), {step}. It is being replaced: try again."
        elif self.is_loaded:
            message = f"The worker ended ({how}) while it was idle."
        else:
            message = f"The worker ended ({how}) while it loaded the model. Is there enough memory?"
        self._lose_worker(now, WorkerLostError(message))

    def _lose_worker(self, now: float, error: SamovarError) -> None:
        """End the worker, whose jobs have failed. Another one starts when it may."""
        if self._engine.config.num_replicas > 1:  # Callers may never hear of one among many.
            log.warning("replica %d (%s): %s", self.number, self._engine.config.place_of(self.number), error)
        self.fail_running(error)
        if self.was_loaded:
            self.restarts.note_crash(now)
            self._engine.check_down(now)
        else:
            self._engine.end(error)
        self._end_group()
        self._changed.notify_all()

    def _end_group(self, wait_s: float = 0.0) -> None:
        group, self._group = self._group, None
        self._loaded, self._settle_by = {}, None
        self._status.bytes_moved += sum(usage.bytes_moved for usage in self._usage.values())
        self._usage = {}
        if group is not None:
            with self._unlocked():
                group.end(wait_s)

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Release the lock for something slow in this thread, so that nobody else waits for it."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()


def can_go_on(job: Job) -> bool:
    """Whether the ranks can take the next job: all ended this one in the same way."""
    kinds = {type(outcome) if isinstance(outcome, SamovarError) else None for outcome in job.outcomes.values()}
    if len(job.outcomes) == 1 or kinds == {None}:
        return True
    shared = (*RAISED_BY_ALL_RANKS, OutOfMemoryError)
    return len(kinds) == 1 and all(kind is not None and issubclass(kind, shared) for kind in kinds)


def _errors(job: Job) -> str:
    """What went wrong, and on which rank."""
    outcomes = sorted(job.outcomes.items())
    return "; ".join(f"rank {rank}: {each}" for rank, each in outcomes if isinstance(each, SamovarError))


def silence_limit(config: OmniDiffusionConfig, facts: PipelineFacts, request: Request) -> float:
    """How long a worker may be silent. `step_timeout_s` is for the default size; larger outputs are taken to be as slow
    as attention, which is quadratic, but nobody waits for longer than for a model to load. New shapes may be compiled
    first."""
    longest_s = max(config.step_timeout_s, config.load_timeout_s)
    growth = _num_pixels(request.params, facts) / _num_pixels(facts.defaults, facts)
    return longest_s if config.compile else min(longest_s, config.step_timeout_s * max(1.0, growth) ** 2)


def _num_pixels(params: OmniDiffusionSamplingParams, facts: PipelineFacts) -> int:
    """Pixels in all frames of an output."""
    return ((params.width or 0) * (params.height or 0) or USUAL_PIXELS) * facts.num_frames(params)
