"""Weights that are fitted on the way are those of the run that the cache makes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from lab.tiny import TASKS, MakeSession
from samovar.core.errors import ModelError
from samovar.lab import Journal, Method, Session, cached
from samovar.lab.methods import EXACT
from samovar.lab.planner import Planner, even_mask


def images(session: Session, method: Method) -> torch.Tensor:
    with session.runner.under(method) as make:
        return torch.cat([make([task]).images for task in session.tasks])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_schedule_is_nearer_than_reuse(
    make_session: MakeSession, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session(batch=batch)
    planner, exact = Planner(session), images(session, EXACT)
    for computed in (8, 4):
        method = planner.method(computed)
        mask = method.settings["schedule"]
        assert (len(mask), mask[:3]) == (10, "###")
        assert computed - 2 <= mask.count("#") <= computed
        reused = images(session, cached("tea_cache", {"schedule": mask, "forecast_of": "output"}))
        assert 0 < (images(session, method) - exact).norm() < 0.8 * (reused - exact).norm()
    again = Session(session.runner, TASKS, Journal(session.journal.folder, {"steps": 10}))
    monkeypatch.delattr(type(session.runner), "under")  # What was planned is kept: nothing is run again.
    assert Planner(again).method(4).settings == method.settings


def test_the_cache_goes_the_way_that_was_fitted(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last pass was made with forecasts; the same weights in a cache lead to the same samples."""
    session = make_session(batch=3)
    scheduler, seen = type(session.runner.pipeline.scheduler), list[torch.Tensor]()
    own = scheduler.step

    def step(self: Any, output: torch.Tensor, t: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(sample)
        return own(self, output, t, sample, *args, **kwargs)

    monkeypatch.setattr(scheduler, "step", step)
    method = Planner(session).method(6)
    with session.runner.under(method) as make:
        make(TASKS)
    assert torch.allclose(torch.stack(seen[-10:]), torch.stack(seen[-20:-10]), atol=1e-4)


def test_a_sampler_whose_way_is_not_the_prediction(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the weights are fitted to what the model returns."""
    session = make_session(batch=3)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    monkeypatch.setattr(session.runner.pipeline, "scheduler", scheduler)
    method, exact = Planner(session).method(6), images(session, EXACT)
    assert (images(session, method) - exact).norm() < 0.2 * exact.norm()


def test_a_pipeline_that_uses_a_copy_of_its_scheduler(
    make_session: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = make_session()
    cls, scheduler = type(session.runner.pipeline), session.runner.pipeline.scheduler
    own = cls.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scheduler = type(scheduler).from_config(scheduler.config)
        try:
            return own(self, *args, **kwargs)
        finally:
            self.scheduler = scheduler

    monkeypatch.setattr(cls, "__call__", call)
    with pytest.raises(ModelError, match=r"step was called 0 times in 10 steps.*cache='auto'"):
        Planner(session).method(6)
    assert "step" not in vars(scheduler), "and nothing stays on it"


@pytest.mark.parametrize(("steps", "computed"), [(10, 4), (28, 11), (50, 16), (10, 10), (10, 2), (28, 3)])
def test_even_masks(steps: int, computed: int) -> None:
    mask = even_mask(steps, computed)
    assert (len(mask), mask.count("#")) == (steps, computed)
    assert mask.startswith("#" * min(3, computed))
    gaps = [len(gap) for gap in mask[3:].split("#")[:-1]]
    assert computed < 4 or (mask[-1] == "#" and max(gaps) - min(gaps) <= 1)
