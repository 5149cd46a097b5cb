"""Outliers are recognised by their forecast, go on with their own schedule, and get exactly its bits."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch
from driving import COND, UNCOND, Plain, at, cached, recorded

import zoo
from pipelines import PIPELINES
from samovar.cache import apply_teacache_hook
from samovar.cache.schedule import find_outliers
from samovar.core.errors import SettingError
from samovar.hooks import call_context
from samovar.lab.fitting import OUTLIER_SHARE, Products, fit_outliers, fit_schedule, outlier_step

FLUX = PIPELINES["flux"]
GUIDANCE = {"cond": 2.0, "uncond": -1.0}
USUAL, MORE = "###....#", "###.##.#"


def line(mask: str) -> dict[str, dict[str, float]]:
    """Weights of a line through the last two computed steps, for every skipped one."""
    rows = {}
    for step in (number for number, sign in enumerate(mask) if sign == "."):
        before, last = [number for number in range(step) if mask[number] == "#"][-2:]
        way = (step - last) / (last - before)
        rows[str(step)] = {str(last): 1 + way, str(before): -way}
    return rows


def settings(error: float | None, mask: str = USUAL, **more: Any) -> dict[str, Any]:
    """A schedule for two branches; with an error, one for outliers, too."""
    both = {name: (mask, line(mask)) for name in ("cond", "uncond")}
    found: dict[str, Any] = {"forecast": "fitted", "forecast_of": "output"}
    found["schedule"] = {name: of for name, (of, _) in both.items()}
    found["forecast_weights"] = {name: of for name, (_, of) in both.items()}
    if error is not None:
        denser = {name: settings(None, MORE)[name] for name in ("schedule", "forecast_weights")}
        given = {"branch": "cond", "step": 2, "weights": {"0": -1.0, "1": 2.0}, "error": error}
        found["outliers"] = given | denser | more
    return found


@torch.no_grad()
def run(model: torch.nn.Module, rows: int = 1, branches: tuple[str, ...] = ("cond", "uncond")) -> list[torch.Tensor]:
    """A loop of one's own. Of a batch, only the last row changes much from step to step."""
    found = []
    for step, branch in itertools.product(range(8), branches):
        sample, time = at(step, 8)
        calm = at(0, 8)[0]
        samples = torch.cat([calm] * (rows - 1) + [sample])
        conditioning = (COND if branch == "cond" else UNCOND).expand(rows, -1)
        with call_context(branch=branch):
            found.append(model(samples, time.expand(rows), conditioning))
    return found


def misses(guess: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How far off a guess is, for each picture."""
    return (guess - value).flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)


def masks(hook: Any) -> set[str]:
    return {branch.mask for branch in hook.stats().branches.values()}


# ------------------------------------------------------------------------------------------------ in a run


@pytest.mark.parametrize(("error", "mask"), [(0.0, MORE), (1e9, USUAL)])
@pytest.mark.parametrize("branches", [("cond", "uncond"), ("uncond", "cond")], ids=["cond first", "uncond first"])
def test_an_image_gets_the_bits_of_its_schedule(error: float, mask: str, branches: tuple[str, ...]) -> None:
    alone, model = Plain(), Plain()
    apply_teacache_hook(alone, settings(None, mask))
    expected = run(alone, branches=branches)
    hook = apply_teacache_hook(model, json.loads(json.dumps(settings(error))))
    for _ in range(2):  # The next run begins as usual.
        assert all(map(torch.equal, run(model, branches=branches), expected))
        assert masks(hook) == {mask}
        assert hook.stats().outliers == (mask == MORE,)
    assert f"outliers: {int(mask == MORE)} of 1 images" in str(hook.stats())
    hook.detach()
    assert all(map(torch.equal, run(model), run(Plain())))


def test_one_outlier_makes_its_batch_one() -> None:
    outputs = run(Plain(), rows=3, branches=("cond",))
    calm, _, wild = (float(each) for each in misses(2 * outputs[1] - outputs[0], outputs[2]))
    assert calm < wild / 3
    model = Plain()
    hook = apply_teacache_hook(model, settings(wild / 2))
    run(model, rows=3)
    assert hook.stats().outliers == (False, False, True)
    assert masks(hook) == {MORE}
    assert hook.stats().to_dict()["branches"]["cond"]["steps"][2]["outliers"] == [False, False, True]


def test_an_outlier_is_an_image_whose_forecast_is_far_off() -> None:
    outputs = run(Plain(), branches=("cond",))
    miss = float(misses(2 * outputs[1] - outputs[0], outputs[2]))
    for error, is_outlier in ((miss * 1.001, False), (miss * 0.999, True)):
        model = Plain()
        hook = apply_teacache_hook(model, settings(error))
        run(model)
        assert hook.stats().outliers == (is_outlier,)


def test_without_the_branch_that_is_compared_the_usual_schedule_stays() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, settings(0.0))
    run(model, branches=("uncond",))
    assert hook.stats().outliers == ()
    assert masks(hook) == {USUAL}


# ------------------------------------------------------------------------------------------------ recognised


def test_where_nothing_can_be_compared_all_are_outliers() -> None:
    assert find_outliers(None, torch.ones(2, 3), 0.5) == (True,)
    outlook = torch.ones(2, 3)
    assert find_outliers(outlook, torch.ones(2, 3), 0.5) == (False, False)
    assert find_outliers(outlook, torch.tensor([[1.0, 1.0, 1.0], [1.0, torch.nan, 1.0]]), 0.5) == (False, True)
    assert find_outliers(outlook, "no tensor", 0.5) == (True,)


def test_outputs_without_a_row_for_each_image_count_as_one_image() -> None:
    outlook = torch.ones(2, 3), torch.ones(4)
    assert find_outliers(outlook, (torch.ones(2, 3), torch.ones(4)), 0.5) == (False,)
    assert find_outliers(outlook, (torch.ones(2, 3), 9 * torch.ones(4)), 0.5) == (True,)


# ------------------------------------------------------------------------------------------------ fitted


def watched(pipe: Any, steps: int, seed: int) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """The latents of a run, and what its denoiser gave."""
    with recorded(pipe.transformer) as recorder:
        latents = FLUX.run(pipe, steps, seed)
    given = [output.double().flatten() for output in recorder.outputs]
    return latents, {"cond": given[::2], "uncond": given[1::2]}


def test_fitted_settings_separate_real_images() -> None:
    steps, pipe, seeds = 12, FLUX.build(0), range(10)
    runs = [watched(pipe, steps, seed)[1] for seed in seeds]
    sizes = pipe.scheduler.sigmas.diff().tolist()
    products = Products.mean([Products.of(outputs, sizes, GUIDANCE) for outputs in runs])
    step = outlier_step(steps)
    first = {name: [torch.stack(outputs[name][: step + 1]) for outputs in runs] for name in GUIDANCE}
    each = {name: torch.stack([rows @ rows.T for rows in of]).numpy() for name, of in first.items()}
    usual = fit_schedule(products, 12, together=True, begin=dict.fromkeys(GUIDANCE, "#" * (step + 1)))
    outliers = fit_outliers(products, usual, each, 20)
    assert outliers is not None
    assert (outliers["branch"], outliers["step"]) == ("cond", step), "what counts for most"
    assert set(outliers["schedule"].values()) == {outliers["schedule"]["cond"]}
    assert outliers["schedule"]["cond"].count("#") == 10
    assert outliers["schedule"]["cond"].startswith("#" * 2 * (step + 1)), "twice as long nothing is skipped"
    found = []
    backend = cached(pipe, **json.loads(json.dumps(usual.settings() | {"outliers": outliers})))
    for seed in seeds:
        FLUX.run(pipe, steps, seed)
        stats = backend.stats().denoisers["transformer"]
        found += stats.outliers
        expected = outliers["schedule"] if stats.outliers[0] else usual.schedules
        assert {name: branch.mask for name, branch in stats.branches.items()} == dict(expected)
    assert sum(found) == int(OUTLIER_SHARE * len(seeds)) == 1
    old, weights = list(map(int, outliers["weights"])), torch.tensor(list(outliers["weights"].values())).double()
    outputs = torch.stack([torch.stack(given["cond"]) for given in runs])
    errors = misses(torch.einsum("rod,o->rd", outputs[:, old], weights), outputs[:, step])
    assert found.index(True) == errors.argmax()
    usual_error, outlier_error = errors.sort().values[-2:].tolist()
    assert outliers["error"] == pytest.approx((usual_error + outlier_error) / 2, rel=1e-4)


@pytest.mark.parametrize(("runs", "parted"), [(1, None), (9, None), (10, 9), (20, 18), (25, 23)])
def test_the_boundary_is_the_error_of_no_image(runs: int, parted: int | None) -> None:
    """So a processor that rounds differently recognises the same outliers."""
    steps = 12
    rows = zoo.noise(0, runs, steps, 50).double()
    every = torch.einsum("rid,rjd->rij", rows, rows).numpy()
    whole = torch.cat([rows.mean(0)] * 2)
    products = Products(("cond", "uncond"), (2.0, -1.0), (1.0,) * steps, (whole @ whole.T).numpy())
    usual = fit_schedule(products, 12, together=True, begin=dict.fromkeys(GUIDANCE, "###"))
    outliers = fit_outliers(products, usual, dict.fromkeys(GUIDANCE, every), 20)
    assert outliers is not None
    old, weights = list(map(int, outliers["weights"])), torch.tensor(list(outliers["weights"].values())).double()
    step = outliers["step"]
    errors = misses(torch.einsum("rod,o->rd", rows[:, old], weights), rows[:, step]).sort().values.tolist()
    if parted is None:
        assert outliers["error"] == pytest.approx(1.01 * errors[-1])
    else:
        assert outliers["error"] == pytest.approx((errors[parted - 1] + errors[parted]) / 2)


def test_a_plan_that_skips_at_once_shows_no_outliers() -> None:
    steps = 12
    rows = zoo.noise(0, 2 * steps, 50).double().numpy()
    products = Products(("cond", "uncond"), (2.0, -1.0), (1.0,) * steps, rows @ rows.T)
    each = {name: products.values[None, :steps, :steps].copy() for name in GUIDANCE}
    usual = fit_schedule(products, 12, together=True, begin=dict.fromkeys(GUIDANCE, "#.#"))
    assert usual.schedules["cond"].startswith("#.#")
    assert fit_outliers(products, usual, each, 20) is None
    for wrong in ({}, {"uncond": each["uncond"]}, {"cond": each["cond"][0]}, {"cond": each["cond"][:, :2, :2]}):
        with pytest.raises(SettingError, match=r"single runs for 'cond', .* at least the first 3 steps"):
            fit_outliers(products, usual, wrong, 20)
