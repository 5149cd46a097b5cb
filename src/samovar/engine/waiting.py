"""Who is next? The requests that wait: how many may, in which order they are served, which go together, and how long
each may wait. Nothing here knows of threads, processes or clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import QueueFullError
from .events import Done, Event, Failed
from .request import Request


@dataclass(eq=False)
class Entry:
    """A request on its way."""

    request: Request
    deliver: Callable[[Event], None]
    """Whom to tell what happens; must not wait for anything."""
    id: str = ""
    priority: int = 0
    """Higher ones go first; among equals, whoever came first."""
    since: float = 0.0
    deadline: float | None = None
    """When it must have been started."""
    is_over: bool = False

    def tell(self, event: Event) -> None:
        """Pass an event on, unless it is all over already."""
        if not self.is_over:
            self.deliver(event)

    def end(self, event: Done | Failed) -> None:
        """Tell the last event; nothing is told any more after that."""
        self.tell(event)
        # Who is told knows this entry, as a rule: the two would hold each other, and the pictures with them, until the
        # collector finds them, which may be hundreds of requests later.
        self.is_over, self.deliver = True, _tell_nobody


@dataclass
class Waiting:
    """A queue with an end."""

    most: int
    entries: list[Entry] = field(default_factory=list)
    """In the order in which they are served."""

    def add(self, entry: Entry, seconds_each: float) -> None:
        """Put an entry in its place; QueueFullError if there is none."""
        if len(self.entries) >= self.most:
            retry_after_s = max(1.0, seconds_each * (len(self.entries) + 1))
            raise QueueFullError(
                f"{len(self.entries)} requests are waiting, and no more may. Ask again in {retry_after_s:.0f} s.",
                retry_after_s,
            )
        place = next((i for i, other in enumerate(self.entries) if other.priority < entry.priority), len(self.entries))
        self.entries.insert(place, entry)

    def remove(self, entry: Entry) -> bool:
        """Take an entry out; whether it was there."""
        if entry not in self.entries:
            return False
        self.entries.remove(entry)
        return True

    def place(self, entry: Entry) -> int:
        """1 is next; 0 for one that does not wait."""
        return self.entries.index(entry) + 1 if entry in self.entries else 0

    def overdue(self, now: float) -> list[Entry]:
        """Take out those that have waited too long."""
        late = [entry for entry in self.entries if entry.deadline is not None and entry.deadline <= now]
        self.entries = [entry for entry in self.entries if entry not in late]
        return late

    def next_deadline(self) -> float | None:
        return min((entry.deadline for entry in self.entries if entry.deadline is not None), default=None)

    def take(self, most_pictures: int) -> list[Entry]:
        """Take out the next one, with others that can be made in the same call."""
        if not self.entries:
            return []
        first = self.entries[0]
        chosen, pictures = [first], first.request.num_pictures
        for entry in self.entries[1:]:
            if pictures + entry.request.num_pictures <= most_pictures and first.request.fits_with(entry.request):
                chosen.append(entry)
                pictures += entry.request.num_pictures
        self.entries = [entry for entry in self.entries if entry not in chosen]
        return chosen

    def clear(self) -> list[Entry]:
        """Take out all."""
        entries, self.entries = self.entries, []
        return entries


def _tell_nobody(event: Event) -> None:
    """Whom an entry tells that is over."""
