"""A device simulated in host memory, in which everything above runs the same, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from .coding import Form
from .device import Buffer, Stage, bring
from .layout import ALIGNMENT
from .ring import ASSUMED_BUS, Mark, Timeline


class HostStage(Stage):
    """A device simulated in host memory.

    With `lazy`, bytes are copied at the last moment, when compute waits for them; otherwise at once. A missing wait
    shows in the first case, an early overwrite in the second.
    """

    keeps_phase = True

    def __init__(self, *, capacity: int | None = None, bus_bytes_s: float = ASSUMED_BUS, lazy: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.timeline = Timeline(bus_bytes_s)
        self.registered: dict[int, int] = {}
        """Address and length of pinned ranges."""
        self._capacity, self._lazy = capacity, lazy
        self._due: deque[Callable[[], object]] = deque()
        self._done = 0

    def _allocate(self, num_bytes: int) -> Buffer:
        if self._capacity is not None and self.stats.held_bytes + num_bytes > self._capacity:
            raise torch.OutOfMemoryError(
                f"{num_bytes} bytes do not fit: {self.stats.held_bytes} of {self._capacity} are taken."
            )
        flat = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        return Buffer(flat[-flat.data_ptr() % ALIGNMENT :][:num_bytes].fill_(255))

    def _free(self, memory: Buffer) -> None:
        memory.flat.fill_(255)  # NaN in every floating-point type, so that later use shows.

    def _send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.timeline.copy(source.numel())
        self._put(lambda: target.copy_(source))

    def _area_waits(self, mark: Mark) -> None:
        self._run_until(mark[1])

    def _pass(self, target: torch.Tensor, room: torch.Tensor, source: torch.Tensor, form: Form | None) -> None:
        self.timeline.copy(source.numel())
        room.copy_(source)  # As early as can be: a missing wait shows.
        self._put(lambda: bring(target, room, form))

    def _put(self, copy: Callable[[], object]) -> None:
        self._due.append(copy)
        if not self._lazy:
            self._run_until(self._done + 1)

    def mark_copied(self) -> Mark:
        return self.timeline.mark_copied(), self._done + len(self._due)

    def mark_computed(self) -> Mark:
        return self.timeline.mark_computed(), 0

    def compute_waits(self, mark: Mark) -> None:
        self.timeline.compute_waits(mark[0])
        self._run_until(mark[1])

    def _run_until(self, count: int) -> None:
        while self._done < count and self._due:
            self._due.popleft()()
            self._done += 1

    def copies_wait(self, mark: Mark) -> None:
        self.timeline.copies_wait(mark[0])

    def host_waits(self, mark: Mark) -> None:
        self._run_until(mark[1])

    def register(self, address: int, num_bytes: int) -> str | None:
        self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def synchronize(self) -> None:
        self.host_waits(self.mark_copied())

    def measure_bus(self) -> float:
        return self.timeline.bus_bytes_s

    def mark_time(self) -> float:
        return self.timeline.mark_computed()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def peak_bytes(self) -> int:
        peak, self.stats.peak_held_bytes = self.stats.peak_held_bytes, self.stats.held_bytes
        return peak

    def available_bytes(self) -> int | None:
        return self._capacity

    def free_bytes(self) -> int | None:
        return None if self._capacity is None else self._capacity - self.stats.held_bytes
