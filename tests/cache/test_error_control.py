"""The estimated drift is what a forecast really does to the sample, whatever the sampler and the guidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from samovar.cache.error_control import ErrorControl, Path, Step, Weights, worst_drifts

IMAGES, SIZE = 3, 65536
INDICES = [7, 5, 4, 2]
"""Of the computed steps, the newest first."""
Way = Callable[[torch.Tensor, list[torch.Tensor], list[torch.Tensor]], torch.Tensor]
"""From the sample and the guided outputs of this step and the one before to the next sample."""


def guided(outputs: list[torch.Tensor], scale: float) -> torch.Tensor:
    cond, uncond = outputs
    return uncond + scale * (cond - uncond)


def noisy(sample: torch.Tensor) -> torch.Tensor:
    return 0.3 * torch.randn(sample.shape, generator=torch.Generator().manual_seed(9))


SAMPLERS: dict[str, Way] = {
    "euler": lambda x, now, before: x - 0.04 * guided(now, 4.5),
    "no guidance": lambda x, now, before: x - 0.04 * now[0],
    "second order": lambda x, now, before: x - 0.04 * (1.5 * guided(now, 3.0) - 0.5 * guided(before, 3.0)),
    "scaled samples": lambda x, now, before: 0.93 * x - 0.2 * guided(now, 2.0),
    "stochastic": lambda x, now, before: x - 0.05 * guided(now, 4.5) + noisy(x),
}
ANSWERS: dict[str, tuple[float, float]] = {
    "euler": (-0.04 * 4.5, 0.04 * 3.5),
    "no guidance": (-0.04, 0.0),
    "second order": (-0.04 * 3.0, 0.04 * 2.0),
    "scaled samples": (-0.2 * 2.0, 0.2),
    "stochastic": (-0.05 * 4.5, 0.05 * 3.5),
}
"""What an error of each branch is multiplied by; of second order, over both steps that it affects."""


def outputs(seed: int) -> list[list[torch.Tensor]]:
    """Two branches that are alike, each with four outputs that are alike, the newest first."""
    torch.manual_seed(seed)
    base = torch.randn(IMAGES, SIZE)
    branches = []
    for apart in (0.0, 0.3):
        steps = [base + apart * torch.randn(IMAGES, SIZE)]
        for _ in range(3):
            steps.append(steps[-1] + 0.15 * torch.randn(IMAGES, SIZE))
        branches.append(steps)
    return branches


def by_step(weights: Sequence[float], indices: Sequence[int] = INDICES) -> Weights:
    return dict(zip(indices, weights, strict=False))


def gone(*samples: torch.Tensor) -> Path:
    """A path through these samples."""
    path = Path()
    for sample in samples:
        path.move((sample,))
    return path


def drifts(
    sample: torch.Tensor,
    after: torch.Tensor,
    branches: list[list[torch.Tensor]],
    weights: list[float],
    given: tuple[float, ...] = (1.0,),
) -> list[float]:
    """Of each image on its own, where the step before was computed."""
    gram = gone(sample, after).products([[(step,) for step in of] for of in branches], 1).numpy()
    control, forecast = controlled(by_step(given), by_step([1.0], INDICES[1:])), by_step(weights, INDICES[1:])
    each = [worst_drifts(one[None], control, [forecast])[0] for one in gram]
    assert worst_drifts(gram, control, [forecast]) == pytest.approx([max(each)])
    return each


def controlled(given: Weights, given_before: Weights) -> ErrorControl:
    """A control to which the sampler was given these."""
    control = ErrorControl()
    control.computed, control.given, control.given_before = [Step(index) for index in INDICES], given, given_before
    return control


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("weights", [[1.0], [2.0, -1.0], [2.5, -2.0, 0.5]])
def test_the_drift_is_that_of_the_sampler(name: str, weights: list[float]) -> None:
    branches = outputs(0)
    sample = torch.randn(IMAGES, SIZE) * torch.tensor([[1.0], [2.0], [0.5]])
    after = SAMPLERS[name](sample, [of[0] for of in branches], [of[1] for of in branches])
    found = drifts(sample, after, branches, weights)
    errors = [sum(w * old for w, old in zip(weights, of[1:], strict=False)) - of[0] for of in branches]
    drift = sum(answer * error for answer, error in zip(ANSWERS[name], errors, strict=True))
    expected = drift.norm(dim=1) / sample.norm(dim=1)
    assert found == pytest.approx(expected.tolist(), rel=0.15 if name == "stochastic" else 0.01)


def test_what_the_sampler_was_given_may_be_corrected() -> None:
    """Then its answer is to that, and not to what the model returned."""
    branches, given = outputs(6), (1.8, -1.0, 0.2)
    for of in branches:
        of[1:] = [step - 0.5 * number * of[0] for number, step in enumerate(of[1:], 1)]
    sample = torch.randn(IMAGES, SIZE)
    corrected = [sum(w * step for w, step in zip(given, of, strict=False)) for of in branches]
    after = sample - 0.04 * guided(corrected, 4.5)
    exact = drifts(sample, sample - 0.04 * guided([of[0] for of in branches], 4.5), branches, [1.0])
    assert drifts(sample, after, branches, [1.0], given) == pytest.approx(exact, rel=0.01)
    assert drifts(sample, after, branches, [1.0]) != pytest.approx(exact, rel=0.1)


def test_what_is_only_read_does_not_count() -> None:
    """A picture to be edited goes through the model beside the sample; the output for it is not used."""
    branches = outputs(2)
    sample = torch.randn(IMAGES, SIZE)
    after = sample - 0.04 * guided([of[0] for of in branches], 2.0)
    alone = drifts(sample, after, branches, [1.0])
    picture, junk = 9 * torch.randn(IMAGES, SIZE), 99 * torch.randn(IMAGES, 4, SIZE)
    with_junk = [[torch.cat([step, junk[:, i]], 1) for i, step in enumerate(of)] for of in branches]
    both = torch.cat([sample, picture], 1), torch.cat([after, picture], 1)
    assert drifts(*both, with_junk, [1.0]) == pytest.approx(alone, rel=1e-3)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_an_infinite_drift(number: float) -> None:
    branches = outputs(3)
    sample = torch.randn(IMAGES, SIZE)
    after = sample - 0.04 * branches[0][0]
    branches[0][0][1, 7] = number
    found = drifts(sample, after, branches, [1.0])
    assert found[1] == math.inf
    assert all(0 < drift < 1 for drift in (found[0], found[2]))
