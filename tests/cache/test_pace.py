"""The gap follows the error of the last forecast, and the curve that came nearest makes the next ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from samovar.cache.drift import Seen
from samovar.cache.pace import Curve, Judgement, Pace

SIZE = 512


def seen(number: int, rows: torch.Tensor, place: float | None = None) -> Seen:
    return Seen(-1.0 + 0.04 * number if place is None else place, number, (rows,))


def walked(curve: Callable[[int], torch.Tensor], steps: int = 4, place: Callable[[int], float] | None = None) -> Pace:
    """A run whose first steps are computed."""
    pace = Pace()
    for number in range(steps):
        rows = curve(number)
        sample = torch.ones(rows.shape)
        at = None if place is None else place(number)
        pace.computed("only", seen(number, rows, at), (sample,), leads=True, by_image=True)
    return pace


def judged(pace: Pace, step: torch.Tensor) -> Judgement:
    return pace.judge("only", (torch.ones(step.shape) - 0.04 * step,), 28)


A, B, C = (torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_the_curve_that_fits_is_chosen(order: int) -> None:
    curve = {0: lambda n: A, 1: lambda n: A + n * B, 2: lambda n: A + n * B + 0.3 * n * n * C}[order]
    pace = walked(curve)
    found = judged(pace, curve(3))
    assert found.drift < 1e-4
    assert {chosen.order for chosen in pace.curves} == {order}
    assert found.order == order


def test_each_image_has_its_own_curve() -> None:
    steady = torch.tensor([[0.0], [1.0]])

    def curve(number: int) -> torch.Tensor:
        return A + number * steady * B

    pace = walked(curve)
    judged(pace, curve(3))
    assert [chosen.order for chosen in pace.curves] == [0, 1]
    (first, second) = pace.forecast("only", -1.0 + 0.04 * 4, 4)
    assert first == [1.0]
    assert second == pytest.approx([2.0, -1.0])


def test_over_the_noise_or_over_the_steps_whichever_is_a_line() -> None:
    def noise(number: int) -> float:
        return -math.exp(-0.3 * number)

    for by_noise, curve in ((True, lambda n: A + noise(n) * B), (False, lambda n: A + n * B)):
        pace = walked(curve, place=noise)
        judged(pace, curve(3))
        assert set(pace.curves) == {Curve(1, by_noise)}


def test_the_worst_image_decides() -> None:
    def curve(number: int) -> torch.Tensor:
        return A + torch.tensor([[0.01], [1.0]]) * torch.randn(2, SIZE, generator=torch.Generator().manual_seed(number))

    both = judged(walked(curve), curve(3)).drift
    alone = judged(walked(lambda n: curve(n)[1:]), curve(3)[1:]).drift
    assert both == pytest.approx(alone, rel=1e-3)


def gap_after(error: float, order: int, tolerance: float = 0.01, before: int = 5) -> int:
    """The next gap, where the last one had this length and this error."""
    pace = walked(lambda n: A)
    pace._gap = 9
    pace.computed("only", seen(3 + before, A), (torch.ones(2, SIZE),), leads=True, by_image=True)
    pace.set_gap("only", Judgement(error / before, order), tolerance)
    assert pace.due is not None
    return pace.due - (3 + before)


def test_the_gap_follows_the_error() -> None:
    assert gap_after(0.01, 1, before=4) == 3, "less than the last one, to be on the safe side"
    assert gap_after(0.04, 1, before=4) == 1
    assert gap_after(0.001, 1, before=2) == 5
    assert gap_after(0.0, 1) == 6, "there is a longest gap"
    assert gap_after(math.inf, 1) == 1
    assert gap_after(0.08, 2, before=4) == 1
    assert gap_after(0.08, 0, tolerance=0.16, before=3) == 5


def test_gaps_grow_step_by_step() -> None:
    pace = walked(lambda n: A)
    pace.set_gap("only", Judgement(0.0, 1), 0.01)
    assert pace.due == 3 + 3


def test_the_error_of_all_gaps_is_summed() -> None:
    pace = walked(lambda n: A)
    pace.set_gap("only", Judgement(0.5, 1), 0.01)
    assert pace.error == 0.0, "nothing was skipped"
    pace.computed("only", seen(6, A), (torch.ones(2, SIZE),), leads=True, by_image=True)
    pace.set_gap("only", Judgement(0.002, 1), 0.01)
    assert pace.error == pytest.approx(0.006)


def test_branches_of_other_steps_do_not_count() -> None:
    pace = walked(lambda n: A + n * B)
    for number in (0, 1, 3):
        pace.computed("late", seen(number, 9 * torch.randn(2, SIZE)), (), leads=False, by_image=True)
    assert judged(pace, A + 3 * B).drift < 1e-4
