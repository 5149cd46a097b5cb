"""Inner products of predictions are enough to know the error of every forecast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.tiny import TASKS, MakeSession
from samovar.core.errors import ModelError
from samovar.lab.fitting import Products
from samovar.lab.trajectory import WATCHED, RunWatch, early_products, read_products


def test_errors_are_those_of_the_predictions_themselves() -> None:
    torch.manual_seed(0)
    predictions = torch.randn(2, 4, 7, dtype=torch.float64)  # Two images, four steps.
    images = [Products.of({"*": list(image)}, [1.0] * 4, {"*": 1.0}) for image in predictions]
    weights = np.array([0.5, -1.0, 0, 0.25])
    expected = torch.einsum("s,psd->pd", torch.tensor(weights), predictions).pow(2).mean()
    assert weights @ Products.mean(images).values @ weights == pytest.approx(expected.item())
    assert early_products(images) is None


def test_a_run_is_watched_without_a_trace(make_session: MakeSession) -> None:
    session = make_session(steps=6)
    scheduler = session.runner.pipeline.scheduler
    before = set(vars(scheduler))
    row = session.exact(WATCHED)
    assert "step" not in vars(scheduler)
    assert before <= set(vars(scheduler))
    images = read_products(session.notes(WATCHED))
    assert len(images) == len(TASKS)
    products = Products.mean(images)
    assert len(products.sizes) == 6
    assert sum(products.sizes) == pytest.approx(float(scheduler.sigmas[0])), "the steps lead to no noise at all"
    assert products.branches == ("cond", "uncond")
    assert products.guidance == pytest.approx((2.0, -1.0), abs=1e-4), "as the guidance scale of 2 mixes them"
    assert row.quality.psnr == make_session(steps=6, name="bare").exact().quality.psnr
    bare = make_session(steps=6, name="bare")
    assert torch.equal(bare.exact_images(), session.exact_images()), "watching changes nothing"


def test_a_scheduler_that_cannot_be_watched_keeps_nothing(make_session: MakeSession) -> None:
    """One whose pipeline uses a copy of it: outputs of one image must not wait for those of the next."""
    scheduler = make_session(steps=2).runner.pipeline.scheduler
    scheduler.set_timesteps(2, mu=1.0)
    run = RunWatch(scheduler)
    run.post_forward(torch.nn.Identity(), torch.ones(1, 2))
    with pytest.raises(ModelError, match="called for 0 of 2 steps"):
        run()
    assert not run.outputs


def test_images_whose_branches_differ_are_known_by_their_predictions() -> None:
    torch.manual_seed(0)
    cond, uncond = torch.randn(2, 3, 7, dtype=torch.float64)
    named = Products.of({"a": list(cond), "b": list(uncond)}, [1.0] * 3, {"a": 2.0, "b": -1.0})
    note = {"sizes": [1.0] * 3, "products": [named.values.tolist()]}
    guidance = ({"a": 2.0, "b": -1.0}, {"c": 2.0, "d": -1.0})
    seen = read_products([{**note, "guidance": given} for given in guidance])
    predictions = 2 * cond - uncond
    assert seen[0].branches == ("*",)
    np.testing.assert_allclose(Products.mean(seen).values, (predictions @ predictions.T / 7).numpy())
