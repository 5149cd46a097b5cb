"""Who keeps one worker busy and alive? Its replica, in a thread of its own.

It takes a batch at a time, or two that overlap, from the queue that all replicas share, passes on what the worker
reports, stops it when it hangs and replaces it when it has ended. Meanwhile other replicas go on. The engine's lock
guards all state; messages from worker processes wait in an inbox for the thread's next turn.
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

from ..core.errors import EngineError, SamovarError, StepTimeoutError, WorkerLostError
from .batch_sizes import BatchSizes
from .job import Job
from .job_queue import Batch, images_of
from .messages import Cancel, Fatal, FromWorker, Ready, Run, Update
from .patience import Patience, pixels_of, shape_of
from .process import WorkerGroup
from .request import Done, GenerationResult, Progress, Started
from .restarts import Restarts
from .status import ReplicaStatus
from .worker import Usage

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("samovar.engine")
GATHER_PART, GATHER_S, MOST_VAIN = 0.05, 0.1, 3
"""How long a worker waits for clients that were served together to ask again: a part of what that batch took, and at
most this number of seconds; and after how many batches in vain it waits no more until some come back. Otherwise the
quickest would be served alone each time, and all others after it."""
MAX_PAUSE_S = 3600.0
"""The longest wait of the thread: the system cannot count centuries."""


class Replica:
    """A worker, which may be several processes that compute one image, and the thread that looks after it."""

    def __init__(self, engine: Supervisor, number: int, restarts: Restarts) -> None:
        self.number = number
        self.restarts = restarts
        self.batches: dict[int, Batch] = {}
        """What the worker has, by number: one, or with lanes two."""
        self.was_loaded = False
        """Whether a worker of this replica has loaded the model: before, its errors are raised by `start`."""
        self._engine = engine
        self._changed = engine.changed
        self._inbox: deque[tuple[WorkerGroup, int, FromWorker | None]] = deque()
        self._status = ReplicaStatus(engine.config.gpus[number])
        self._patience = Patience()
        self._sizes = BatchSizes(tries=not engine.config.compile)  # A new size may take minutes to compile.
        self._answered, self._since, self._until, self._num_vain = 0, 0.0, 0.0, 0
        """The images of the last batch, from and until when its clients are expected back, and how often in vain."""
        self._usage: dict[int, Usage] = {}
        self._group: WorkerGroup | None = None
        self._loaded: dict[int, Ready] = {}
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
        return replace(
            self._status,
            is_ready=self.is_loaded,
            running=sum(len(batch.jobs) for batch in self.batches.values()),
            restarts=self.restarts.count,
            bytes_moved=self._status.bytes_moved + sum(usage.bytes_moved for usage in self._usage.values()),
            memory_bytes=sum(usage.memory_bytes for usage in self._usage.values()),
            worker_ids=() if self._group is None else self._group.process_ids,
        )

    def cancel(self, job: Job) -> None:
        """Let the worker stop at its next step, if it runs this job."""
        for batch in self.batches.values():
            if self._group is not None and job in batch.jobs:
                self._group.send(Cancel(batch.number, batch.jobs.index(job)))

    def fail_batches(self, error: SamovarError) -> None:
        batches, self.batches = self.batches, {}
        self._engine.fail([job for batch in batches.values() for job in batch.jobs], error)

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
                self.fail_batches(self._engine.reason)
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
        if self._group is not None and self._has_free_lane() and not engine.is_closing:
            self._start_batch(self._group, now)
        if not self._inbox and not engine.is_over:
            self._changed.wait(self._pause(time.monotonic()))

    def _pause(self, now: float) -> float | None:
        """How long there is nothing to do unless a message comes."""
        times = [self._engine.queue.next_deadline()]
        times += [batch.next_timeout(self._allowed_s(batch)) for batch in self.batches.values()]
        if self._engine.queue.jobs and not self.batches and self._until > now:
            times.append(self._until)
        if self._group is None:
            times.append(self.restarts.next_start(now))
        elif not self.is_loaded:
            times.append(self._group.since + self._engine.config.load_timeout_s)
        due = [moment for moment in times if moment is not None]
        return min(MAX_PAUSE_S, max(0.0, min(due) - now)) if due else None

    def _check_timeouts(self, now: float) -> None:
        error: EngineError | None = None
        limit = self._engine.config.load_timeout_s
        if self.batches:
            errors = (batch.timeout_error(self._allowed_s(batch), now) for batch in self.batches.values())
            error = next((each for each in errors if each is not None), None)
        elif self._group is not None and not self.is_loaded and now - self._group.since >= limit:
            error = StepTimeoutError(
                f"The worker did not load the model within {limit:g} s, and was stopped. Is the disk or the network "
                "very slow? If loading does take that long, raise load_timeout_s."
            )
        if error is not None:
            self._lose_worker(now, error)

    def _allowed_s(self, batch: Batch) -> float:
        return self._patience.allowed_s(batch.pixels, self._engine.facts, self._engine.config, batch.shape)

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
            self._group = group
            self.restarts.count += self.was_loaded

    def _has_free_lane(self) -> bool:
        """Whether the worker can take another batch, and none that is idle could begin with it at once."""
        if not self.batches or not self.is_loaded:
            return self.is_loaded
        return len(self.batches) < self._loaded[0].num_lanes and not self._engine.has_idle_replica()

    def _start_batch(self, group: WorkerGroup, now: float) -> None:
        max_batch = self._loaded[0].max_batch
        # A batch that would wait for another may as well wait in the queue for more to join it.
        coming = max_batch if self.batches else self._coming(now)
        jobs = self._engine.queue.pop_batch(max_batch, coming, self._sizes.best)
        if not jobs:
            return
        work = [job.request for job in jobs], self._engine.facts, max_batch
        batch = Batch(self._engine.next_batch(), jobs, now, pixels_of(*work), shape_of(*work), since=now)
        self.batches[batch.number] = batch
        for job in jobs:
            job.tell(Started(now - job.since))
        group.send(Run(batch.number, tuple(job.request for job in jobs)))

    def _coming(self, now: float) -> int:
        """Images that clients who were just answered will ask for, if they do that at once."""
        back = images_of(job for job in self._engine.queue.jobs if job.since >= self._since)
        return max(0, self._answered - back) if now < self._until and self._num_vain < MOST_VAIN else 0

    def _expect_back(self, batch: Batch, now: float) -> None:
        """The clients of this batch may ask again at once. Did those of the last one?"""
        asked = *batch.jobs, *self._engine.queue.jobs
        back = images_of(job for job in asked if self._since <= job.since <= self._until)
        self._num_vain = 0 if 2 * back >= self._answered else self._num_vain + 1
        self._answered = images_of(batch.jobs)
        self._since, self._until = now, now + min(GATHER_S, GATHER_PART * (now - batch.since))

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
                ready = self._engine.ready = self._loaded[0]
                self.was_loaded = True
                self._patience.restart(ready.facts, is_warm=ready.warm_up_s is not None)
                self._changed.notify_all()
        elif (batch := self.batches.get(message.batch)) is not None:
            for each in self.batches.values():  # One that waits for the other's steps is silent meanwhile.
                each.hear(now)
            if isinstance(message, Update):
                self._update(batch, message)
            else:
                self._usage[rank] = message.usage
                batch.note(rank, message, now)
                if len(batch.answers) == group.num_ranks:
                    self._finish(batch, now)

    def _update(self, batch: Batch, message: Update) -> None:
        if isinstance(message.event, Progress):
            batch.step = f"after step {message.event.step} of {message.event.num_steps}"
            if message.request == 0:
                self._engine.totals.note_step(message.event)
        batch.jobs[message.request].tell(message.event)

    def _finish(self, batch: Batch, now: float) -> None:
        """All ranks have answered."""
        if not batch.can_go_on:
            self._lose_worker(now, WorkerLostError(f"The ranks failed and were stopped: {batch.errors()}"))
            return
        del self.batches[batch.number]
        outcomes = batch.answers[0].outcomes
        request, count = batch.jobs[0].request, images_of(batch.jobs)
        is_whole = count <= self._loaded[0].max_batch and all(isinstance(each, GenerationResult) for each in outcomes)
        if is_whole and not request.is_single:  # Of two that overlap, each has the worker from the end of the other.
            self._sizes.note(request.kind, count, now - max(batch.since, self._since))
        self._expect_back(batch, now)
        for job, outcome in zip(batch.jobs, outcomes, strict=True):
            if isinstance(outcome, GenerationResult):
                self.restarts.note_success()
                self._patience.note(batch.pixels, batch.longest_s, batch.shape)
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
        if self.batches:
            step = next(iter(self.batches.values())).step
            message = f"The worker ended ({how}), {step}. It is being replaced: try again."
        elif self.is_loaded:
            message = f"The worker ended ({how}) while it was idle."
        else:
            message = f"The worker ended ({how}) while it loaded the model. Is there enough memory?"
        self._lose_worker(now, WorkerLostError(message))

    def _lose_worker(self, now: float, error: SamovarError) -> None:
        """End the worker, whose batch has failed. Another one starts when it may."""
        if self._engine.config.num_replicas > 1:  # Callers may never hear of one among many.
            log.warning("replica %d (%s): %s", self.number, self._engine.config.place_of(self.number), error)
        self.fail_batches(error)
        if self.was_loaded:
            self.restarts.note_crash(now)
            self._engine.check_down(now)
        else:
            self._engine.end(error)
        self._end_group()
        self._changed.notify_all()

    def _end_group(self, wait_s: float = 0.0) -> None:
        group, self._group = self._group, None
        self._loaded = {}
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
