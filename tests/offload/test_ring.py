"""The ring: bytes are given in order, blocks come before they are called, and a skipped pass moves nothing."""

from __future__ import annotations

import random

import pytest

from samovar.offload.ring import Ring, RingSpace, Timeline, least_capacity
from samovar.offload.stats import OffloadStats


class Block:
    """A block that remembers where its pieces were sent."""

    def __init__(self, name: str, pieces: list[int], log: list[tuple[str, int, int]]) -> None:
        self.name, self.pieces, self._log = name, pieces, log
        self.prepared = 0
        self.is_interrupted = False

    def prepare(self) -> None:
        self.prepared += 1

    def send(self, piece: int, memory: object, offset: int) -> None:
        if self.is_interrupted:
            raise KeyboardInterrupt
        self._log.append((self.name, piece, offset))

    def forget_views(self) -> None:
        pass

    def edits(self) -> int:
        return 0

    fingerprint = edits

    def __repr__(self) -> str:
        return self.name


def ring_of(sizes: list[list[int]], capacity: int, *, has_next_pass: bool = True) -> tuple[Ring, list[Block], list]:
    log: list[tuple[str, int, int]] = []
    blocks = [Block("abcdefghij"[index], pieces, log) for index, pieces in enumerate(sizes)]
    return Ring(Timeline(1.0), capacity, blocks, has_next_pass=lambda: has_next_pass), blocks, log


def counts(ring: Ring) -> tuple[int, int, int]:
    stats = ring._queues.stats
    return stats.block_loads, stats.late_blocks, stats.dropped_blocks


def call(ring: Ring, blocks: list[Block]) -> None:
    ring.begin_pass()
    for block in blocks:
        ring.acquire(block)
        ring.release()
    ring.end_pass()


def test_space_is_never_given_twice_and_pieces_do_not_go_round_the_end() -> None:
    random.seed(0)
    space, live = RingSpace(100), []
    for _ in range(3000):
        size = random.randint(1, 40)
        start = space.take(size)
        if start is None:
            space.give_back(1)
            live.pop(0)
            continue
        assert start + size <= 100
        assert all(start + size <= other or end <= start for other, end in live)
        live.append((start, start + size))


def test_a_block_fits_wherever_it_begins() -> None:
    random.seed(1)
    for _ in range(200):
        sizes = [[random.randint(1, 9) for _ in range(random.randint(1, 5))] for _ in range(6)]
        capacity = max(map(least_capacity, sizes))
        ring, blocks, log = ring_of(sizes, capacity)
        for _ in range(4):
            call(ring, blocks)  # An assertion inside fails if a block does not fit.
        pieces = {block.name: block.pieces for block in blocks}
        assert all(offset + pieces[name][piece] <= capacity for name, piece, offset in log)
        assert {(name, piece) for name, piece, _ in log} == {(n, p) for n in pieces for p in range(len(pieces[n]))}


def test_what_comes_next_is_sent_as_soon_as_there_is_room() -> None:
    ring, (a, b, _c), log = ring_of([[4, 2], [4, 2], [4, 2]], 10)
    ring.begin_pass()
    assert ring.acquire(a) == [0, 4]
    assert [entry[:2] for entry in log] == [("a", 0), ("a", 1)]
    ring.release()
    assert [entry[:2] for entry in log[2:]] == [("b", 0), ("b", 1), ("c", 0)]  # Of c only the part that fits.
    ring.acquire(b)
    ring.release()
    assert [entry[:2] for entry in log[5:]] == [("c", 1), ("a", 0)]
    assert counts(ring) == (2, 1, 0)


def test_a_pass_ends_with_the_next_one_on_its_way_only_if_there_is_one() -> None:
    for has_next_pass in (True, False):
        ring, blocks, log = ring_of([[1], [1], [1]], 2, has_next_pass=has_next_pass)
        call(ring, blocks)
        assert len(log) == (5 if has_next_pass else 3)
        assert ring.blocks == (blocks[:2] if has_next_pass else [])


def test_a_skipped_pass_moves_nothing_and_the_next_one_goes_on() -> None:
    ring, blocks, log = ring_of([[1], [1], [1]], 2)
    call(ring, blocks)
    before = list(log)
    for _ in range(3):
        call(ring, [])
    assert log == before
    call(ring, blocks)
    assert len(log) == len(before) + 3
    assert counts(ring)[1:] == (1, 0)


def test_blocks_that_are_left_out_are_dropped_and_the_rest_is_used() -> None:
    ring, (a, b, c, d), _ = ring_of([[1], [1], [1], [1]], 3)
    call(ring, [a, b, c, d])
    ring.begin_pass()
    ring.acquire(c)  # a and b were on their way, and so was c.
    ring.release()
    ring.acquire(d)
    ring.release()
    ring.end_pass()
    assert counts(ring)[1:] == (1, 2)
    assert ring.order == [a, b, c, d]


def test_another_order_is_learned_in_one_pass() -> None:
    ring, (a, b, c), log = ring_of([[1], [1], [1]], 2)
    call(ring, [c, a, b])
    assert ring.order == [c, a, b]
    call(ring, [c, a, b])
    late, sent = counts(ring)[1], len(log)
    call(ring, [c, a, b])
    assert (counts(ring)[1], len(log)) == (late, sent + 3)


def test_a_block_that_runs_twice_in_a_pass_is_loaded_twice() -> None:
    ring, (a, b), _log = ring_of([[1], [1]], 1)
    for _ in range(3):
        call(ring, [a, b, a, b])
    assert ring.order == [a, b, a, b]
    assert counts(ring)[0] == 12


def test_a_block_that_was_not_known_is_loaded_and_learned() -> None:
    ring, (a, b, c), _ = ring_of([[1], [1], [1]], 2)
    call(ring, [a, b])
    assert ring.order == [a, b]
    call(ring, [a, b, c])
    assert ring.order == [a, b, c]


def test_releasing_twice_is_the_same_as_once() -> None:
    ring, (a, b), _ = ring_of([[1], [1]], 2)
    ring.acquire(a)
    ring.release()
    ring.release()
    assert ring.blocks == [b, a]


def test_a_ring_grows_for_a_block_that_has_grown() -> None:
    class Counting(Timeline):
        def allocate(self, num_bytes: int) -> None:
            asked.append(num_bytes)

    asked: list[int] = []
    log: list[tuple[str, int, int]] = []
    block = Block("a", [4], log)
    ring = Ring(Counting(1.0), 4, [block], has_next_pass=lambda: False)
    call(ring, [block])
    block.pieces = [4, 6]
    call(ring, [block])
    assert asked == [16]
    assert log[-1] == ("a", 1, 4)


def test_interrupts_between_taking_room_and_using_it_leave_all_of_it() -> None:
    ring, blocks, log = ring_of([[3, 3], [3, 3], [3, 3]], 9)
    for _ in range(4):
        blocks[1].is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            call(ring, blocks)
        ring.drop()  # As the hooks do.
        blocks[1].is_interrupted = False
        log.clear()
        call(ring, blocks)
        assert {name for name, _, _ in log} == {"a", "b", "c"}
    ring.drop()
    assert ring._space.take(9) == 0, "nothing is taken"


def test_blocks_inside_one_another_are_a_mistake() -> None:
    ring, (a, b), _ = ring_of([[1], [1]], 2)
    ring.acquire(a)
    with pytest.raises(AssertionError, match="inside one another"):
        ring.acquire(b)


def test_the_two_clocks_wait_for_each_other_only_where_told() -> None:
    timeline = Timeline(10.0)
    timeline.copy(50)
    timeline.compute(1.0)
    assert (timeline.copied_s, timeline.computed_s) == (5.0, 1.0)
    timeline.compute_waits(timeline.mark_copied())
    timeline.compute(2.0)
    timeline.copies_wait(timeline.mark_computed())
    assert (timeline.copied_s, timeline.computed_s) == (7.0, 7.0)


def test_stats_are_one_line_and_name_late_blocks_only_if_there_are_any() -> None:
    stats = OffloadStats(sent_bytes=2**30, block_loads=9, peak_held_bytes=2**20, setup_s=1.25)
    assert str(stats) == "1.00 GiB sent in 9 block loads; at most 1.00 MiB of weights on the device; 1.2 s to set up"
    stats.late_blocks = 2
    assert "9 block loads, 2 of them late;" in str(stats)
    stats.coded_bytes, stats.decoded_bytes = 2**29, 2**30
    assert str(stats).startswith("1.00 GiB for 1.50 GiB of weights sent in 9 block loads")
