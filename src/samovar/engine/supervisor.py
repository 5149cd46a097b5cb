"""The queue of requests, and the replicas that serve it.

One lock guards all state, of the queue and of the replicas, each of which has a thread.
"""

from __future__ import annotations

import atexit
import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from ..compose.explain import Explanation, Feature
from ..core.errors import (
    CancelledRequestError,
    EngineDownError,
    EngineError,
    QueueTimeoutError,
    SamovarError,
    SettingError,
    ShuttingDownError,
)
from .events import Event, Failed
from .facts import PipelineFacts
from .job import Job, JobQueue
from .messages import Ready
from .replica import Replica
from .request import Request
from .restarts import Restarts
from .settings import OmniDiffusionConfig
from .status import EngineStatus


class Supervisor:
    """The queue, and the replicas that serve it. A request is served by one of them."""

    def __init__(self, config: OmniDiffusionConfig, restarts: Restarts | None = None) -> None:
        """`restarts` is how one replica's workers are replaced; each replica counts its own crashes."""
        self.config = config
        self.changed = threading.Condition()
        self.queue = JobQueue(config.max_queue)
        self.totals = EngineStatus(config.model)
        """What is counted for all replicas together."""
        self.ready: Ready | None = None
        """What a worker that has loaded said."""
        self.is_closing = False
        self.is_over = False
        restarts = restarts or Restarts()
        self._replicas = [
            Replica(self, number, restarts if number == 0 else copy.deepcopy(restarts))
            for number in range(config.num_replicas)
        ]
        self._num_jobs = 0
        self._first_error: SamovarError | None = None
        self._is_started = False

    # ------------------------------------------------------------------------------------------ for callers

    def start(self) -> None:
        """Start the workers and wait until all have loaded the model; raises the error if one cannot."""
        with self.changed:
            if self._is_started:
                raise SettingError("This engine was already started.")
            if self.is_over:
                raise ShuttingDownError("This engine was closed before it was started. Make a new one.")
            self._is_started = True
            for replica in self._replicas:
                replica.start()
            atexit.register(self.close)  # Before multiprocessing ends its processes, which would look like a crash.
            try:
                self.changed.wait_for(lambda: self.is_over or all(each.was_loaded for each in self._replicas))
            except BaseException:  # Ctrl-C while it loads.
                self.abandon()
                raise
            if self._first_error is not None:
                raise self._first_error
            if not all(each.was_loaded for each in self._replicas):
                raise ShuttingDownError("The engine was closed before the model was loaded. Make a new one.")

    def abandon(self) -> None:
        """End everything, without waiting for it."""
        with self.changed:
            self.is_closing = self.is_over = True
            self.changed.notify_all()

    @property
    def loaded(self) -> Ready:
        """What the workers that have loaded said."""
        if self.ready is None:
            raise SettingError("The engine has not been started. Start it first: await omni.start().")
        return self.ready

    @property
    def facts(self) -> PipelineFacts:
        return self.loaded.facts

    @property
    def load_seconds(self) -> float:
        return self.loaded.load_seconds

    def submit(self, request: Request, deliver: Callable[[Event], None] | None = None) -> Job:
        """Put a request into the queue; see `Job` for how to follow it."""
        request = self.facts.check(request)  # Before the lock: this may decode an image, which takes time.
        with self.changed:
            if self.is_closing or self.is_over:
                raise self._first_error or ShuttingDownError("The engine is closing and takes no more requests.")
            now = time.monotonic()
            if self._is_down(now):
                raise self._down(now)
            job = Job(self, request, self._num_jobs + 1, now, deliver)
            self.queue.add(job, self._seconds_each)
            self._num_jobs += 1
            self.changed.notify_all()
            return job

    @property
    def _seconds_each(self) -> float:
        return self.totals.request_seconds / len(self._replicas)

    def check_room(self) -> None:
        """QueueFullError if as many requests wait as may."""
        with self.changed:
            self.queue.check_room(self._seconds_each)

    def cancel(self, job: Job) -> None:
        """Let a job fail at once. A worker that runs it stops at its next step."""
        with self.changed:
            if not job.is_over:
                self.queue.take(lambda each: each is job)
                self.fail([job], CancelledRequestError("The request was cancelled."))
                for replica in self._replicas:
                    replica.cancel(job)
                self.changed.notify_all()

    def position(self, job: Job) -> int:
        with self.changed:
            return self.queue.jobs.index(job) + 1 if job in self.queue.jobs else 0

    def explain(self) -> Explanation:
        """What a worker has attached, and how many of them there are."""
        found, config = self.facts.explanation, self.config
        assert found is not None, "a worker explains what it has loaded"
        if config.num_replicas == 1:
            return found
        places = [config.place_of(number) for number in range(config.num_replicas)]
        feature = Feature("replicas", f"{len(places)}: {', '.join(places)}", "they take from one queue")
        return replace(found, features=(*found.features, feature))

    def status(self) -> EngineStatus:
        with self.changed:
            replicas = tuple(replica.status() for replica in self._replicas)
            names = ("running", "restarts", "images", "bytes_moved", "memory_bytes")
            return replace(
                self.totals,
                **{name: sum(getattr(each, name) for each in replicas) for name in names},
                is_ready=any(each.is_ready for each in replicas) and not self.is_closing,
                is_alive=self._is_started and not self.is_over and not self._is_down(time.monotonic()),
                queued=len(self.queue.jobs),
                failures=dict(self.totals.failures),
                worker_ids=tuple(process_id for each in replicas for process_id in each.worker_ids),
                replicas=replicas,
            )

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse queued jobs, let the running ones finish within `drain_s`, and end the workers."""
        with self.changed:
            self.is_closing = True
            self._fail_queued(ShuttingDownError("The engine is closing, and the request had not been started."))
            if drain_s > 0:
                self.changed.wait_for(lambda: self.is_over or not any(each.running for each in self._replicas), drain_s)
            for replica in self._replicas:
                replica.fail_running(
                    ShuttingDownError("The engine is closing, and the request did not finish in time.")
                )
            self.is_over = True
            self.changed.notify_all()
        for replica in self._replicas if self._is_started else ():
            replica.join()
        atexit.unregister(self.close)

    # ------------------------------------------------------------------------------------------ for replicas, locked

    def fewest_running(self) -> int:
        """Of all replicas that have loaded."""
        return min((len(replica.running) for replica in self._replicas if replica.is_loaded), default=0)

    def fail(self, jobs: list[Job], error: SamovarError) -> None:
        for job in jobs:
            if not job.is_over:
                code = error.code if isinstance(error, EngineError) else "bad_request"
                self.totals.failures[code] = self.totals.failures.get(code, 0) + 1
                job.end(Failed(error))

    def fail_overdue(self, now: float) -> None:
        for job in self.queue.take(lambda each: each.deadline is not None and each.deadline <= now):
            message = (
                f"The request did not start within {job.request.deadline_s:.3g} s. Allow more, or try again later."
            )
            self.fail([job], QueueTimeoutError(message))

    def check_down(self, now: float) -> None:
        """Fail what waits if no replica will serve it soon."""
        if self._is_down(now):
            self._fail_queued(self._down(now))

    def end(self, error: SamovarError | None = None) -> None:
        """The engine is over: for this reason, unless there was another before."""
        self._first_error = self._first_error or error
        self.is_over = True
        self._fail_queued(self.reason)
        self.changed.notify_all()

    @property
    def reason(self) -> SamovarError:
        """Why requests fail when the engine is over."""
        return self._first_error or ShuttingDownError("The engine was closed before the request finished.")

    # ------------------------------------------------------------------------------------------ inside

    def _fail_queued(self, error: SamovarError) -> None:
        self.fail(self.queue.take(lambda each: True), error)

    def _is_down(self, now: float) -> bool:
        """Whether no replica restarts its worker for now."""
        return all(replica.restarts.is_open(now) for replica in self._replicas)

    def _down(self, now: float) -> EngineDownError:
        next_one = min((replica.restarts for replica in self._replicas), key=lambda each: each.next_start(now))
        rest = max(1.0, next_one.next_start(now) - now)
        return EngineDownError(
            f"{next_one.max_crashes} workers ended within {next_one.window_s:g} s. The next one starts in "
            f"{rest:.0f} s. See the worker's log, and check whether the machine ran out of memory."
        )
