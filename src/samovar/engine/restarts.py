"""Backoff of restarts: at once after a first crash, later after more, and not for a while after too many."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Restarts:
    """The crashes so far, as a circuit breaker. Times are seconds of one clock."""

    max_crashes: int = 5
    """Crashes within the window that open the circuit."""
    window_s: float = 60.0
    pause_s: float = 60.0
    """How long the circuit stays open. Then one more worker is tried; if it crashes too, the circuit opens again."""
    first_delay_s: float = 0.25
    max_delay_s: float = 8.0
    count: int = 0
    """Workers that replaced others."""
    _crashes: list[float] = field(default_factory=list)
    _is_tripped: bool = False

    def note_crash(self, now: float) -> None:
        self._crashes = [*(crash for crash in self._crashes if now - crash <= self.window_s), now]
        self._is_tripped |= len(self._crashes) >= self.max_crashes

    def note_success(self) -> None:
        """A worker has made an image: if the circuit was open, it closes."""
        if self._is_tripped:
            self._crashes, self._is_tripped = [], False

    def is_open(self, now: float) -> bool:
        """Whether workers are not restarted for now."""
        return self._is_tripped and now < self._crashes[-1] + self.pause_s

    def next_start(self, now: float) -> float:
        """When a new worker may start."""
        if not self._crashes:
            return now
        if self._is_tripped:
            return self._crashes[-1] + self.pause_s
        count = len([crash for crash in self._crashes if now - crash <= self.window_s])
        delay = 0.0 if count <= 1 else min(self.max_delay_s, self.first_delay_s * 2 ** (count - 2))
        return self._crashes[-1] + delay
