"""Weights that are fitted on the way are those of the run that the cache makes with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler

from lab.tiny import TASKS, MakeSession
from samovar.cache import TeaCacheConfig
from samovar.lab.closed_loop import ClosedLoop, even_mask, settings_of
from samovar.lab.methods import EXACT, Method, cached
from samovar.lab.session import Session

MASK = "###.#..#.#"


def images(session: Session, method: Method) -> torch.Tensor:
    with session.runner.under(method) as make:
        return torch.cat([make(tasks).images for tasks in session.runner.batches(session.tasks)])


def made_in_the_loop(session: Session, loop: ClosedLoop) -> torch.Tensor:
    """The images of a pass with the weights that were found."""
    loop._loop.mask, loop._loop.weights, found = MASK, loop.fit(MASK), []
    with session.runner.under(Method("loop", EXACT.family, attached=loop._loop.on)) as make:
        for number, tasks in enumerate(session.runner.batches(session.tasks)):
            loop._loop.begin(number)
            found.append(make(tasks).images)
    return torch.cat(found)


@pytest.mark.parametrize("batch", [1, 3])
def test_the_cache_goes_the_way_that_was_fitted(make_session: MakeSession, batch: int) -> None:
    session = make_session(tasks=TASKS, batch=batch)
    loop = ClosedLoop(session)
    settings = settings_of(MASK, loop.fit(MASK))
    assert TeaCacheConfig.read(settings).never_skips is False
    ours = images(session, cached("tea_cache", settings))
    assert torch.allclose(ours, made_in_the_loop(session, loop), atol=1e-4)


def test_it_is_nearer_than_reuse(make_session: MakeSession) -> None:
    session = make_session(tasks=TASKS, batch=3)
    exact = images(session, EXACT)
    fitted = images(session, cached("tea_cache", settings_of(MASK, ClosedLoop(session).fit(MASK))))
    reused = images(session, cached("tea_cache", {"schedule": MASK, "forecast_of": "output"}))
    assert 0 < (fitted - exact).norm() < 0.5 * (reused - exact).norm()


def test_what_was_fitted_is_kept(make_session: MakeSession) -> None:
    session = make_session(tasks=TASKS, batch=3)
    first = ClosedLoop(session).fit(MASK)
    session.runner._worker.pipeline = None  # Nothing is run again.
    assert ClosedLoop(session).fit(MASK) == first


def test_a_schedule_is_found_on_the_way(make_session: MakeSession) -> None:
    session = make_session(tasks=TASKS, batch=3)
    masks = [ClosedLoop(session).seek(computed) for computed in (8, 6, 4)]
    for mask, computed in zip(masks, (8, 6, 4), strict=True):
        assert len(mask) == session.runner.steps
        assert mask.startswith("###")
        assert computed - 2 <= mask.count("#") <= computed
    session.runner._worker.pipeline = None  # Nothing is run again.
    assert ClosedLoop(session).seek(6) == masks[1]


def test_a_sampler_whose_way_is_not_the_prediction(make_session: MakeSession) -> None:
    """Then the weights are fitted to what the model returns."""
    session = make_session(tasks=TASKS, batch=3)
    pipeline: Any = session.runner.pipeline
    own = pipeline.scheduler
    pipeline.scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    try:
        loop = ClosedLoop(session)
        rows = loop.fit(MASK)
        assert not loop._loop._is_flow
        assert set(rows) == {3, 5, 6, 8}
        exact = images(session, EXACT)
        fitted = images(session, cached("tea_cache", settings_of(MASK, rows)))
        assert (fitted - exact).norm() < 0.2 * exact.norm()
    finally:
        pipeline.scheduler = own


@pytest.mark.parametrize(("steps", "computed"), [(10, 4), (28, 11), (28, 15), (50, 16), (10, 10), (10, 2), (28, 3)])
def test_even_masks(steps: int, computed: int) -> None:
    mask = even_mask(steps, computed)
    assert (len(mask), mask.count("#")) == (steps, computed)
    assert mask.startswith("#" * min(3, computed))
    gaps = [len(gap) for gap in mask[3:].split("#")[:-1]]
    assert computed < 4 or (mask[-1] == "#" and max(gaps) - min(gaps) <= 1)
