"""How many images at once are worth it? That is learned from how long batches take.

Where one image keeps the device busy, several at once take as long as one after the other, and all but the last are
answered later. So a size that is known is used only if an image takes less time in it than in smaller batches.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

_GAIN = 0.98
"""The most that an image may take in a larger batch, of what it takes in a smaller one."""
_ENOUGH, _KEPT = 2, 16
"""Batches by which a size is judged, and those that are remembered. The quickest counts."""
_TRIAL, _FORGET = 8, 64
"""Batches after which one image alone is tried, if it is unknown, up to three times; and after which sizes that did not
pay are tried again: later after twice as many, and so on."""
_MOST_KINDS = 64


@dataclass
class _Times:
    """Seconds for each image, of requests of one kind."""

    by_size: dict[int, deque[float]] = field(default_factory=dict)
    count: int = 0
    forget_at: int = _FORGET

    def note(self, size: int, seconds: float) -> None:
        self.by_size.setdefault(size, deque(maxlen=_KEPT)).append(seconds)
        self.count += 1
        if self.count >= self.forget_at:
            self.forget_at *= 2
            self.by_size = {size: times for size, times in self.by_size.items() if size == 1 or self.pays(size)}

    def pays(self, size: int) -> bool:
        """Whether to make batches of a size. One that is unknown is as good as the next larger one that is known."""
        known = {each: min(times) for each, times in self.by_size.items() if len(times) >= _ENOUGH}
        judged = min((each for each in known if each >= size), default=0)
        return all(known[judged] <= _GAIN * known[each] for each in known if each < judged)


class BatchSizes:
    """What is known of a worker's batches, by kind of request."""

    def __init__(self, *, tries: bool = True) -> None:
        """`tries`: whether one image may be made alone only to learn how long it takes."""
        self._tries, self._kinds = tries, OrderedDict[Hashable, _Times]()

    def best(self, kind: Hashable, images: int) -> int:
        """How many images to compute at once, if there are this many."""
        times = self._kinds.get(kind, _Times())
        is_trial = self._tries and times.count + 1 in (_TRIAL, 2 * _TRIAL, 3 * _TRIAL)
        if is_trial and len(times.by_size.get(1, ())) < _ENOUGH:
            return 1
        return next((size for size in range(images, 1, -1) if times.pays(size)), 1)

    def note(self, kind: Hashable, images: int, seconds: float) -> None:
        """A batch has kept the worker busy for this long."""
        self._kinds.setdefault(kind, _Times()).note(images, seconds / images)
        self._kinds.move_to_end(kind)
        while len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
