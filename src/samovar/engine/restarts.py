"""When may a worker be started again? At once after a first crash, later after more, and not for a while after too
many: what fails five times in a minute will fail a sixth time."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Restarts:
    """The crashes so far; times are seconds of one clock."""

    most: int = 5
    """Crashes within the window after which the circuit is open."""
    window_s: float = 60.0
    rest_s: float = 60.0
    """For how long it stays open. Then one more worker is tried: if that crashes too, it is open again."""
    first_delay_s: float = 0.25
    most_delay_s: float = 8.0
    count: int = 0
    """Workers that were started in the place of others."""
    _crashes: list[float] = field(default_factory=list)
    _is_tripped: bool = False

    def note_crash(self, now: float) -> None:
        """A worker has ended that should not have."""
        self._crashes = [*(crash for crash in self._crashes if now - crash <= self.window_s), now]
        self._is_tripped |= len(self._crashes) >= self.most

    def note_success(self) -> None:
        """A worker has made a picture: if the circuit was open, what was wrong is over."""
        if self._is_tripped:
            self._crashes, self._is_tripped = [], False

    def is_open(self, now: float) -> bool:
        """Whether no worker is to be started now, or soon."""
        return self._is_tripped and now < self._crashes[-1] + self.rest_s

    def next_start(self, now: float) -> float:
        """When a new worker may be started."""
        if not self._crashes:
            return now
        if self._is_tripped:
            return self._crashes[-1] + self.rest_s
        count = len([crash for crash in self._crashes if now - crash <= self.window_s])
        delay = 0.0 if count <= 1 else min(self.most_delay_s, self.first_delay_s * 2 ** (count - 2))
        return self._crashes[-1] + delay
