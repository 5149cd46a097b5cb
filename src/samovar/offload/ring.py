"""The ring: a region of device memory through which blocks stream, in the order in which the model calls them.

Memory is handed out by the byte, not by the block: while one block computes, the next is copied into whatever is free,
so a ring little larger than the largest block keeps the bus busy. Everything is enqueued and the host never waits:
marks order copies and compute.

The order is first that of the model's structure, then the one observed in the first pass. A pass in which no block is
called (a cached step) moves nothing, and the next pass finds the ring as it was.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .stats import OffloadStats

Mark = Any
"""A point in the device's work that other work can wait for."""
Memory = Any
"""Device memory, as `DeviceQueues.allocate` returns it."""
ASSUMED_BUS = 25 * 2**30
"""Bytes per second of a bus that nobody measured: that of a desktop GPU."""


class DeviceQueues(Protocol):
    """A device with two queues of work, copies and compute. Each runs in order, independently of the other."""

    stats: OffloadStats

    def allocate(self, num_bytes: int) -> Memory:
        """Memory to copy into."""

    def free(self, memory: Memory) -> None:
        """Give memory back."""

    @abstractmethod
    def mark_copied(self) -> Mark:
        """The point at which all copies sent so far have arrived."""

    @abstractmethod
    def mark_computed(self) -> Mark:
        """The point at which everything computed so far is done."""

    @abstractmethod
    def compute_waits(self, mark: Mark) -> None:
        """Compute nothing more before that point."""

    @abstractmethod
    def copies_wait(self, mark: Mark) -> None:
        """Copy nothing more before that point."""

    @abstractmethod
    def host_waits(self, mark: Mark) -> None:
        """Return when the device has come to that point."""


class Timeline:
    """A simulated device: the times at which its two queues finish."""

    def __init__(self, bus_bytes_s: float) -> None:
        self.bus_bytes_s = bus_bytes_s
        self.stats = OffloadStats()
        self.copied_s = 0.0
        self.computed_s = 0.0
        self._waited_s = 0.0
        """Until when the host waited for the device."""

    def copy(self, num_bytes: int) -> None:
        self.copied_s = max(self.copied_s, self._waited_s) + num_bytes / self.bus_bytes_s

    def compute(self, seconds: float) -> None:
        self.computed_s = max(self.computed_s, self._waited_s) + seconds

    def allocate(self, num_bytes: int) -> None:
        pass

    def free(self, memory: None) -> None:
        pass

    def mark_copied(self) -> float:
        return self.copied_s

    def mark_computed(self) -> float:
        return self.computed_s

    def compute_waits(self, mark: float) -> None:
        self.computed_s = max(self.computed_s, mark)

    def copies_wait(self, mark: float) -> None:
        self.copied_s = max(self.copied_s, mark)

    def host_waits(self, mark: float) -> None:
        self._waited_s = max(self._waited_s, mark)


class StreamedBlock(Protocol):
    """The weights of a block that passes through a ring."""

    @property
    def pieces(self) -> Sequence[int]:
        """Bytes of each piece that is copied on its own."""

    def prepare(self) -> int:
        """Bring `pieces` up to date with the model, and return how many changes of the weights were seen so far."""

    def edits(self) -> int:
        """A number that changes when torch counts a change. This is quicker, and sees less."""

    def send(self, piece: int, memory: Memory, offset: int) -> None:
        """Start to copy a piece to an offset of the ring's memory."""


class RingSpace:
    """Which bytes of a ring are taken. They are freed in the order they were taken; a piece never wraps around."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """The offset for a piece, or None while there is no room."""
        start: int | None = None
        if not self._taken:
            start = 0 if size <= self.capacity else None
        else:
            oldest, (newest, head) = self._taken[0][0], self._taken[-1]
            if newest < oldest:
                start = head if head + size <= oldest else None
            elif head + size <= self.capacity:
                start = head
            else:
                start = 0 if size <= oldest else None
        if start is not None:
            self._taken.append((start, start + size))
        return start

    def give_back(self, count: int) -> None:
        """Free the oldest pieces."""
        for _ in range(count):
            self._taken.popleft()


def least_capacity(pieces: Sequence[int]) -> int:
    """The smallest ring that holds a block wherever it begins: up to a piece's length may be lost at the end."""
    return sum(pieces) + (max(pieces) if len(pieces) > 1 else 0)


@dataclass
class _Slot:
    """A block in the ring."""

    block: StreamedBlock
    position: int
    """Its index in the order of calls."""
    changes: int
    """What `prepare` returned when it was sent."""
    edits: int
    """The block's `edits` then."""
    offsets: list[int] = field(default_factory=list)
    """Where each piece was sent, as far as there was room."""
    ready: Mark = None
    is_complete: bool = False
    in_use: bool = False


class Ring:
    """Copies blocks to the device before they are called, in the order of their calls."""

    def __init__(
        self,
        queues: DeviceQueues,
        capacity: int,
        order: Sequence[StreamedBlock],
        *,
        has_next_pass: Callable[[], bool],
        before: Callable[[StreamedBlock], None] = lambda block: None,
    ) -> None:
        """`has_next_pass` says whether the model will be called again with the same weights. `before` is called with
        each block before it is sent: what it sends comes first."""
        self.order = list(order)
        self.memory: Memory = None
        self.is_interrupted = False
        """Whether the last pass has begun and not ended."""
        self._queues, self._has_next_pass, self._before = queues, has_next_pass, before
        self._space = RingSpace(capacity)
        self._slots: deque[_Slot] = deque()
        self._last = -1
        """The position of the block that was called last."""
        self._called: list[StreamedBlock] = []
        self._is_learned = False
        self._arrived: Mark = None
        """When the block that was called last has arrived."""

    @property
    def blocks(self) -> list[StreamedBlock]:
        """The blocks that are on the device or on their way to it."""
        return [slot.block for slot in self._slots if slot.offsets]

    @property
    def in_use(self) -> bool:
        """Whether a block is being called."""
        return any(slot.in_use for slot in self._slots)

    def open(self) -> None:
        """Allocate the ring's memory."""
        if self.memory is None:
            self.memory = self._queues.allocate(self._space.capacity)

    def close(self) -> None:
        """Free the ring's memory. The learned order is kept."""
        self.drop()
        memory, self.memory = self.memory, None
        if memory is not None:
            self._queues.free(memory)
        self._last, self._is_learned = -1, False

    def acquire(self, block: StreamedBlock) -> list[int]:
        """The offsets of a block's pieces; they are there when the device reaches the work enqueued next."""
        assert not self.in_use, "blocks are not called inside one another"
        if not self._called and any(slot.block.prepare() != slot.changes for slot in self._slots):
            self.drop()  # Weights that were sent ahead of this pass have changed since. They are sent again.
        position = self._locate(block)
        while self._slots and (self._slots[0].block is not block or self._slots[0].edits != block.edits()):
            self._drop_oldest()
        if not self._slots:
            self._queues.stats.late_blocks += 1
            self._append(block, position, may_grow=True)
        slot = self._slots[0]
        is_complete = self._fill(slot)
        assert is_complete, "a ring holds its largest block"
        self._queues.compute_waits(slot.ready)
        self._arrived, slot.in_use = slot.ready, True
        self._queues.stats.block_loads += 1
        self._last = position
        self._called.append(block)
        return slot.offsets

    def release(self) -> None:
        """Free the acquired block once the device is done with it, and start to copy the next ones."""
        if not self._slots or not self._slots[0].in_use:
            return
        self._queues.copies_wait(self._queues.mark_computed())
        self._pop()
        self.fill_ahead()

    def drop(self) -> None:
        """Forget the blocks that are on the device."""
        if self.in_use:
            self._queues.copies_wait(self._queues.mark_computed())
        while self._slots:
            self._drop_oldest()
        self._space = RingSpace(self._space.capacity)  # A piece that an interrupt cut off is in no slot.

    def begin_pass(self) -> None:
        """The model is called."""
        self._called, self.is_interrupted = [], True

    def end_pass(self) -> None:
        """The model returns. If it called its blocks in another order than expected, that becomes the order."""
        if self._called and not (self._is_learned and _is_within(self._called, self.order)):
            if [*map(id, self._called)] != [*map(id, self.order)]:
                self.drop()
                self.order, self._last = self._called, len(self._called) - 1
            self._is_learned = True
        self._called = []
        if not self._has_next_pass():
            self.drop()  # Weights may change before the next call.
        if self._arrived is not None:  # They may change now, and copies that this pass needs must not see it.
            self._queues.host_waits(self._arrived)
            self._arrived = None
        self.is_interrupted = False

    def fill_ahead(self) -> None:
        """Send as much of the next blocks as there is room for."""
        while True:
            slot = self._slots[-1] if self._slots else None
            if slot is None or slot.is_complete:
                slot = self._add_next(self._last if slot is None else slot.position)
            if slot is None or not self._fill(slot):
                return

    def _locate(self, block: StreamedBlock) -> int:
        count = len(self.order)
        for position in range(self._last + 1, self._last + 1 + count):
            if self.order[position % count] is block:
                return position % count
        return self._last  # An unknown block; the order is corrected at the end of the pass.

    def _append(self, block: StreamedBlock, position: int, *, may_grow: bool = False) -> _Slot | None:
        """Add a slot for a block. None if it has grown, through an adapter for instance, and the ring may not grow."""
        self._before(block)
        changes = block.prepare()
        needed = least_capacity(block.pieces)
        if needed > self._space.capacity:
            if not may_grow:
                return None
            self._queues.free(self.memory)
            self.memory = None
            self._space = RingSpace(needed)
            self.open()
        slot = _Slot(block, position, changes, block.edits())
        self._slots.append(slot)
        return slot

    def _add_next(self, position: int) -> _Slot | None:
        position += 1
        if position >= len(self.order):
            if not self._has_next_pass():
                return None
            position = 0
        block = self.order[position]
        if any(slot.block is block for slot in self._slots):
            return None  # All blocks are here.
        return self._append(block, position)

    def _fill(self, slot: _Slot) -> bool:
        """Send the missing pieces of a block as far as there is room. True if all of it is sent."""
        pieces = slot.block.pieces
        while len(slot.offsets) < len(pieces):
            offset = self._space.take(pieces[len(slot.offsets)])
            if offset is None:
                return False
            slot.block.send(len(slot.offsets), self.memory, offset)
            slot.offsets.append(offset)
        if not slot.is_complete:
            slot.ready = self._queues.mark_copied()
            slot.is_complete = True
        return True

    def _drop_oldest(self) -> None:
        self._queues.stats.dropped_blocks += bool(self._slots[0].offsets)
        self._pop()

    def _pop(self) -> None:
        # Later copies into these bytes use the same queue, so a copy that is still running does no harm.
        self._space.give_back(len(self._slots.popleft().offsets))


def _is_within(some: Sequence[StreamedBlock], order: Sequence[StreamedBlock]) -> bool:
    """Whether `some` is a subsequence of `order`."""
    rest = iter(order)
    return all(any(block is other for other in rest) for block in some)
