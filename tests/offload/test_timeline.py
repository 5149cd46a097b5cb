"""The clock: what a pass takes, bound by the bus or by computing, and what a larger ring gains."""

from __future__ import annotations

import pytest

from samovar.offload.timeline import TimedBlock, Timeline, pass_seconds


def blocks(count: int, size: int, seconds: float, pieces: int = 4) -> list[TimedBlock]:
    return [TimedBlock(str(index), (size // pieces,) * pieces, seconds) for index in range(count)]


def test_the_two_clocks_wait_for_each_other_only_where_told() -> None:
    timeline = Timeline(10.0)
    timeline.copy(50)
    timeline.compute(1.0)
    assert (timeline.copied_s, timeline.computed_s) == (5.0, 1.0)
    timeline.compute_waits(timeline.mark_copied())
    timeline.compute(2.0)
    timeline.copies_wait(timeline.mark_computed())
    assert (timeline.copied_s, timeline.computed_s) == (7.0, 7.0)


def test_bound_by_the_bus() -> None:
    stack = blocks(10, 100, 0.4)
    everything = {block.path for block in stack}
    assert pass_seconds(stack, everything, 200, 100.0) == pytest.approx(10.0)
    # Half a block more than one is enough: that is what crosses the bus while a block computes.
    assert pass_seconds(stack, everything, 150, 100.0) == pytest.approx(10.0)
    # Without room for the next, copies and computing take turns.
    assert pass_seconds(stack, everything, 100, 100.0) == pytest.approx(14.0)


def test_bound_by_computing() -> None:
    stack = blocks(10, 100, 2.0)
    assert pass_seconds(stack, {block.path for block in stack}, 200, 100.0) == pytest.approx(20.0)


def test_a_copy_hides_behind_blocks_that_stay() -> None:
    stack = blocks(10, 100, 0.5)
    assert pass_seconds(stack, {"0", "2", "4", "6", "8"}, 150, 100.0) == pytest.approx(5.0)
    assert pass_seconds(stack, {"0", "1", "2", "3", "4"}, 150, 100.0) > 6.0


def test_what_comes_before_the_blocks_counts() -> None:
    assert pass_seconds(blocks(2, 100, 1.0), set(), 0, 100.0, rest_s=0.5) == pytest.approx(2.5)
