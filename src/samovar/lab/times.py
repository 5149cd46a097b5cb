"""How long does an image take, and how long until all are made? So that noise misleads nobody.

Images are timed alone, after a first one that does not count, and the median counts. An exact image is timed right
before and right after each method: a machine that slows down slows both. What the counts of computed forwards cannot
explain is no speed-up.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from .image_runner import Batch, Task

_MARGIN = 1.1
"""A speed-up may exceed what the counts explain by this factor: times are never the same twice."""
UNEXPLAINED = "?"
"""Marks a speed-up that the counts do not explain."""

Times = Mapping[str, list[float]]
"""Of single images, in order: seconds and forwards; and the seconds of exact ones beside them."""


class Speed(NamedTuple):
    """How fast a method is."""

    seconds: float
    """The median of images made alone."""
    speedup: float
    explained: float
    """How many times fewer forwards these images took: no speed-up is higher."""


def time_alone(make: Callable[[Sequence[Task]], Batch], tasks: Sequence[Task], count: int) -> dict[str, list[float]]:
    """The times of this many images, each made alone; one that does not count comes first."""
    make(tasks[:1])
    made = [make([task]) for task in itertools.islice(itertools.cycle(tasks), count)]
    return {"seconds": [one.seconds for one in made], "forwards": [one.forwards for one in made]}


def speed_of(times: Times, exact: Times) -> Speed:
    """A method's speed. Beside it stand the exact images before and after it, and the middle one of those that were
    timed on their own: the median of the three bears one that was disturbed."""
    seconds, usual = median(times["seconds"]), median(exact["seconds"])
    beside = median([*times["exact"], usual])
    return Speed(seconds, beside / seconds, median(exact["forwards"]) / fmean(times["forwards"]))


def shown(speedup: float | None, explained: float | None) -> str:
    """A speed-up for a table. One that the counts do not explain is marked."""
    if speedup is None:
        return "-"
    return f"{speedup:.2f}x{UNEXPLAINED if is_noise(speedup, explained) else ''}"


def is_noise(speedup: float | None, explained: float | None) -> bool:
    """Whether a speed-up is more than the counts explain."""
    return speedup is not None and explained is not None and speedup > _MARGIN * explained


def footnote(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What marks in a table mean, if there are any."""
    marked = [row for row in rows if is_noise(row.get("speedup"), row.get("explained"))]
    return [
        f"{UNEXPLAINED} {row['method']}: {row['explained']:.2f}x at most is what its computed steps explain. Something "
        "else was running; time it again, with more images (--timed)."
        for row in marked
    ]


class Progress:
    """What is going on, and about how long it will take. Work is counted in exact images."""

    def __init__(
        self, report: Callable[[str], None] = lambda text: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report, self._clock = report, clock
        self._started = clock()
        self._stages: dict[str, float] = {}
        self._made = 0.0
        self._in_stage = 0.0

    def expect(self, **stages: float) -> None:
        """The work of each stage, in order; the first begins."""
        self._stages, self._in_stage = dict(stages), 0.0

    def begin(self, stage: str) -> None:
        """The stages before this one are over, however much of them was expected."""
        while self._stages and next(iter(self._stages)) != stage:
            del self._stages[next(iter(self._stages))]
        self._in_stage = 0.0

    def add(self, images: float, is_made: bool = True) -> None:
        """Work is done: made now, or known from an earlier run, which takes no time."""
        self._in_stage += images
        self._made += images if is_made else 0.0

    def say(self, text: str) -> None:
        left = self.left()
        self._report(text if left is None else f"{text}, about {in_words(left)} left")

    def left(self) -> float | None:
        """Seconds until all is done; None while nothing is known."""
        if not self._stages or self._made <= 0:
            return None
        now, *later = self._stages.values()
        each = (self._clock() - self._started) / self._made
        return each * (max(0.0, now - self._in_stage) + sum(later))


def in_words(seconds: float) -> str:
    """A duration, no more precise than it is known."""
    if seconds < 90:
        return f"{max(1, round(seconds / 5)) * 5} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
