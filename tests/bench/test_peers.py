"""Caches of others go on and off the pipeline, and what they skip is counted like ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.caches import PeerGuard, peers
from lab.tiny import TASKS, MakeRunner
from samovar.lab.methods import EXACT


def test_every_peer_that_runs_skips_and_comes_off(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=10)
    methods = peers(runner, TASKS[:1])
    families = dict.fromkeys(method.family for method in methods)
    assert {"diffusers FirstBlockCache", "diffusers TaylorSeer lite", "diffusers MagCache"} <= set(families)
    assert len({method.key for method in methods}) == len(methods)
    with runner.under(EXACT) as make:
        exact = make(TASKS[:1])
    for family in families:
        method = [method for method in methods if method.family == family][-1]
        with runner.under(method) as make:
            made = make(TASKS[:1])
        if family == "diffusers SeaCache":  # It needs a step from the pipeline, which FLUX's does not give.
            assert made.report["computed"] == 1.0
        else:
            assert made.report["computed"] < 1.0, f"{family} skips nothing at its strongest"
    with runner.under(EXACT) as make:
        assert torch.equal(make(TASKS[:1]).images, exact.images), "no peer left anything behind"


def test_a_fixed_rhythm_is_counted_right(make_runner: MakeRunner) -> None:
    runner = make_runner(steps=10)
    (every_third,) = [m for m in peers(runner, TASKS[:1]) if m.name == "diffusers TaylorSeer lite every 3"]
    assert not every_third.is_adaptive
    with runner.under(every_third) as make:
        assert make(TASKS[:1]).report["computed"] == 0.6, "the first four, and every third of the rest"


def test_a_model_that_peers_do_not_know(make_runner: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(steps=4)

    def refuse(self: Any, config: Any) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr(type(runner.pipeline.transformer), "enable_cache", refuse)
    mag = [method for method in peers(runner, TASKS[:1]) if method.family == "diffusers MagCache"]
    with pytest.raises(ValueError, match="not this one"), runner.under(mag[0]):
        pass
    for method in mag:
        with PeerGuard(method) as guard, runner.under(method):
            pass
        assert guard.problem == "ValueError: not this one"
