"""Which blocks are on the device now, and which come next?

A ring is a stretch of device memory through which blocks pass in the order in which the model calls them.
Memory is given by the byte, not by the block: the next block is on its way into whatever is free while this
one computes, so a ring little larger than the largest block keeps the bus busy. Everything is enqueued, nothing
is waited for by the host: `Lane` says what must come after what.

The order is that of the model's structure at first, and what was seen after one pass. A pass in which no block
was called (a cached step) moves nothing, and the next one finds the ring as it was left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Mark = Any
"""A point in the work of the device that other work can be told to wait for."""


class Lane(Protocol):
    """Copies on the one hand and computing on the other, each in order, both on their own time."""

    def mark_copied(self) -> Mark:
        """The point at which all copies sent so far have arrived."""

    def mark_computed(self) -> Mark:
        """The point at which all that was computed so far is done."""

    def compute_waits(self, mark: Mark) -> None:
        """Compute nothing more before that point."""

    def copies_wait(self, mark: Mark) -> None:
        """Copy nothing more before that point."""


class Cargo(Protocol):
    """What passes through a ring: a block's weights."""

    @property
    def pieces(self) -> Sequence[int]:
        """Bytes of each piece that is copied."""

    def prepare(self) -> None:
        """Make sure that `pieces` is true now."""

    def send(self, piece: int, offset: int) -> None:
        """Start to copy a piece to an offset of the ring's memory."""


class RingSpace:
    """Which bytes are taken. Those taken first are given back first; a piece never goes round the end."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._taken: deque[tuple[int, int]] = deque()

    def take(self, size: int) -> int | None:
        """Where a piece can go, or None as long as there is no room."""
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
        """The oldest pieces are free."""
        for _ in range(count):
            self._taken.popleft()


def least_capacity(pieces: Sequence[int]) -> int:
    """What a ring must hold so that a block fits wherever it begins: it may lose the length of a piece at the end."""
    return sum(pieces) + (max(pieces) if len(pieces) > 1 else 0)


@dataclass
class _Berth:
    cargo: Cargo
    place: int
    """Where in the order it is."""
    offsets: list[int] = field(default_factory=list)
    ready: Mark = None
    is_complete: bool = False
    in_use: bool = False


@dataclass
class RingStats:
    """What a ring did."""

    loads: int = 0
    """Blocks that were used."""
    late: int = 0
    """Of these, blocks that were not on their way when they were called."""
    dropped: int = 0
    """Blocks that were sent, or begun, and not used."""


class Ring:
    """Brings blocks in before they are called, in the order in which they will be."""

    def __init__(
        self,
        lane: Lane,
        capacity: int,
        order: Sequence[Cargo],
        *,
        goes_round: Callable[[], bool],
        grow: Callable[[int], None] | None = None,
    ) -> None:
        """`goes_round` says whether a next pass will come; `grow` is told the bytes needed if a block has grown."""
        self.stats = RingStats()
        self.order = list(order)
        self._lane, self._goes_round, self._grow = lane, goes_round, grow
        self._space = RingSpace(capacity)
        self._berths: deque[_Berth] = deque()
        self._last = -1
        """Where in the order the block is that was called last."""
        self._passed: list[Cargo] = []
        self._is_learned = False

    @property
    def cargoes(self) -> list[Cargo]:
        """What is on the device, or on its way."""
        return [berth.cargo for berth in self._berths if berth.offsets]

    def acquire(self, cargo: Cargo) -> list[int]:
        """Where the pieces of a block are, or will be when the device gets to what is computed next."""
        assert not any(berth.in_use for berth in self._berths), "blocks are not called inside one another"
        place = self._locate(cargo)
        while self._berths and self._berths[0].cargo is not cargo:
            self._drop_oldest()
        if not self._berths:
            self.stats.late += 1
            self._make_room(cargo)
            self._berths.append(_Berth(cargo, place))
        berth = self._berths[0]
        is_placed = self._fill(berth)
        assert is_placed, "a ring holds its largest block"
        self._lane.compute_waits(berth.ready)
        berth.in_use = True
        self.stats.loads += 1
        self._last = place
        self._passed.append(cargo)
        return berth.offsets

    def release(self) -> None:
        """The block that was acquired is not needed any more once the device is through with it: bring in the next."""
        if not self._berths or not self._berths[0].in_use:
            return
        self._lane.copies_wait(self._lane.mark_computed())
        self._pop()
        self._pump()

    def drop(self) -> None:
        """Forget what was sent ahead."""
        while self._berths:
            self._drop_oldest()

    def begin_pass(self) -> None:
        """The model is called."""
        self._passed = []

    def end_pass(self) -> None:
        """The model returns: if its blocks came in another order than was thought, that is the order from now on."""
        if self._passed and not (self._is_learned and _is_within(self._passed, self.order)):
            if [*map(id, self._passed)] != [*map(id, self.order)]:
                self.drop()
                self.order, self._last = self._passed, len(self._passed) - 1
            self._is_learned = True
        self._passed = []
        if not self._goes_round():
            self.drop()  # Weights may change before the next call.

    def _locate(self, cargo: Cargo) -> int:
        count = len(self.order)
        for place in range(self._last + 1, self._last + 1 + count):
            if self.order[place % count] is cargo:
                return place % count
        return self._last  # Not known yet: at the end of the pass it will be.

    def _make_room(self, cargo: Cargo) -> None:
        cargo.prepare()
        needed = least_capacity(cargo.pieces)
        if needed > self._space.capacity and self._grow is not None:
            self._grow(needed)
            self._space = RingSpace(needed)

    def _pump(self) -> None:
        """Send what there is room for."""
        while True:
            berth = self._berths[-1] if self._berths else None
            if berth is None or berth.is_complete:
                berth = self._open_next(self._last if berth is None else berth.place)
            if berth is None or not self._fill(berth):
                return

    def _open_next(self, place: int) -> _Berth | None:
        place += 1
        if place >= len(self.order):
            if not self._goes_round():
                return None
            place = 0
        cargo = self.order[place]
        if any(berth.cargo is cargo for berth in self._berths):
            return None  # All of them are here.
        cargo.prepare()
        if least_capacity(cargo.pieces) > self._space.capacity:
            return None  # It has grown; there will be room for it when it is called.
        berth = _Berth(cargo, place)
        self._berths.append(berth)
        return berth

    def _fill(self, berth: _Berth) -> bool:
        """Send the rest of a block as far as there is room; whether all of it is sent."""
        pieces = berth.cargo.pieces
        while len(berth.offsets) < len(pieces):
            offset = self._space.take(pieces[len(berth.offsets)])
            if offset is None:
                return False
            berth.cargo.send(len(berth.offsets), offset)
            berth.offsets.append(offset)
        if not berth.is_complete:
            berth.ready = self._lane.mark_copied()
            berth.is_complete = True
        return True

    def _drop_oldest(self) -> None:
        self.stats.dropped += bool(self._berths[0].offsets)
        self._pop()

    def _pop(self) -> None:
        # What replaces it is copied later on the same lane, so a copy that is still under way does no harm.
        self._space.give_back(len(self._berths.popleft().offsets))


def _is_within(some: Sequence[Cargo], order: Sequence[Cargo]) -> bool:
    """Whether some blocks come in this order, others left out."""
    rest = iter(order)
    return all(any(cargo is other for other in rest) for cargo in some)
