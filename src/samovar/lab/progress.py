"""How long a run will take."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress:
    """What is going on, and about how long it will take. Work is counted in exact images."""

    def __init__(
        self, report: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._started, self._made, self._left = clock(), 0.0, 0.0

    def expect(self, images: float) -> None:
        """So much is left to do."""
        self._left = images

    def add(self, images: float, is_made: bool = True) -> None:
        """Work is done: made now, or known from an earlier run, which takes no time."""
        self._left -= images
        self._made += images if is_made else 0.0

    def say(self, text: str) -> None:
        """Report what is going on, and for how long."""
        if self._made <= 0 or self._left <= 0:
            self._report(text)
        else:
            left = self._left * (self._clock() - self._started) / self._made
            self._report(f"{text}, about {in_words(left)} left")


def in_words(seconds: float) -> str:
    """A duration, no more precise than it is known."""
    if seconds < 90:
        return f"{max(1, round(seconds / 5)) * 5} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
