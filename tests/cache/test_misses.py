"""What forecasts have missed is taken back, by weights of computed outputs alone."""

from __future__ import annotations

import pytest

from samovar.cache.misses import Misses, Skipped


def after_a_gap(length: float = 1.0) -> Misses:
    """Steps 0, 1 and 4 of outputs that are their numbers squared were computed; 2 and 3 repeated 1."""
    misses = Misses()
    for number in (0, 1):
        misses.computed(places(number), numbers(number), 1.0)
    for number in (2, 3):
        assert misses.skipped(Skipped(number, number, 1.0), [1.0], [1, 0]) == [1.0], "nothing was missed before"
    misses.computed([4.0, 1.0, 0.0], KNOWN, length)
    return misses


def numbers(newest: int) -> list[int]:
    return list(range(newest, -1, -1))


def places(newest: int) -> list[float]:
    return [float(number) for number in numbers(newest)]


def value(weights: list[float], steps: list[int]) -> float:
    return sum(weight * step**2 for weight, step in zip(weights, steps, strict=False))


KNOWN, MISSED = [4, 1, 0], 4 + 9 - 1 - 1


def test_nothing_is_taken_back_where_nothing_was_skipped() -> None:
    misses = Misses()
    for number in range(3):
        misses.computed(places(number), numbers(number), 1.0)
        assert misses.corrected([1.0], numbers(number)) == [1.0]


@pytest.mark.parametrize("length", [1.0, 0.7, 3.0])
def test_the_step_that_shows_it_takes_it_back(length: float) -> None:
    misses = after_a_gap(length)
    for _ in range(2):  # Branches.
        assert length * (value(misses.corrected([1.0], KNOWN), KNOWN) - 16) == pytest.approx(MISSED)
    assert misses.skipped(Skipped(5, 5.0, 1.0), [2.0, -1.0], KNOWN) == [2.0, -1.0], "nothing is left"


@pytest.mark.parametrize("length", [0.0, 1e-6, 0.01])
def test_a_very_short_step_leaves_the_rest_to_the_next(length: float) -> None:
    misses = after_a_gap(length)
    weights = misses.corrected([1.0], KNOWN)
    assert sum(abs(weight - (step == 4)) for weight, step in zip(weights, KNOWN, strict=False)) <= 20 + 1e-9
    left = MISSED - length * (value(weights, KNOWN) - 16)
    assert left > 0
    step = Skipped(5, 5.0, 1.0)
    for _ in range(2):
        assert value(misses.skipped(step, [1.0], KNOWN), KNOWN) - 16 == pytest.approx(left)


def test_outputs_that_are_not_stored_any_more_are_replaced_by_the_oldest() -> None:
    misses = after_a_gap(0.0)
    weights = misses.skipped(Skipped(5, 5.0, 1.0), [1.0], [4, 1])
    assert len(weights) == 2
    assert sum(weights) == pytest.approx(1.0), "what is taken back is differences of outputs"
