"""Weights that are fitted on the way are those of the run that the cache makes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from lab.tiny import TASKS, MakeSession
from samovar.core.errors import ModelError
from samovar.lab.journal import Journal
from samovar.lab.methods import EXACT, Method, cached
from samovar.lab.planner import Planner, even_mask
from samovar.lab.session import Session


def images(session: Session, method: Method) -> torch.Tensor:
    with session.runner.under(method) as make:
        return torch.cat([make([task]).images for task in session.tasks])


@pytest.mark.parametrize("batch", [1, 3])
def test_a_schedule_is_nearer_than_reuse(make_session: MakeSession, batch: int) -> None:
    session = make_session(batch=batch)
    planner = Planner(session)
    exact = images(session, EXACT)
    for computed in (8, 6, 4):
        method = planner.method(computed)
        mask = method.settings["schedule"]
        assert (len(mask), mask[:3]) == (10, "###")
        assert computed - 2 <= mask.count("#") <= computed
        reused = images(session, cached("tea_cache", {"schedule": mask, "forecast_of": "output"}))
        assert 0 < (images(session, method) - exact).norm() < 0.8 * (reused - exact).norm()


def test_the_cache_goes_the_way_that_was_fitted(make_session: MakeSession) -> None:
    """The last pass was made with forecasts; the same weights in a cache lead to the same samples."""
    session = make_session(batch=3)
    planner, seen = Planner(session), list[torch.Tensor]()
    own = type(session.runner.pipeline.scheduler).step

    def step(scheduler: Any, output: torch.Tensor, t: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(sample)
        return own(scheduler, output, t, sample, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session.runner.pipeline.scheduler), "step", step)
        method = planner.method(6)
        fitted = seen[-10:]
        seen.clear()
        with session.runner.under(method) as make:
            make(TASKS)
    assert torch.allclose(torch.stack(seen), torch.stack(fitted), atol=1e-4)


def test_what_was_planned_is_kept(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(batch=3)
    first = Planner(session).method(6)
    again = Session(session.runner, TASKS, Journal(session.journal.folder, {"steps": 10}))
    monkeypatch.delattr(type(session.runner), "under")  # Nothing is run again.
    assert Planner(again).method(6).settings == first.settings


def test_a_sampler_whose_way_is_not_the_prediction(make_session: MakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the weights are fitted to what the model returns."""
    session = make_session(batch=3)
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    monkeypatch.setattr(session.runner.pipeline, "scheduler", scheduler)
    planner = Planner(session)
    method = planner.method(6)
    assert not planner._watched().is_flow
    exact = images(session, EXACT)
    assert (images(session, method) - exact).norm() < 0.2 * exact.norm()


def test_a_pipeline_that_uses_a_copy_of_its_scheduler(make_session: MakeSession) -> None:
    session = make_session()
    pipeline: Any = session.runner.pipeline
    scheduler = pipeline.scheduler
    own = type(pipeline).__call__
    pipeline.__class__ = type("Copying", (type(pipeline),), {})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scheduler = type(scheduler).from_config(scheduler.config)
        try:
            return own(self, *args, **kwargs)
        finally:
            self.scheduler = scheduler

    type(pipeline).__call__ = call
    try:
        with pytest.raises(ModelError, match=r"step was called 0 times in 10 steps.*cache='auto'"):
            Planner(session).method(6)
        assert "step" not in vars(scheduler), "and nothing stays on it"
    finally:
        pipeline.__class__ = type(pipeline).__mro__[1]


@pytest.mark.parametrize(("steps", "computed"), [(10, 4), (28, 11), (28, 15), (50, 16), (10, 10), (10, 2), (28, 3)])
def test_even_masks(steps: int, computed: int) -> None:
    mask = even_mask(steps, computed)
    assert (len(mask), mask.count("#")) == (steps, computed)
    assert mask.startswith("#" * min(3, computed))
    gaps = [len(gap) for gap in mask[3:].split("#")[:-1]]
    assert computed < 4 or (mask[-1] == "#" and max(gaps) - min(gaps) <= 1)
