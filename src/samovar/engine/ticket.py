"""How does a coroutine wait for its pictures? With a ticket, which the supervisor's thread tells what happens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from ..errors import SamovarError
from .events import Done, Event, Failed
from .request import GeneratedPictures, Request
from .supervisor import Supervisor


class Ticket:
    """A request that was taken in."""

    def __init__(
        self, supervisor: Supervisor, request: Request, *, priority: int = 0, deadline_s: float | None = None
    ) -> None:
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._entry = supervisor.submit(request, self._deliver, priority=priority, deadline_s=deadline_s)

    @property
    def id(self) -> str:
        return self._entry.id

    @property
    def place(self) -> int:
        """0: running or over, 1: next, and so on."""
        return self._supervisor.place(self._entry)

    def cancel(self) -> None:
        """Take the request back; it has then failed with CancelledRequestError, unless it was over already."""
        self._supervisor.cancel(self._entry)

    async def __aiter__(self) -> AsyncIterator[Event]:
        """All that has happened and will happen, to the end. Every reader sees everything."""
        seen = 0
        while True:
            while seen < len(self._events):
                event = self._events[seen]
                seen += 1
                yield event
                if isinstance(event, (Done, Failed)):
                    return
            self._news.clear()
            await self._news.wait()

    async def result(self) -> GeneratedPictures:
        """The pictures; raises the error if there are none."""
        end = await self.end()
        if isinstance(end, SamovarError):
            raise end
        return end

    async def end(self) -> GeneratedPictures | SamovarError:
        """The pictures, or the error, which is not raised. One that is raised holds the frames that it passes, and
        what these hold, and that holds it."""
        async for event in self:
            if isinstance(event, Done):
                return event.result
            if isinstance(event, Failed):
                return event.error
        raise AssertionError("a ticket ends with Done or Failed")

    def _deliver(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # The loop was closed: nobody waits any more.
            self._loop.call_soon_threadsafe(self._note, event)

    def _note(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()
