"""Who keeps a worker busy and alive? The supervisor: a thread beside those who ask for pictures.

It gives the worker one job at a time, passes on what it says, ends it when it hangs, puts another in its place when
it has ended, and tells everyone concerned. All state is behind one lock; what comes from worker processes lies in an
inbox until the thread's next turn.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..errors import (
    CancelledRequestError,
    EngineDownError,
    EngineError,
    QueueTimeoutError,
    SamovarError,
    SettingError,
    ShuttingDownError,
    WorkerLostError,
)
from .events import Done, Event, Failed, Progress, Started
from .facts import PipelineFacts
from .job import Job
from .messages import Answer, Drop, FromWorker, Make, Ready, Refused, Told
from .patience import lost_job, lost_loading, patience_with_job
from .process import WorkerGroup
from .request import GeneratedPictures, Request
from .restarts import Restarts
from .settings import OmniDiffusionConfig, is_duration
from .status import Counters, EngineStatus
from .waiting import Entry, Waiting

LONGEST_PAUSE_S = 3600.0
"""The thread looks at the clock at least so often: a wait of centuries is more than the system can count."""


class _Heard(NamedTuple):
    group: WorkerGroup
    rank: int
    message: FromWorker | None


class Supervisor:
    """A worker, kept alive, and those who wait for it."""

    def __init__(self, config: OmniDiffusionConfig, restarts: Restarts | None = None) -> None:
        self.config = config
        self._restarts = restarts or Restarts()
        self._changed = threading.Condition()
        self._inbox: deque[_Heard] = deque()
        self._waiting = Waiting(config.max_queue)
        self._counters = Counters()
        self._group: WorkerGroup | None = None
        self._loaded: dict[int, Ready] = {}
        self._job: Job | None = None
        self._num_jobs = 0
        self._num_entries = 0
        self._first_error: SamovarError | None = None
        self._is_closing = False
        self._is_over = False
        self._ready: Ready | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------------------------------ for those outside

    def start(self) -> None:
        """Start the worker and wait until its model is loaded; if it cannot be, the error that says why."""
        with self._changed:
            if self._thread is not None:
                raise SettingError("This engine was started already.")
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
        """Nobody waits for the start any more: end all, without waiting for it."""
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
        """How many pictures a call can make: one where a cache decides."""
        return self._loaded_once().max_batch

    def submit(
        self, request: Request, deliver: Callable[[Event], None], *, priority: int = 0, deadline_s: float | None = None
    ) -> Entry:
        """Put a request into the queue; `deliver` is called from another thread with each event."""
        if deadline_s is not None and not is_duration(deadline_s):
            raise SettingError(f"deadline_s must be a number of seconds above 0, or None to wait, not {deadline_s!r}.")
        self.facts.check(request)  # Before the lock: this reads a picture, which takes time.
        with self._changed:
            if self._is_closing or self._is_over:
                raise self._first_error or ShuttingDownError("The engine is closing and takes no more requests.")
            now = time.monotonic()
            if self._restarts.is_open(now):
                raise self._down(now)
            self._num_entries += 1
            deadline = None if deadline_s is None else now + deadline_s
            entry = Entry(request, deliver, f"request-{self._num_entries}", priority, now, deadline)
            self._waiting.add(entry, self._counters.request_seconds)
            self._changed.notify_all()
            return entry

    def cancel(self, entry: Entry) -> None:
        """Take a request back. It has failed at once; a worker that is busy with it stops at its next step."""
        with self._changed:
            if entry.is_over:
                return
            self._waiting.remove(entry)
            self._fail(entry, CancelledRequestError("The request was taken back."))
            if self._job is not None and self._group is not None and entry in self._job.entries:
                self._group.send(Drop(self._job.number, self._job.entries.index(entry)))
            self._changed.notify_all()

    def place(self, entry: Entry) -> int:
        """0: running or over, 1: next."""
        with self._changed:
            return self._waiting.place(entry)

    def status(self) -> EngineStatus:
        with self._changed:
            is_down = self._is_over or self._thread is None or self._restarts.is_open(time.monotonic())
            return self._counters.status(
                model=self.config.model,
                is_ready=self._is_loaded() and not self._is_closing,
                is_alive=not is_down,
                queued=len(self._waiting.entries),
                running=0 if self._job is None else len(self._job.entries),
                restarts=self._restarts.count,
                worker_ids=() if self._group is None else self._group.process_ids,
            )

    def close(self, drain_s: float = 0.0) -> None:
        """Refuse what waits, let what runs finish within `drain_s`, and end the worker. More than once is no error."""
        with self._changed:
            self._is_closing = True
            self._refuse_waiting(ShuttingDownError("The engine is closing, and the request had not been started."))
            if drain_s > 0:
                self._changed.wait_for(lambda: self._job is None or self._is_over, drain_s)
            if self._job is not None:
                self._give_up(ShuttingDownError("The engine is closing, and the request was not finished in time."))
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
            except BaseException as error:  # The edge of the thread: without it nobody would ever be answered.
                self._first_error = EngineError(
                    f"The engine failed and is over, for {type(error).__name__}: {error}. Start another one; the log "
                    "says where it failed."
                )
                raise
            finally:
                self._is_over = True
                why = self._first_error or ShuttingDownError("The engine was closed, and the request was not finished.")
                self._give_up(why)
                self._refuse_waiting(why)
                self._changed.notify_all()
                self._end_group(1.0)
                self._changed.notify_all()

    def _turn(self, now: float) -> None:
        while self._inbox:
            self._take(self._inbox.popleft(), now)
        self._expire(now)
        self._watch(now)
        self._revive(now)
        self._dispatch(now)
        if self._is_closing and self._ready is None:
            self._is_over = True
        if not self._inbox and not self._is_over:
            self._changed.wait(self._pause(time.monotonic()))

    def _pause(self, now: float) -> float | None:
        """How long nothing needs to be done, if nobody says anything."""
        times = [self._waiting.next_deadline()]
        if self._job is not None:
            times.append(patience_with_job(self._job, self.config))
        if self._group is None:
            times.append(self._restarts.next_start(now))
        elif not self._is_loaded():
            times.append(self._group.since + self.config.load_timeout_s)
        due = [moment for moment in times if moment is not None]
        return min(LONGEST_PAUSE_S, max(0.0, min(due) - now)) if due else None

    def _expire(self, now: float) -> None:
        for entry in self._waiting.overdue(now):
            waited = f"The request was to be started within {(entry.deadline or now) - entry.since:.1f} s, and was not."
            self._fail(entry, QueueTimeoutError(f"{waited} Allow it more time, or ask again when fewer wait."))

    def _watch(self, now: float) -> None:
        error = None
        if self._job is not None:
            error = lost_job(self._job, self.config, now)
        elif self._group is not None and not self._is_loaded():
            error = lost_loading(self._group.since, self.config, now)
        if error is not None:
            self._lose(now, error)

    def _revive(self, now: float) -> None:
        if self._group is not None or self._is_closing or now < self._restarts.next_start(now):
            return
        try:
            with self._unlocked():
                group = WorkerGroup(self.config, self._hear)
        except SamovarError as error:  # A file of the settings has changed since they were checked.
            self._lose(now, error)
        except (OSError, RuntimeError) as error:
            why = f"{type(error).__name__}: {error}"
            self._lose(now, EngineError(f"No worker process could be started, for {why}. Is there memory for one?"))
        else:
            self._group = group
            self._restarts.count += self._ready is not None

    def _dispatch(self, now: float) -> None:
        if self._job is not None or self._group is None or not self._is_loaded() or self._is_closing:
            return
        entries = self._waiting.take(self._loaded[0].max_batch)
        if not entries:
            return
        self._num_jobs += 1
        self._job = Job(self._num_jobs, entries, now)
        for entry in entries:
            entry.tell(Started(now - entry.since))
        self._group.send(Make(self._num_jobs, tuple(entry.request for entry in entries)))

    # ------------------------------------------------------------------------------------------ what workers say

    def _hear(self, group: WorkerGroup, rank: int, message: FromWorker | None) -> None:
        with self._changed:
            self._inbox.append(_Heard(group, rank, message))
            self._changed.notify_all()

    def _take(self, heard: _Heard, now: float) -> None:
        if heard.group is not self._group:
            return  # The last words of one that was ended.
        message = heard.message
        if message is None:
            self._lost(now, heard.group)
        elif isinstance(message, Refused):
            self._lose(now, message.error)
        elif isinstance(message, Ready):
            self._loaded[heard.rank] = message
            self._counters.note_usage(heard.rank, message.usage)
            if self._is_loaded():
                self._ready = self._loaded[0]
                self._changed.notify_all()
        elif self._job is not None and message.job == self._job.number:
            self._job.last_heard = now
            if isinstance(message, Told):
                self._told(self._job, message)
            else:
                self._counters.note_usage(heard.rank, message.usage)
                self._answered(self._job, heard.rank, message, now)

    def _told(self, job: Job, message: Told) -> None:
        if isinstance(message.event, Progress):
            job.step = f"after step {message.event.step} of {message.event.num_steps}"
            if message.request == 0:
                self._counters.note_step(message.event)
        job.entries[message.request].tell(message.event)

    def _answered(self, job: Job, rank: int, answer: Answer, now: float) -> None:
        group = self._group
        assert group is not None
        job.note(rank, answer, now)
        if len(job.answers) < group.num_ranks:
            return
        if not job.can_go_on:
            self._lose(now, WorkerLostError(f"The ranks failed, and were ended: {job.errors()}"))
            return
        self._job = None
        if any(isinstance(outcome, GeneratedPictures) for outcome in job.answers[0].outcomes):
            self._restarts.note_success()
        for entry, outcome in zip(job.entries, job.answers[0].outcomes, strict=True):
            if isinstance(outcome, GeneratedPictures):
                self._counters.note_request(outcome.seconds)
                if not entry.is_over:
                    self._counters.pictures += len(outcome.images)
                    entry.end(Done(outcome))
            elif outcome is not None:
                self._fail(entry, outcome)
        self._changed.notify_all()

    # ------------------------------------------------------------------------------------------ when it goes wrong

    def _lost(self, now: float, group: WorkerGroup) -> None:
        with self._unlocked():
            how = group.describe_end()
        if self._job is not None:
            ended = f"The worker ended ({how}), {self._job.step}"
            self._lose(now, WorkerLostError(f"{ended}. Another one takes its place: ask again."))
        else:
            doing = "while it had nothing to do" if self._is_loaded() else "while it loaded the model. Is there memory?"
            self._lose(now, WorkerLostError(f"The worker ended ({how}) {doing}"))

    def _lose(self, now: float, error: SamovarError) -> None:
        """End the worker; its job has failed with this error. Another one is started when it may be."""
        self._give_up(error)
        if self._ready is None:  # It was the first one: who starts the engine is to know.
            self._first_error = error
            self._is_over = True
        else:
            self._restarts.note_crash(now)
        if self._restarts.is_open(now):
            self._refuse_waiting(self._down(now))
        self._end_group()
        self._changed.notify_all()

    def _give_up(self, error: SamovarError) -> None:
        job, self._job = self._job, None
        for entry in [] if job is None else job.entries:
            self._fail(entry, error)

    def _refuse_waiting(self, error: SamovarError) -> None:
        for entry in self._waiting.clear():
            self._fail(entry, error)

    def _fail(self, entry: Entry, error: SamovarError) -> None:
        if not entry.is_over:
            self._counters.failures[error.code if isinstance(error, EngineError) else "bad_request"] += 1
            entry.end(Failed(error))

    def _down(self, now: float) -> EngineDownError:
        rest = max(1.0, self._restarts.next_start(now) - now)
        return EngineDownError(
            f"{self._restarts.most} workers ended within {self._restarts.window_s:g} s, so none is started for another "
            f"{rest:.0f} s. The log of the worker, or its memory, may say why."
        )

    def _end_group(self, wait_s: float = 0.0) -> None:
        group, self._group = self._group, None
        self._loaded = {}
        self._counters.note_end_of_worker()
        if group is not None:
            with self._unlocked():
                group.end(wait_s)

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """For what takes time, in the supervisor's own thread: nobody who asks anything is to wait for it."""
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
