"""Weights are the least squares that they say they are, schedules the best, and a pipeline follows both."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from driving import COND, UNCOND, Plain, at, cached, recorded

from pipelines import PIPELINES
from samovar.cache import TeaCacheConfig, apply_teacache_hook
from samovar.cache.error_control import polynomial
from samovar.core.errors import SettingError
from samovar.hooks import call_context, current_context
from samovar.lab import fitting
from samovar.lab.fitting import FittedPlan, Products, fit_schedule, fit_weights

Outputs = dict[str, list[torch.Tensor]]
GUIDANCE = {"cond": 2.0, "uncond": -1.0}


def curves(steps: int, seed: int = 0, rough: float = 0.05) -> Outputs:
    """Outputs of two branches that change smoothly from step to step, and a little by chance."""
    draw = torch.Generator().manual_seed(seed)

    def branch(speed: float) -> list[torch.Tensor]:
        start, way, turn = (torch.randn(200, generator=draw, dtype=torch.float64) for _ in range(3))
        noise = torch.randn(steps, 200, generator=draw, dtype=torch.float64)
        return [
            start + way * speed * (i / steps) + turn * (speed * i / steps) ** 3 + rough * noise[i] for i in range(steps)
        ]

    return {"cond": branch(1.0), "uncond": branch(0.3)}


def sizes_of(steps: int) -> list[float]:
    """Uneven, as noise levels are."""
    return [-(1.0 + 0.5 * i / steps) / steps for i in range(steps)]


def watched(outputs: Outputs, guidance: Mapping[str, float] = GUIDANCE) -> Products:
    sizes = sizes_of(len(next(iter(outputs.values()))))
    return Products.of(outputs, sizes, {name: guidance[name] for name in outputs})


def drifts(outputs: Outputs, plan: FittedPlan, guidance: Mapping[str, float] = GUIDANCE) -> list[torch.Tensor]:
    """How far the latents are from the exact ones after each step, made of the tensors themselves."""
    sizes, drift, found = sizes_of(len(next(iter(outputs.values())))), torch.zeros(200, dtype=torch.float64), []
    for step, size in enumerate(sizes):
        for branch, own in outputs.items():
            if plan.schedules[branch][step] == ".":
                forecast = sum(weight * own[old] for old, weight in plan.weights[branch][step].items())
                drift = drift + size * guidance[branch] * (forecast - own[step])
        found.append(drift)
    return found


def forwards_of(plan: FittedPlan) -> int:
    return sum(mask.count("#") for mask in plan.schedules.values())


def rms(tensor: torch.Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt())


def cost(outputs: Outputs, plan: FittedPlan) -> float:
    """What a search is to make least: the last drift, and the mean of those before it."""
    squares = [rms(drift) ** 2 for drift in drifts(outputs, plan)]
    return squares[-1] + sum(squares[:-1]) / len(squares)


# ------------------------------------------------------------------------------------------------ weights


def test_the_first_weights_are_the_least_squares_of_the_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "DEPTH", 2)
    outputs = curves(6)
    plan = fit_weights(watched(outputs), {"cond": "###.##", "uncond": "###.##"})
    features = torch.stack([GUIDANCE[name] * outputs[name][old] for name in outputs for old in (1, 2)], dim=1)
    target = sum(GUIDANCE[name] * outputs[name][3] for name in outputs)
    assert isinstance(target, torch.Tensor)
    expected = torch.linalg.lstsq(features, target).solution.tolist()
    found = [weight for name in outputs for weight in plan.weights[name][3].values()]
    assert [list(plan.weights[name]) for name in outputs] == [[3], [3]]
    assert [list(plan.weights[name][3]) for name in outputs] == [[1, 2], [1, 2]]
    assert found == pytest.approx(expected, abs=2e-3)


def test_where_a_line_is_exact_so_are_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "DEPTH", 2)
    line = {"cond": [torch.ones(200).double() + i * torch.linspace(-1, 1, 200).double() for i in range(6)]}
    plan = fit_weights(watched(line), {"cond": "##...."})
    for step in range(2, 6):
        assert list(plan.weights["cond"][step].values()) == pytest.approx([1.0 - step, step], abs=1e-3)
    assert plan.drift < 1e-3


def test_a_later_step_makes_up_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first forecast lacked is not stored until later; the next one brings it."""
    monkeypatch.setattr(fitting, "DEPTH", 1)
    here, there = torch.eye(200, dtype=torch.float64)[:2]
    outputs = {"cond": [here, here, here + there, there, there]}
    plan = fit_weights(watched(outputs, {"cond": 1.0}), {"cond": "##.#."})
    sizes = sizes_of(5)
    assert plan.weights["cond"][2] == pytest.approx({1: 1.0}, abs=1e-4)
    assert plan.weights["cond"][4] == pytest.approx({3: 1.0 + sizes[2] / sizes[4]}, abs=1e-4)
    found = [rms(drift) for drift in drifts(outputs, plan, {"cond": 1.0})]
    assert found[3] == pytest.approx(abs(sizes[2]) * rms(there), rel=1e-3)
    assert found[4] < 1e-5


def test_the_drift_is_that_of_the_tensors() -> None:
    outputs = curves(12)
    plan = fit_weights(watched(outputs), {"cond": "##.#..#...#.", "uncond": "#...#....#.."})
    assert plan.drift == pytest.approx(rms(drifts(outputs, plan)[-1]), rel=1e-6)
    assert plan.drift > 0
    assert forwards_of(plan) == 8
    assert set(plan.weights["cond"]) == {2, 4, 5, 7, 8, 9, 11}


def test_fitted_weights_drift_less_than_a_line() -> None:
    outputs, mask = curves(16), "###.#..#...#..#."
    plan = fit_weights(watched(outputs), {"cond": mask, "uncond": mask})
    line: dict[str, dict[int, dict[int, float]]] = {name: {} for name in outputs}
    for name in outputs:
        for step in (step for step, sign in enumerate(mask) if sign == "."):
            known = [old for old in range(step) if mask[old] == "#"][:-3:-1]
            weights = [0.9 * weight for weight in polynomial(list(map(float, known)), float(step))]
            line[name][step] = dict(zip(known, [weights[0] + 0.1, *weights[1:]], strict=True))
    assert cost(outputs, plan) < 0.8 * cost(outputs, FittedPlan(plan.schedules, line, 0.0))


def test_weights_hold_for_runs_that_they_were_not_fitted_to() -> None:
    """Runs that change alike: what is learnt of some is good for others."""
    products = Products.mean([watched(curves(16, seed)) for seed in range(6)])
    plan = fit_weights(products, {"cond": "####.#.#..#..#.#", "uncond": "#.#.#...#...#..."})
    other = rms(drifts(curves(16, seed=99), plan)[-1])
    assert other < 2 * plan.drift


# ------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize("forwards", [2, 3, 4, 6])
def test_the_schedule_is_the_best_of_all(forwards: int) -> None:
    outputs = {"cond": curves(7, seed=4)["cond"]}
    products = watched(outputs)
    found = fit_schedule(products, forwards)
    every = [
        fit_weights(products, {"cond": [step == 0 or step in chosen for step in range(7)]})
        for chosen in itertools.combinations(range(1, 7), forwards - 1)
    ]
    assert forwards_of(found) == forwards
    assert cost(outputs, found) == pytest.approx(min(cost(outputs, plan) for plan in every), rel=0.05)


@pytest.mark.parametrize("forwards", [2, 3, 9, 15, 24])
def test_so_many_forwards_are_computed_as_were_asked_for(forwards: int) -> None:
    plan = fit_schedule(watched(curves(12)), forwards)
    assert forwards_of(plan) == forwards
    assert all(mask.startswith("#") and len(mask) == 12 for mask in plan.schedules.values())


def test_a_branch_that_stays_as_it_is_is_left_alone() -> None:
    outputs = curves(10)
    outputs["uncond"] = [outputs["uncond"][0].clone() for _ in range(10)]
    plan = fit_schedule(watched(outputs), 8)
    assert plan.schedules["uncond"].count("#") <= 2
    assert fit_schedule(watched(outputs), 8).drift < fit_schedule(watched(outputs), 8, together=True).drift


def test_branches_may_be_kept_together() -> None:
    plan = fit_schedule(watched(curves(10)), 8, together=True)
    assert plan.schedules["cond"] == plan.schedules["uncond"]
    assert forwards_of(plan) == 8


# ------------------------------------------------------------------------------------------------ products


def test_products_are_means_over_elements_and_runs() -> None:
    one, other = curves(3), curves(3, seed=1)
    rows = [torch.stack([tensor for own in outputs.values() for tensor in own]) for outputs in (one, other)]
    expected = sum(row @ row.T / 200 for row in rows) / 2
    assert isinstance(expected, torch.Tensor)
    both = Products.mean([watched(one), watched(other)])
    assert np.allclose(both.values, expected.numpy())
    assert (both.branches, both.guidance) == (("cond", "uncond"), (2.0, -1.0))


def refused(make: Any) -> str:
    with pytest.raises(SettingError) as refusal:
        make()
    return str(refusal.value)


@pytest.mark.parametrize("forwards", [0, 1, 25, 2.5, True])
def test_a_wrong_number_of_forwards_is_refused(forwards: Any) -> None:
    says = refused(lambda: fit_schedule(watched(curves(12)), forwards))
    assert f"forwards={forwards!r}" in says
    assert "from 2" in says
    assert "to 24" in says


def test_what_does_not_go_together_is_refused() -> None:
    outputs, products = curves(4), watched(curves(4))
    assert "a multiple" in refused(lambda: fit_schedule(products, 5, together=True))
    assert "'cond', 'uncond'" in refused(lambda: fit_weights(products, {"cond": "#..."}))
    assert "4 steps" in refused(lambda: fit_weights(products, {"cond": "#..", "uncond": "#.."}))
    assert "'cond': 4" in refused(lambda: Products.of(outputs, [1.0] * 3, GUIDANCE))
    assert "same branches" in refused(lambda: Products.of(outputs, [1.0] * 4, {"cond": 1.0}))
    assert "0 runs" in refused(lambda: Products.mean([]))
    assert "2 runs" in refused(lambda: Products.mean([products, watched(curves(5))]))
    assert "(3, 3)" in refused(lambda: Products(("*",), (1.0,), (1.0, 1.0), np.eye(3)))
    outputs["cond"][2][7] = math.nan
    assert "not finite" in refused(lambda: watched(outputs))


@pytest.mark.parametrize("steps", [6, 12, 28])
def test_any_number_of_forwards_can_be_planned_after_any_beginning(steps: int) -> None:
    products = watched(curves(steps))
    for exact in (1, 3, steps // 2, steps):
        for computed in {exact, exact + 1, (exact + steps) // 2, steps - 1, steps}:
            if exact <= computed <= steps:
                begin = {"cond": "#" * exact, "uncond": "#" * exact}
                plan = fit_schedule(products, 2 * computed, together=True, begin=begin)
                assert forwards_of(plan) == 2 * computed
                assert plan.schedules["cond"].startswith("#" * exact)


def test_a_beginning_that_cannot_be_is_refused() -> None:
    products = watched(curves(6))
    for begin in ({"cond": "##"}, {"cond": "##", "other": "##"}, {"cond": "#" * 7, "uncond": "#" * 7}):
        assert "begin={'cond': " in refused(lambda begin=begin: fit_schedule(products, 8, begin=begin))  # type: ignore[misc]
    both = {"cond": "###", "uncond": "###"}
    assert "at most 4 of them computed" in refused(lambda: fit_schedule(products, 4, begin=both))
    skipping = {"cond": "#..", "uncond": "#.."}
    assert "room for the others" in refused(lambda: fit_schedule(products, 10, begin=skipping))


# ------------------------------------------------------------------------------------------------ in use


def test_settings_go_through_json() -> None:
    plan = fit_schedule(watched(curves(10)), 9)
    config = TeaCacheConfig.read(json.loads(json.dumps(plan.settings())))
    for branch, mask in plan.schedules.items():
        assert config.mask_for(branch) == tuple(sign == "#" for sign in mask)
        for step, row in plan.weights[branch].items():
            assert config.rows_for(branch)[step] == pytest.approx(row, rel=1e-5)


SAVED: dict[str, Any] = {
    "forecast": "fitted",
    "forecast_of": "output",
    "schedule": {"cond": "##.#.#..", "uncond": "#...##.#"},
    "forecast_weights": {
        "cond": {2: {0: -1.0, 1: 2.0}, 4: {1: -0.5, 3: 1.5}, 6: {3: 0.25, 5: 0.75}, 7: {3: -1.0, 5: 2.0}},
        "uncond": {1: {0: 1.0}, 2: {0: 0.5}, 3: {0: 0.25}, 6: {4: -2.0, 5: 3.0}},
    },
}


def told(model: torch.nn.Module, branches: Sequence[str], **changed: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """A loop of one's own over some branches; `changed` is conditioning of another content at one step."""
    outputs: dict[str, list[torch.Tensor]] = {branch: [] for branch in branches}
    for step, branch in itertools.product(range(8), branches):
        conditioning = changed.get(f"{branch}{step}", COND if branch == "cond" else UNCOND)
        with torch.no_grad(), call_context(branch=branch):
            outputs[branch].append(model(*at(step, 8), conditioning))
    return outputs


def reasons(hook: Any, branch: str) -> list[str]:
    return [record.reason for record in hook.stats().branches[branch].steps]


def test_each_branch_has_its_own_steps_and_weights() -> None:
    model, bare = Plain(), told(Plain(), ("cond", "uncond"))
    hook = apply_teacache_hook(model, SAVED)
    found = told(model, ("cond", "uncond"))
    for branch, outputs in found.items():
        assert hook.stats().branches[branch].mask == SAVED["schedule"][branch]
        for step, output in enumerate(outputs):
            row = SAVED["forecast_weights"][branch].get(step)
            if row is None:
                assert torch.equal(output, bare[branch][step])
            else:
                expected = torch.stack([weight * bare[branch][old] for old, weight in row.items()]).sum(0)
                assert torch.allclose(output, expected, atol=1e-6)
    hook.detach()
    after = told(model, ("cond", "uncond"))
    assert all(torch.equal(a, b) for branch in after for a, b in zip(after[branch], bare[branch], strict=True))


def test_a_branch_without_a_schedule_is_computed() -> None:
    model, bare = Plain(), told(Plain(), ("third",))["third"]
    hook = apply_teacache_hook(model, SAVED)
    found = told(model, ("cond", "third"))
    assert all(map(torch.equal, found["third"], bare))
    assert set(reasons(hook, "third")) == {"no schedule for this branch"}
    assert hook.stats().branches["cond"].mask == SAVED["schedule"]["cond"]


def test_no_forecast_spans_a_change_of_conditioning() -> None:
    """Another conditioning at a skipped step: that step is computed, and so are those made of steps before it."""
    model, bare = Plain(), told(Plain(), ("cond",))["cond"]
    hook = apply_teacache_hook(model, SAVED)
    found = told(model, ("cond",), cond4=COND * 3)["cond"]
    assert hook.stats().branches["cond"].mask == "##.#####"
    assert reasons(hook, "cond")[4] == "conditioning changed"
    assert not torch.equal(found[4], bare[4])
    assert all(map(torch.equal, found[5:], bare[5:]))


def test_where_a_run_begins_half_way_steps_without_what_they_rest_on_are_computed() -> None:
    tiny = Plain()
    hook = apply_teacache_hook(tiny, SAVED)
    with torch.no_grad(), call_context(branch="cond"):
        tiny(*at(0, 8), COND)
        hook.state_manager.states()[current_context()].outputs.clear()
        outputs = [tiny(*at(step, 8), COND) for step in range(1, 8)]
    assert hook.stats().branches["cond"].mask == "####.#.."
    assert "a step that its forecast needs is not stored" in reasons(hook, "cond")
    assert len(outputs) == 7


def watched_run(pipe: Any, steps: int, seed: int) -> tuple[torch.Tensor, Outputs]:
    """The latents of a run, and what its denoiser gave."""
    with recorded(pipe.transformer) as recorder:
        latents = PIPELINES["flux"].run(pipe, steps, seed)
    given = [output.double().flatten() for output in recorder.outputs]
    return latents.double(), {"cond": given[::2], "uncond": given[1::2]}


def test_a_pipeline_follows_the_plan_and_drifts_as_expected() -> None:
    steps, pipe = 10, PIPELINES["flux"].build(0)
    runs = [watched_run(pipe, steps, seed)[1] for seed in range(2)]
    sizes = pipe.scheduler.sigmas.diff().tolist()
    plan = fit_schedule(Products.mean([Products.of(outputs, sizes, GUIDANCE) for outputs in runs]), 9)
    exact, _ = watched_run(pipe, steps, seed=3)
    backend = cached(pipe, **plan.settings())
    latents, outputs = watched_run(pipe, steps, seed=3)
    branches = backend.stats().denoisers["transformer"].branches
    assert {name: branch.mask for name, branch in branches.items()} == plan.schedules
    for branch, own in outputs.items():
        for step, row in plan.weights[branch].items():
            expected = torch.stack([weight * own[old] for old, weight in row.items()]).sum(0)
            assert torch.allclose(own[step], expected, atol=1e-5)
    assert rms(latents - exact) < 3 * plan.drift
    assert 30 * plan.drift < rms(exact)
