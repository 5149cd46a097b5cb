"""What pipelines will hand to their models is foreseen in every form, to the bit, and nothing else is claimed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.hooks import Run
from samovar.offload.timesteps import MAX_AHEAD, coming_inputs


class Scheduler:
    def __init__(self, timesteps: Any, sigmas: Any = None) -> None:
        self.timesteps, self.sigmas = timesteps, sigmas


class Pipeline:
    def __init__(self, timesteps: Any, sigmas: Any = None) -> None:
        self.scheduler = Scheduler(timesteps, sigmas)


TIMES = torch.tensor([999.0, 749.5, 500.25, 250.125])
FORMS = {
    "as they are": lambda t: t,
    "thousandths": lambda t: t / 1000,
    "reversed": lambda t: 1 - t / 1000,
    "reversed thousandths": lambda t: (1000 - t) / 1000,
    "bfloat16": lambda t: t.to(torch.bfloat16),
    "bfloat16, then thousandths": lambda t: t.to(torch.bfloat16) / 1000,
    "thousandths, then bfloat16": lambda t: (t / 1000).to(torch.bfloat16),
    "half": lambda t: (t / 1000).half(),
    "double": lambda t: t.double() / 1000,
    "long": lambda t: t.long(),
}


def foresee(pipeline: Any, *given: torch.Tensor) -> list[list[torch.Tensor]]:
    return coming_inputs(Run(pipeline, "request"), given)


def holds(steps: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> bool:
    """Whether one of the steps is this one, bit for bit, as it lies in memory."""
    return any(
        all(
            torch.equal(one, two) and one.dtype == two.dtype and (one.numel() == 1 or one.stride() == two.stride())
            for one, two in zip(step, expected, strict=True)
        )
        for step in steps
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("now", range(4))
def test_every_form(form: str, now: int) -> None:
    pipeline = Pipeline(TIMES)
    given = [FORMS[form](t).expand(2) for t in TIMES]
    steps = foresee(pipeline, given[now])
    for later in given[now + 1 :]:
        assert holds(steps, [later])


def test_nothing_comes_after_the_last_step() -> None:
    assert foresee(Pipeline(TIMES), TIMES[-1:]) == []


def test_what_does_not_follow_the_scheduler_stays() -> None:
    pooled, guidance = torch.randn(1, 8), torch.tensor([3.5])
    steps = foresee(Pipeline(TIMES), TIMES[:1] / 1000, pooled, guidance)
    for later in TIMES[1:]:
        assert holds(steps, [(later / 1000).expand(1).clone(), pooled, guidance])


def test_two_times_go_along() -> None:
    sigmas = torch.tensor([0.9, 0.6, 0.3, 0.1, 0.0])
    pipeline = Pipeline(TIMES, sigmas)
    steps = foresee(pipeline, TIMES[:1], sigmas[:1])
    for step in range(1, 4):
        assert holds(steps, [TIMES[step : step + 1], sigmas[step : step + 1]])


def test_a_guidance_that_has_the_value_of_the_first_time() -> None:
    times, guidance = torch.tensor([1.0, 0.75, 0.5]), torch.ones(1)
    steps = foresee(Pipeline(times), times[:1], guidance)
    assert all(holds(steps, [later.reshape(1), guidance]) for later in times[1:])


def test_a_time_for_each_token() -> None:
    def times(t: torch.Tensor) -> torch.Tensor:
        given = t.expand(1, 6).clone()
        given[:, :2] = 0
        return given

    steps = foresee(Pipeline(TIMES), times(TIMES[0]))
    for later in TIMES[1:]:
        assert holds(steps, [times(later)])


def test_repeated_times_are_computed_once() -> None:
    heun = torch.tensor([900.0, 700.0, 700.0, 500.0, 500.0, 300.0])
    assert len(foresee(Pipeline(heun), heun[:1])) == 3


def test_no_more_than_a_limit() -> None:
    times = torch.arange(1000, 0, -1).float()
    assert len(foresee(Pipeline(times), times[:1])) == MAX_AHEAD


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(None),
        Pipeline([999, 500]),
        Pipeline(TIMES.to("meta")),
        Pipeline(torch.zeros(2, 2)),
        Pipeline(torch.zeros(0)),
        type("Bare", (), {})(),
    ],
)
def test_schedulers_that_say_nothing(pipeline: Any) -> None:
    assert foresee(pipeline, TIMES[:1]) == []


def test_no_run_and_odd_tensors() -> None:
    assert coming_inputs(None, [TIMES[:1]]) == []
    odd = [torch.zeros(0), torch.ones(2, dtype=torch.bool), TIMES[:1].to("meta"), torch.tensor([float("nan")])]
    assert all(foresee(Pipeline(TIMES), tensor) == [] for tensor in odd)
    assert foresee(Pipeline(TIMES)) == []


def test_a_pipeline_that_is_gone() -> None:
    run = Run(Pipeline(TIMES), "request")
    assert coming_inputs(run, [TIMES[:1]]) == []
