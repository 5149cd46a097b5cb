"""The gap follows the error of the last forecast, and the curve that came nearest makes the next ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from samovar.cache.misses import Skipped
from samovar.cache.pace import Curve, Image, Judged, Pace, count_images
from samovar.cache.rows import RowHistory

SIZE = 512
A, B, C = (torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
Output = Callable[[int], torch.Tensor]


class Walk:
    """A run of one branch whose first steps are computed."""

    def __init__(self, output: Output, place: Callable[[int], float] = lambda step: -1 + 0.04 * step) -> None:
        self.pace, self.history, self.output, self.place = Pace(), RowHistory(), output, place
        self.pace.begin([output(0)], [output(0)])
        for step in range(4):
            self.compute(step)

    def compute(self, step: int, due: tuple[bool, ...] | None = None) -> None:
        rows = self.output(step)
        self.pace.due = list(due or (True,) * len(rows))
        self.history.push(self.place(step), step, [rows], self.pace.due)
        samples = [torch.ones(rows.shape)]
        self.returned = self.pace.computed("only", self.history, samples, self.pace.due, 0.04)

    def forecast(self, step: int) -> list[list[float]]:
        return self.pace.forecast(self.history, Skipped(step, self.place(step), 0.04))

    def judge(self, step: int = 3) -> list[Judged | None]:
        """After the step that was computed last: Euler's method."""
        return self.pace.judge(self.history, [torch.ones(self.output(0).shape) - 0.04 * self.output(step)], 28)


def judged(found: Judged | None) -> Judged:
    assert found is not None
    return found


@pytest.mark.parametrize("order", [1, 2])
def test_the_curve_that_fits_is_chosen(order: int) -> None:
    output = {1: lambda n: A + n * B, 2: lambda n: A + n * B + 0.3 * n * n * C}[order]
    walk = Walk(output)
    for found in map(judged, walk.judge()):
        assert found.drift < 1e-4
        assert found.order == order


def test_what_slows_down_is_followed_half_the_way() -> None:
    walk = Walk(lambda n: A + (2 - 0.5**n) * B)
    walk.judge()
    assert {image.curve for image in walk.pace.images} == {Curve(1, True, 0.5)}
    walk.pace.due = [False, False]
    assert walk.forecast(4)[0] == pytest.approx([1.5, -0.5])


def test_each_image_has_its_own_curve() -> None:
    walk = Walk(lambda n: A + n * B + n * n * torch.tensor([[0.0], [1.0]]) * C)
    walk.judge()
    assert [image.curve.order for image in walk.pace.images] == [1, 2]
    walk.pace.due = [False, False]
    first, second = walk.forecast(4)
    assert first == pytest.approx([2.0, -1.0])
    assert second == pytest.approx([3.0, -3.0, 1.0])


def test_over_the_noise_or_over_the_steps_whichever_is_a_line() -> None:
    def noise(number: int) -> float:
        return -math.exp(-0.3 * number)

    outputs: dict[bool, Output] = {True: lambda n: A + noise(n) * B, False: lambda n: A + n * B}
    for by_noise, output in outputs.items():
        walk = Walk(output, noise)
        walk.judge()
        assert {image.curve for image in walk.pace.images} == {Curve(1, by_noise)}


def test_what_a_gap_has_missed_is_taken_back() -> None:
    """On the whole, the sampler is given as much as if all steps had been computed."""
    walk = Walk(lambda n: A + n * n * B)
    walk.judge()
    walk.pace.images[1].curve = walk.pace.images[0].curve = Curve(1, True, 0.5)
    given = torch.zeros(2, SIZE)
    for step in range(4, 12):
        if step in (6, 11):
            walk.compute(step)
            weights = walk.returned
        else:
            walk.pace.due = [False, False]
            weights = walk.forecast(step)
        stored = torch.stack([of.tensors[0] for of in walk.history.steps[: len(weights[0])]])  # type: ignore[arg-type, misc]
        given += torch.einsum("s,sie->ie", torch.tensor(weights[0]), stored)
    wanted = torch.stack([walk.output(step) for step in range(4, 12)]).sum(0)
    assert torch.allclose(given, wanted, rtol=1e-3, atol=1e-2)


def test_images_with_the_same_seed_are_no_copies() -> None:
    pace, same = Pace(), torch.randn(1, SIZE).expand(2, -1)
    assert pace.begins(0)
    pace.begin([same], [A])
    assert len(pace.images) == 1, "they look the same so far"
    assert pace.begins(1)
    pace.begin([A], [A])
    assert len(pace.images) == 2
    assert not any(map(pace.begins, (1, 2)))


def shaky(number: int) -> torch.Tensor:
    return A + torch.tensor([[0.01], [1.0]]) * torch.randn(2, SIZE, generator=torch.Generator().manual_seed(number))


def test_an_image_is_judged_as_if_it_were_alone() -> None:
    both = Walk(shaky).judge()
    for row in (0, 1):
        (alone,) = Walk(lambda n, row=row: shaky(n)[row : row + 1]).judge()  # type: ignore[misc]
        assert judged(both[row]).drift == pytest.approx(judged(alone).drift, rel=1e-4)


def test_images_that_were_not_due_keep_their_past() -> None:
    walk = Walk(lambda n: A + n * B)
    walk.pace.set_gaps(walk.history, walk.judge(), 0.01)
    before = [step.tensors[0][0].clone() for step in walk.history.steps]  # type: ignore[index]
    walk.compute(5, due=(False, True))
    assert [step.numbers for step in walk.history.steps] == [(3, 5), (2, 3), (1, 2), (0, 1)]
    assert all(
        torch.equal(step.tensors[0][0], old)  # type: ignore[index]
        for step, old in zip(walk.history.steps, before, strict=True)
    )
    first, second = walk.judge(5)
    assert first is None
    assert judged(second).drift < 1e-4


def gap_after(error: float, order: int, before: int = 5, steps: int = 100, at: int = 60) -> int:
    """The next gap, where the one that ended at a step had this length and this error."""
    image = Image()
    image.gap = 90
    image.set_gap(error / before, order, at, at - before, 0.01, steps)
    return image.due - at


def test_the_gap_follows_the_error() -> None:
    assert gap_after(0.01, 1, before=4) == 3, "less than the last one, to be on the safe side"
    assert gap_after(0.1, 1, before=4) == 1
    assert gap_after(0.001, 1, before=2) == 4
    assert gap_after(0.001, 2, before=2) == 3, "what grows faster is trusted less"
    assert gap_after(math.inf, 1) == 1


def test_the_beginning_of_a_run_is_taken_with_care() -> None:
    gaps = [gap_after(0.001, 1, before=2, at=at) for at in (4, 20, 40, 60)]
    assert gaps == [2, 3, 4, 4], "early errors steer what an image becomes"


@pytest.mark.parametrize(("steps", "longest"), [(100, 11), (50, 6), (28, 4), (20, 3), (8, 3)])
def test_there_is_a_longest_gap(steps: int, longest: int) -> None:
    assert gap_after(0.0, 1, steps=steps) == longest


def test_gaps_grow_step_by_step() -> None:
    image = Image()
    image.set_gap(0.0, 1, 3, 2, 0.01)
    assert image.due == 3 + 2


def test_the_error_of_all_gaps_is_summed() -> None:
    image = Image()
    image.set_gap(0.5, 1, 3, 2, 0.01)
    assert image.error == 0.0, "nothing was skipped"
    image.set_gap(0.002, 1, 6, 3, 0.006)
    assert (image.gap, image.error) == (2, pytest.approx(0.006 + 0.006 * (2 / 3) ** 2.5)), "that of the next gap too"
    image.set_gap(0.004, 1, 8, 6, 0.001)
    assert (image.gap, image.error) == (1, pytest.approx(0.006 + 0.008)), "now it is judged, and there is no other"


def test_branches_of_other_steps_do_not_count() -> None:
    walk, late = Walk(lambda n: A + n * B), RowHistory()
    for number in (0, 1, 3):
        late.push(walk.place(number), number, [9 * torch.randn(2, SIZE)], [True, True])
    walk.pace.computed("late", late, None, [True, True])
    assert all(judged(found).drift < 1e-4 for found in walk.judge())


def test_images_of_a_call() -> None:
    sample = torch.randn(2, 4, 8)
    assert count_images([sample], [sample]) == (2, 1)
    assert count_images([torch.cat([sample, sample])], [torch.cat([sample, sample])]) == (2, 2), "for guidance"
    assert count_images([sample], [torch.randn(2, 16, 4, 4)]) == (2, 1), "whatever the form of the output"
    assert count_images([sample, sample], [sample, sample]) == (None, 1), "parts of one image"
    assert count_images([sample], [sample, torch.randn(3)]) == (None, 1)
