"""Inner products of predictions are enough to know the error of every forecast."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.tiny import TASKS, MakeSession
from samovar.errors import ModelError
from samovar.lab.trajectory import BranchWatchHook, Trajectory, _SchedulerWatch, watched_exact


def test_errors_are_those_of_the_predictions_themselves() -> None:
    torch.manual_seed(0)
    predictions = torch.randn(2, 4, 7, dtype=torch.float64)  # Two pictures, four steps.
    trajectory = Trajectory((0, 1, 2, 3), (1, 1, 1, 1), predictions @ predictions.mT)
    weights = np.array([0.5, -1.0, 0, 0.25])
    expected = torch.einsum("s,psd->pd", torch.tensor(weights), predictions).pow(2).sum(-1).mean()
    assert trajectory.together.size(weights) == pytest.approx(expected.item())
    reuse = trajectory.reuse_errors()
    distance = (predictions[:, 1] - predictions[:, 3]).norm(dim=-1) / predictions[:, 3].norm(dim=-1)
    torch.testing.assert_close(reuse[1, 3], distance.mean())
    assert reuse.diagonal().abs().max() < 1e-6


def test_a_run_is_watched_without_a_trace(make_session: MakeSession) -> None:
    session = make_session(steps=6)
    scheduler = session.studio.pipeline.scheduler
    before = set(vars(scheduler))
    watched = watched_exact()
    row = session.exact(watched)
    assert "step" not in vars(scheduler)
    assert before <= set(vars(scheduler))
    trajectory = Trajectory.read(session.notes(watched))
    assert trajectory.products.shape == (len(TASKS), 6, 6)
    assert trajectory.steps == 6
    assert list(trajectory.places) == sorted(trajectory.places), "less noise is further on"
    assert sum(trajectory.sizes) == -trajectory.places[0], "the steps lead to no noise at all"
    by_branch = trajectory.by_branch
    assert by_branch is not None
    assert by_branch.branches == ("cond", "uncond")
    assert by_branch.guidance == pytest.approx((2.0, -1.0), abs=1e-4), "as the guidance scale of 2 mixes them"
    mixed = torch.tensor(by_branch.guidance, dtype=torch.float64).repeat_interleave(6)
    values = torch.from_numpy(by_branch.values) * mixed[:, None] * mixed
    sums = values.view(2, 6, 2, 6).sum((0, 2))
    torch.testing.assert_close(sums, trajectory.products.mean(0), rtol=1e-3, atol=1e-6)
    assert row.quality.psnr == make_session(steps=6, name="bare").exact().quality.psnr
    bare = make_session(steps=6, name="bare")
    assert torch.equal(bare.exact_pictures(), session.exact_pictures()), "watching changes nothing"


def test_a_scheduler_that_cannot_be_watched_keeps_nothing(make_session: MakeSession) -> None:
    """One whose pipeline uses a copy of it: outputs of one picture must not wait for those of the next."""
    scheduler = make_session(steps=2).studio.pipeline.scheduler
    scheduler.set_timesteps(2, mu=1.0)
    branches = BranchWatchHook()
    branches.post_forward(torch.nn.Identity(), torch.ones(1, 2))
    with pytest.raises(ModelError, match="asked for 0 of 2 steps"):
        _SchedulerWatch(scheduler, branches).notes()
    assert not branches._outputs
