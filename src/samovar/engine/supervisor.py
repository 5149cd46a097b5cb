"""Who keeps a worker busy and alive? The supervisor, in its own thread.

It gives the worker one batch at a time, passes on what it reports, stops it when it hangs and replaces it when it has
ended. One lock guards all state; messages from worker processes wait in an inbox for the thread's next turn.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from ..errors import (
    CancelledRequestError,
    EngineDownError,
    EngineError,
    QueueTimeoutError,
    SamovarError,
    SettingError,
    ShuttingDownError,
    StepTimeoutError,
    WorkerLostError,
)
from .facts import PipelineFacts
from .job import Job
from .job_queue import Batch, JobQueue
from .messages import Cancel, Fatal, FromWorker, Ready, Run, Update
from .patience import Patience, pixels_of, shape_of
from .process import WorkerGroup
from .request import Done, Event, Failed, GenerationResult, Progress, Request, Started
from .restarts import Restarts
from .settings import OmniDiffusionConfig, is_duration
from .status import EngineStatus
from .worker import Usage

MAX_PAUSE_S = 3600.0
"""The longest wait of the thread: the system cannot count centuries."""


class Supervisor:
    """Keeps a worker alive and gives it the jobs that wait."""

    def __init__(self, config: OmniDiffusionConfig, restarts: Restarts | None = None) -> None:
        self.config = config
        self._restarts = restarts or Restarts()
        self._changed = threading.Condition()
        self._inbox: deque[tuple[WorkerGroup, int, FromWorker | None]] = deque()
        self._queue = JobQueue(config.max_queue)
        self._status = EngineStatus(config.model)
        self._patience = Patience()
        self._usage: dict[int, Usage] = {}
        self._group: WorkerGroup | None = None
        self._loaded: dict[int, Ready] = {}
        self._batch: Batch | None = None
        self._num_batches = self._num_jobs = 0
        self._first_error: SamovarError | None = None
        self._is_closing = False
        self._is_over = False
        self._ready: Ready | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------ for callers

    def start(self) -> None:
        """Start the worker and wait until its model is loaded; raises the error if it cannot be."""
        with self._changed:
            if self._thread is not None:
                raise SettingError("This engine was already started.")
            if self._is_over:
                raise ShuttingDownError("This engine was closed before it was started. Make a new one.")
            self._thread = threading.Thread(target=self._run, daemon=True, name="samovar supervisor")
            self._thread.start()
            atexit.register(self.close)  # Before multiprocessing ends its processes, which would look like a crash.
            try:
                self._changed.wait_for(lambda: self._ready is not None or self._is_over)
            except BaseException:  # Ctrl-C while it loads.
                self.abandon()
                raise
            if self._first_error is not None:
                raise self._first_error
            if self._ready is None:
                raise ShuttingDownError("The engine was closed before the model was loaded. Make a new one.")

    def abandon(self) -> None:
        """End everything, without waiting for it."""
        with self._changed:
            self._is_closing = self._is_over = True
            self._changed.notify_all()

    @property
    def facts(self) -> PipelineFacts:
        return self._loaded_once().facts

    @property
    def load_seconds(self) -> float:
        return self._loaded_once().load_seconds

    @property
    def max_batch(self) -> int:
        return self._loaded_once().max_batch

    def submit(
        self,
        request: Request,
        deliver: Callable[[Event], None] | None = None,
        *,
        priority: int = 0,
        deadline_s: float | None = None,
    ) -> Job:
        """Put a request into the queue; see `Job` for how to follow it."""
        if deadline_s is not None and not is_duration(deadline_s):
            message = f"deadline_s must be a positive number of seconds or None, not {deadline_s!r}."
            raise SettingError(message, param="deadline_s")
        self.facts.check(request)  # Before the lock: this may decode an image, which takes time.
        with self._changed:
            if self._is_closing or self._is_over:
                raise self._first_error or ShuttingDownError("The engine is closing and takes no more requests.")
            now = time.monotonic()
            if self._restarts.is_open(now):
                raise self._down(now)
            self._num_jobs += 1
            deadline = None if deadline_s is None else now + deadline_s
            name = f"request-{self._num_jobs}"
            job = Job(self, request, deliver, id=name, priority=priority, since=now, deadline=deadline)
            self._queue.add(job, self._status.request_seconds)
            self._changed.notify_all()
            return job

    def cancel(self, job: Job) -> None:
        """Let a job fail at once. A worker that runs it stops at its next step."""
        with self._changed:
            if job.is_over:
                return
            self._queue.remove([job])
            self._fail([job], CancelledRequestError("The request was cancelled."))
            if self._batch is not None and self._group is not None and job in self._batch.jobs:
                self._group.send(Cancel(self._batch.number, self._batch.jobs.index(job)))
            self._changed.notify_all()

    def position(self, job: Job) -> int:
        with self._changed:
            return self._queue.position(job)

    def status(self) -> EngineStatus:
        with self._changed:
            is_down = self._is_over or self._thread is None or self._restarts.is_open(time.monotonic())
            return replace(
                self._status,
                is_ready=self._is_loaded() and not self._is_closing,
                is_alive=not is_down,
                queued=len(self._queue.jobs),
                running=0 if self._batch is None else len(self._batch.jobs),
                restarts=self._restarts.count,
                bytes_moved=self._status.bytes_moved + sum(usage.bytes_moved for usage in self._usage.values()),
                memory_bytes=sum(usage.memory_bytes for usage in self._usage.values()),
                failures=dict(self._status.failures),
                worker_ids=() if self._group is None else self._group.process_ids,
            )

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse queued jobs, let the running ones finish within `drain_s`, and end the worker."""
        with self._changed:
            self._is_closing = True
            message = "The engine is closing, and the request had not been started."
            self._fail_queued(ShuttingDownError(message))
            if drain_s > 0:
                self._changed.wait_for(lambda: self._batch is None or self._is_over, drain_s)
            self._fail_batch(ShuttingDownError("The engine is closing, and the request did not finish in time."))
            self._is_over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------ the thread

    def _run(self) -> None:
        with self._changed:
            try:
                while not self._is_over:
                    self._turn(time.monotonic())
            except BaseException as error:  # Otherwise callers would wait forever.
                self._first_error = EngineError(
                    f"The engine failed with {type(error).__name__}: {error}. Make a new one; the log says where it "
                    "failed."
                )
                raise
            finally:
                self._is_over = True
                reason = self._first_error or ShuttingDownError("The engine was closed before the request finished.")
                self._fail_batch(reason)
                self._fail_queued(reason)
                self._changed.notify_all()
                self._end_group(1.0)
                self._changed.notify_all()

    def _turn(self, now: float) -> None:
        while self._inbox:
            self._receive(*self._inbox.popleft(), now)
        self._fail_overdue(now)
        self._check_timeouts(now)
        if self._group is None and not self._is_closing and now >= self._restarts.next_start(now):
            self._start_group(now)
        if self._batch is None and self._group is not None and self._is_loaded() and not self._is_closing:
            self._start_batch(self._group, now)
        if self._is_closing and self._ready is None:
            self._is_over = True
        if not self._inbox and not self._is_over:
            self._changed.wait(self._pause(time.monotonic()))

    def _fail_overdue(self, now: float) -> None:
        for job in self._queue.pop_overdue(now):
            waited = (job.deadline or now) - job.since
            message = f"The request did not start within {waited:.1f} s. Allow more time, or try again later."
            self._fail([job], QueueTimeoutError(message))

    def _pause(self, now: float) -> float | None:
        """How long there is nothing to do unless a message comes."""
        times = [self._queue.next_deadline()]
        times += [] if self._batch is None else [self._batch.next_timeout(self._allowed_s(self._batch))]
        if self._group is None:
            times.append(self._restarts.next_start(now))
        elif not self._is_loaded():
            times.append(self._group.since + self.config.load_timeout_s)
        due = [moment for moment in times if moment is not None]
        return min(MAX_PAUSE_S, max(0.0, min(due) - now)) if due else None

    def _check_timeouts(self, now: float) -> None:
        error: EngineError | None = None
        limit = self.config.load_timeout_s
        if self._batch is not None:
            error = self._batch.timeout_error(self._allowed_s(self._batch), now)
        elif self._group is not None and not self._is_loaded() and now - self._group.since >= limit:
            error = StepTimeoutError(
                f"The worker did not load the model within {limit:g} s, and was stopped. Is the disk or the network "
                "very slow? If loading does take that long, raise load_timeout_s."
            )
        if error is not None:
            self._lose_worker(now, error)

    def _allowed_s(self, batch: Batch) -> float:
        return self._patience.allowed_s(batch.pixels, self.facts, self.config, batch.shape)

    def _start_group(self, now: float) -> None:
        try:
            with self._unlocked():
                group = WorkerGroup(self.config, self._on_message)
        except SamovarError as error:  # A settings file has changed since it was checked.
            self._lose_worker(now, error)
        except (OSError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}"
            self._lose_worker(now, EngineError(f"No worker process could be started: {reason}. Is enough memory free?"))
        else:
            self._group = group
            self._restarts.count += self._ready is not None

    def _start_batch(self, group: WorkerGroup, now: float) -> None:
        jobs = self._queue.pop_batch(self._loaded[0].max_batch)
        if not jobs:
            return
        self._num_batches += 1
        work = [job.request for job in jobs], self.facts, self._loaded[0].max_batch
        self._batch = Batch(self._num_batches, jobs, now, pixels_of(*work), shape_of(*work))
        for job in jobs:
            job.tell(Started(now - job.since))
        group.send(Run(self._num_batches, tuple(job.request for job in jobs)))

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
            if self._is_loaded():
                self._ready = self._loaded[0]
                self._patience.restart(self._ready.facts, is_warm=self._ready.warm_up_s is not None)
                self._changed.notify_all()
        elif self._batch is not None and message.batch == self._batch.number:
            self._batch.hear(now)
            if isinstance(message, Update):
                self._update(self._batch, message)
            else:
                self._usage[rank] = message.usage
                self._batch.note(rank, message, now)
                if len(self._batch.answers) == group.num_ranks:
                    self._finish(self._batch, now)

    def _update(self, batch: Batch, message: Update) -> None:
        if isinstance(message.event, Progress):
            batch.step = f"after step {message.event.step} of {message.event.num_steps}"
            if message.request == 0:
                self._status.note_step(message.event)
        batch.jobs[message.request].tell(message.event)

    def _finish(self, batch: Batch, now: float) -> None:
        """All ranks have answered."""
        if not batch.can_go_on:
            self._lose_worker(now, WorkerLostError(f"The ranks failed and were stopped: {batch.errors()}"))
            return
        self._batch = None
        for job, outcome in zip(batch.jobs, batch.answers[0].outcomes, strict=True):
            if isinstance(outcome, GenerationResult):
                self._restarts.note_success()
                self._patience.note(batch.pixels, batch.longest_s, batch.shape)
                self._status.note_request(outcome.seconds)
                if not job.is_over:
                    self._status.images += len(outcome.outputs)
                    job.end(Done(outcome))
            elif outcome is not None:
                self._fail([job], outcome)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ failures

    def _worker_ended(self, now: float, group: WorkerGroup) -> None:
        with self._unlocked():
            how = group.describe_end()
        if self._batch is not None:
            message = f"The worker ended ({how}), {self._batch.step}. It is being replaced: try again."
        elif self._is_loaded():
            message = f"The worker ended ({how}) while it was idle."
        else:
            message = f"The worker ended ({how}) while it loaded the model. Is there enough memory?"
        self._lose_worker(now, WorkerLostError(message))

    def _lose_worker(self, now: float, error: SamovarError) -> None:
        """End the worker, whose batch has failed. Another one starts when it may."""
        self._fail_batch(error)
        if self._ready is None:  # It was the first one, so `start` raises the error.
            self._first_error = error
            self._is_over = True
        else:
            self._restarts.note_crash(now)
        if self._restarts.is_open(now):
            self._fail_queued(self._down(now))
        self._end_group()
        self._changed.notify_all()

    def _fail_batch(self, error: SamovarError) -> None:
        batch, self._batch = self._batch, None
        self._fail([] if batch is None else batch.jobs, error)

    def _fail_queued(self, error: SamovarError) -> None:
        jobs, self._queue.jobs = self._queue.jobs, []
        self._fail(jobs, error)

    def _fail(self, jobs: list[Job], error: SamovarError) -> None:
        for job in jobs:
            if not job.is_over:
                code = error.code if isinstance(error, EngineError) else "bad_request"
                self._status.failures[code] = self._status.failures.get(code, 0) + 1
                job.end(Failed(error))

    def _down(self, now: float) -> EngineDownError:
        rest = max(1.0, self._restarts.next_start(now) - now)
        return EngineDownError(
            f"{self._restarts.max_crashes} workers ended within {self._restarts.window_s:g} s. The next one starts in "
            f"{rest:.0f} s. See the worker's log, and check whether the machine ran out of memory."
        )

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
        """Release the lock for something slow in the supervisor's thread, so that callers do not wait for it."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _is_loaded(self) -> bool:
        return self._group is not None and len(self._loaded) == self._group.num_ranks

    def _loaded_once(self) -> Ready:
        if self._ready is None:
            raise SettingError("The engine has not been started. Start it first: await omni.start().")
        return self._ready
