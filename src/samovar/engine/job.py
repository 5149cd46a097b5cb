"""Jobs: requests on their way through the queue and a worker. A caller follows its own by the events that it collects.

Nothing here knows of processes or clocks.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ..core.errors import QueueFullError, SamovarError
from .events import Done, Event, Failed, GenerationResult, Outcome
from .request import Request

if TYPE_CHECKING:
    from .supervisor import Supervisor


class Job:
    """A request, its place in the queue, and what has become of it.

    Made in a coroutine, it is followed by `async for event in job` or `await job.result()`. Made with `deliver`, it
    passes each event to that function instead, on the supervisor's thread; the function must not block.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        request: Request,
        number: int = 0,
        since: float = 0.0,
        deliver: Callable[[Event], None] | None = None,
    ) -> None:
        self.request, self.number, self.since = request, number, since
        self.deadline = None if request.deadline_s is None else since + request.deadline_s
        """When it must have started."""
        self.is_over = False
        self.limit_s = 0.0
        """How long its worker may be silent."""
        self.step = "before its first step"
        self.outcomes: dict[int, Outcome | None] = {}
        """By rank, of those that have ended it."""
        self._supervisor, self._deliver = supervisor, deliver
        self._events: list[Event] = []
        if deliver is None:
            self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

    @property
    def id(self) -> str:
        return f"request-{self.number}"

    @property
    def rank(self) -> tuple[int, int]:
        """Higher priorities are first, and among equals those that came first."""
        return -self.request.priority, self.number

    @property
    def position(self) -> int:
        """Its position in the queue: 1 is next, 0 is running or over."""
        return self._supervisor.position(self)

    @property
    def events(self) -> tuple[Event, ...]:
        """What has happened so far; nothing with `deliver`."""
        return tuple(self._events)

    def cancel(self) -> None:
        """Let the request fail with CancelledRequestError, unless it is over."""
        self._supervisor.cancel(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """All events from the first to the last. Every reader sees all of them."""
        seen = 0
        while True:
            while seen < len(self._events):
                event = self._events[seen]
                seen += 1
                yield event
                if isinstance(event, (Done, Failed)):
                    return
            self._changed.clear()
            await self._changed.wait()

    async def result(self) -> GenerationResult:
        """The images; raises the error if there are none."""
        outcome = await self.outcome()
        if isinstance(outcome, SamovarError):
            raise outcome
        return outcome

    async def outcome(self) -> Outcome:
        """The images or the error, not raised: a raised error is in a cycle with the frames it passed."""
        async for event in self:
            if isinstance(event, Done):
                return event.result
            if isinstance(event, Failed):
                return event.error
        raise AssertionError("a job ends with Done or Failed")

    def tell(self, event: Event) -> None:
        """Pass on an event, unless the job is over."""
        if self.is_over:
            return
        if self._deliver is not None:
            self._deliver(event)
            return
        with contextlib.suppress(RuntimeError):  # The loop was closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._note, event)

    def end(self, event: Done | Failed) -> None:
        """Pass on the last event."""
        self.tell(event)
        # The receiver may hold this job. Without a cycle, both and their images go at once.
        self.is_over, self._deliver = True, None

    def _note(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()


class JobQueue:
    """A bounded queue, by rank."""

    def __init__(self, max_jobs: int) -> None:
        self.jobs: list[Job] = []
        self._max_jobs = max_jobs

    def check_room(self, seconds_each: float) -> None:
        """QueueFullError if there is no room for another job."""
        count = len(self.jobs)
        if count >= self._max_jobs:
            retry_after_s = max(1.0, seconds_each * (count + 1))
            message = f"{count} requests are waiting, which is the limit. Try again in {retry_after_s:.0f} s."
            raise QueueFullError(message, retry_after_s)

    def add(self, job: Job, seconds_each: float) -> None:
        """Insert a job; QueueFullError if there is no room."""
        self.check_room(seconds_each)
        bisect.insort(self.jobs, job, key=lambda each: each.rank)

    def next_deadline(self) -> float | None:
        return min((job.deadline for job in self.jobs if job.deadline is not None), default=None)

    def take(self, is_wanted: Callable[[Job], bool]) -> list[Job]:
        """Remove and return some jobs."""
        taken = [job for job in self.jobs if is_wanted(job)]
        self.jobs = [job for job in self.jobs if job not in taken]
        return taken
