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

from ..core.errors import EngineError, SamovarError, StepTimeoutError, WorkerLostError
from .facts import PipelineFacts
from .job import Job
from .job_queue import Running
from .messages import Cancel, Fatal, FromWorker, Ready, Run, Update
from .process import WorkerGroup
from .request import Done, GenerationResult, Progress, Request, Started
from .restarts import Restarts
from .settings import OmniDiffusionConfig
from .status import ReplicaStatus
from .worker import Usage

if TYPE_CHECKING:
    from .supervisor import Supervisor

log = logging.getLogger("samovar.engine")
USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""
MAX_PAUSE_S = 3600.0
"""The longest wait of the thread: the system cannot count centuries."""


class Replica:
    """A worker, which may be several processes that compute one image, and the thread that looks after it."""

    def __init__(self, engine: Supervisor, number: int, restarts: Restarts) -> None:
        self.number = number
        self.restarts = restarts
        self.running: dict[int, Running] = {}
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
            running=len(self.running),
            restarts=self.restarts.count,
            bytes_moved=self._status.bytes_moved + sum(usage.bytes_moved for usage in self._usage.values()),
            memory_bytes=sum(usage.memory_bytes for usage in self._usage.values()),
            worker_ids=() if self._group is None else self._group.process_ids,
            alone=next((usage.alone for usage in self._usage.values() if usage.alone), ""),
        )

    def cancel(self, job: Job) -> None:
        """Let the worker stop at its next step, if it runs this job."""
        for each in self.running.values():
            if self._group is not None and each.job is job:
                self._group.send(Cancel(each.number))

    def fail_running(self, error: SamovarError) -> None:
        running, self.running = self.running, {}
        self._engine.fail([each.job for each in running.values()], error)

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
            self._start_job(self._group, now)
        if not self._inbox and not engine.is_over:
            self._changed.wait(self._pause(time.monotonic()))

    def _pause(self, now: float) -> float | None:
        """How long there is nothing to do unless a message comes."""
        times = [self._engine.queue.next_deadline()]
        times += [each.next_timeout() for each in self.running.values()]
        if self._group is None:
            times.append(self.restarts.next_start(now))
        elif not self.is_loaded:
            times.append(self._group.since + self._engine.config.load_timeout_s)
        due = [moment for moment in times if moment is not None]
        return min(MAX_PAUSE_S, max(0.0, min(due) - now)) if due else None

    def _check_timeouts(self, now: float) -> None:
        error: EngineError | None = None
        limit = self._engine.config.load_timeout_s
        if self.running:
            errors = (each.timeout_error(now) for each in self.running.values())
            error = next((each for each in errors if each is not None), None)
        elif self._group is not None and not self.is_loaded and now - self._group.since >= limit:
            error = StepTimeoutError(
                f"The worker did not load the model within {limit:g} s, and was stopped. Is the disk or the network "
                "very slow? If loading does take that long, raise load_timeout_s."
            )
        if error is not None:
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
            self._group = group
            self.restarts.count += self.was_loaded

    def _has_room(self) -> bool:
        """Whether the worker can take another job, and no other one has fewer of them."""
        if not self.is_loaded or len(self.running) >= self._loaded[0].max_runs:
            return False
        return len(self.running) <= self._engine.fewest_running()

    def _start_job(self, group: WorkerGroup, now: float) -> None:
        job = self._engine.queue.pop()
        assert job is not None, "the caller has seen that one waits"
        limit_s = silence_limit(self._engine.config, self._engine.facts, job.request)
        each = Running(self._engine.next_number(), job, now, limit_s)
        self.running[each.number] = each
        job.tell(Started(now - job.since))
        group.send(Run(each.number, job.request, job.priority))

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
        elif (running := self.running.get(message.number)) is not None:
            for each in self.running.values():  # One whose turn it is not is silent meanwhile.
                each.hear(now)
            if isinstance(message, Update):
                self._update(running, message)
            else:
                self._usage[rank] = message.usage
                running.note(rank, message, now)
                if len(running.answers) == group.num_ranks:
                    self._finish(running, now)

    def _update(self, running: Running, message: Update) -> None:
        if isinstance(message.event, Progress):
            running.step = f"after step {message.event.step} of {message.event.num_steps}"
            self._engine.totals.note_step(message.event)
        running.job.tell(message.event)

    def _finish(self, running: Running, now: float) -> None:
        """All ranks have answered."""
        if not running.can_go_on:
            self._lose_worker(now, WorkerLostError(f"The ranks failed and were stopped: {running.errors()}"))
            return
        del self.running[running.number]
        job, outcome = running.job, running.answers[0].outcome
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


def silence_limit(config: OmniDiffusionConfig, facts: PipelineFacts, request: Request) -> float:
    """How long a worker may be silent. `step_timeout_s` is for the default size; larger outputs are taken to be as slow
    as attention, which is quadratic, but nobody waits for longer than for a model to load. New shapes may be compiled
    first."""
    longest_s = max(config.step_timeout_s, config.load_timeout_s)
    growth = num_pixels(request, facts) / num_pixels(Request(""), facts)
    return longest_s if config.compile else min(longest_s, config.step_timeout_s * max(1.0, growth) ** 2)


def num_pixels(request: Request, facts: PipelineFacts) -> int:
    """Pixels in all frames of an output."""
    params = facts.completed(request)
    return ((params.width or 0) * (params.height or 0) or USUAL_PIXELS) * facts.num_frames(params)
