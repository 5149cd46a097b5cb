"""How does a caller follow its request? By a job, which collects events from the supervisor's thread."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ..core.errors import SamovarError
from .request import Done, Event, Failed, GenerationResult, Request

if TYPE_CHECKING:
    from .supervisor import Supervisor


class Job:
    """A request on its way through the queue and a worker.

    Made in a coroutine, it is followed by `async for event in job` or `await job.result()`. Made with `deliver`, it
    passes each event to that function instead, on the supervisor's thread; the function must not block.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        request: Request,
        deliver: Callable[[Event], None] | None = None,
        *,
        id: str = "",
        priority: int = 0,
        since: float = 0.0,
        deadline: float | None = None,
    ) -> None:
        self.request, self.id, self.priority, self.since = request, id, priority, since
        self.deadline = deadline
        """When it must have started."""
        self.is_over = False
        self._supervisor = supervisor
        self._deliver = deliver
        self._events: list[Event] = []
        if deliver is None:
            self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()

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

    async def outcome(self) -> GenerationResult | SamovarError:
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
