"""Every setting is checked when it is given, and a refused one leaves nothing behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar.cache import TeaCacheConfig, make_cache_backend
from samovar.core.errors import SettingError

NAN, INF = math.nan, math.inf
FLUX = PIPELINES["flux"]

WEIGHTS = {"2": {"0": -0.5, "1": 1.5}}
FITTED: dict[str, Any] = {
    "forecast": "fitted",
    "forecast_of": "output",
    "schedule": {"cond": "##.#", "uncond": "##.#"},
    "forecast_weights": {"cond": WEIGHTS, "uncond": WEIGHTS},
}

REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"rel_l1_thresh": -0.1}, ["rel_l1_thresh=-0.1", "a number, 0 or more"]),
    ({"rel_l1_thresh": NAN}, ["rel_l1_thresh=nan", "a number, 0 or more"]),
    ({"rel_l1_thresh": True}, ["rel_l1_thresh=True", "a number"]),
    ({"rel_l1_thresh": "0.2"}, ["rel_l1_thresh='0.2'", "a number"]),
    ({"coefficients": [1, 2, 3, 4]}, ["coefficients=[1, 2, 3, 4]", "exactly five"]),
    ({"coefficients": "12345"}, ["coefficients='12345'", "exactly five"]),
    ({"coefficients": [1, 2, NAN, 4, 5]}, ["coefficients", "nan", "five finite numbers"]),
    ({"first_steps": 0}, ["first_steps=0", "a whole number, 1 or more"]),
    ({"last_steps": -1}, ["last_steps=-1", "a whole number, 0 or more"]),
    ({"max_skips": INF}, ["max_skips=inf", "a whole number"]),
    ({"min_steps": "8"}, ["min_steps='8'", "a whole number"]),
    ({"start": -0.01}, ["start=-0.01", "from 0 to 1"]),
    ({"start": 0.6, "end": 0.4}, ["start=0.6", "end=0.4", "Swap"]),
    ({"forecast": "linaer"}, ["forecast='linaer'", "'reuse', 'linear', 'fitted'", "Did you mean 'linear'?"]),
    ({"forecast": "linear", "forecast_of": "output"}, ["without a schedule", "cache='auto'"]),
    ({"schedule": "##.", "forecast": "linear"}, ["forecast='linear'", "is of outputs", "forecast_of='output'"]),
    ({"forecast_of": "outputs"}, ["forecast_of='outputs'", "'residual', 'output'", "Did you mean 'output'?"]),
    ({"schedule": ""}, ["schedule=''", "one True or False for each step"]),
    ({"schedule": "#.x"}, ["schedule='#.x'", "'#'", "'.'"]),
    ({"schedule": [1, 2]}, ["schedule=[1, 2]", "one True or False"]),
    ({"schedule": ".##"}, ["schedule='.##'", "skips the first step"]),
    ({"schedule": {}}, ["schedule={}", "one mask for each branch name", "'*'"]),
    ({"schedule": {"cond": "#.", "uncond": "#.."}}, ["one mask for each branch name", "the same length"]),
    ({"schedule": {3: "#."}}, ["schedule={3: '#.'}", "for each branch name"]),
    ({"forecast": "fitted"}, ["forecast='fitted' without forecast_weights", "samovar tune"]),
    (FITTED | {"forecast": "linear"}, ["forecast='linear' with forecast_weights"]),
    (FITTED | {"schedule": None}, ["without a schedule"]),
    (FITTED | {"forecast_weights": 3}, ["forecast_weights=3", "{branch: {skipped step"]),
    (FITTED | {"forecast_weights": {}}, ["forecast_weights of the branches []", "['cond', 'uncond']"]),
    (FITTED | {"forecast_weights": {"cond": WEIGHTS}}, ["['cond']", "['cond', 'uncond']", "the same branches"]),
    (FITTED | {"schedule": "#.."}, ["'cond' at step 1 combine the steps []", "computed steps before it"]),
    (FITTED | {"forecast_weights": {"*": {"2": {"1": NAN}}}, "schedule": "##."}, ["{'1': nan}", "finite weights"]),
    ({"rel_l1_tresh": 0.2}, ["rel_l1_tresh", "Did you mean 'rel_l1_thresh'?"]),
    ({"zzz": 1}, ["'zzz'", "'rel_l1_thresh'", "'schedule'"]),
    ({3: 1}, ["3 is not a setting", "'rel_l1_thresh'"]),
]
refused = pytest.mark.parametrize(("settings", "says"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])


@refused
def test_a_refusal_names_the_value_and_what_was_expected(settings: dict[Any, Any], says: list[str]) -> None:
    with pytest.raises(SettingError) as refusal:
        TeaCacheConfig.read(settings)
    for part in says:
        assert part in str(refusal.value)
    assert refusal.value.param


# ------------------------------------------------------------------------------------------------ what is accepted


@pytest.mark.parametrize(
    "settings",
    [
        {"rel_l1_thresh": 0},
        {"rel_l1_thresh": INF},
        {"coefficients": (1, 2.5, -3, 0, 1e-3)},
        {"max_skips": None},
        {"first_steps": 1, "last_steps": 0, "max_skips": 1, "min_steps": 0},
        {"start": 0, "end": 1},
        {"start": 0.5, "end": 0.5},
        {"schedule": [1, 0, 1]},
        {},
    ],
)
def test_edges_are_accepted_and_kept(settings: dict[str, Any]) -> None:
    config = TeaCacheConfig.read(settings)
    for name, value in settings.items():
        assert getattr(config, name) == (tuple(map(bool, value)) if name == "schedule" else value)
    assert TeaCacheConfig.read(config) is config
    assert TeaCacheConfig.read(None) == TeaCacheConfig()


def test_schedules_and_weights_are_found_by_branch() -> None:
    config = TeaCacheConfig.read(FITTED | {"schedule": {"cond": "##.#", "*": "##.."}, "forecast_weights": {
        "cond": WEIGHTS, "*": {2: {1: 1.0}, 3: {0: 2.0}}}})  # fmt: skip
    assert config.mask_for("cond") == (True, True, False, True)
    assert config.mask_for("other") == config.mask_for(None) == (True, True, False, False)
    assert config.rows_for("cond").get(2) == {0: -0.5, 1: 1.5}
    assert config.rows_for("cond").get(3) is None
    assert config.rows_for("other").get(3) == config.rows_for(None).get(3) == {0: 2.0}
    assert config.scheduled_steps == 4
    assert dataclasses.replace(config, max_skips=2).masks == config.masks
    without = TeaCacheConfig.read(FITTED)
    assert without.mask_for("other") is None
    assert without.rows_for("other").get(2) is None


def test_the_summary_says_what_is_not_usual() -> None:
    assert TeaCacheConfig().summary() == "rel_l1_thresh=0.2"
    assert TeaCacheConfig(rel_l1_thresh=0.4, max_skips=None).summary() == "rel_l1_thresh=0.4, max_skips=None"
    scheduled = TeaCacheConfig(schedule="#.#", max_skips=2, forecast="linear", forecast_of="output")
    assert scheduled.summary() == "forecast=linear, forecast_of=output, schedule=#.#", "no threshold, no guards"
    fitted = TeaCacheConfig.read(FITTED).summary()
    assert fitted == "forecast=fitted, forecast_of=output, schedule=cond:##.# uncond:##.#", "weights are too many"
    assert repr(TeaCacheConfig()) == "TeaCacheConfig(rel_l1_thresh=0.2)"


# ------------------------------------------------------------------------------------------------ of another length


@pytest.mark.parametrize("forecast_of", ["residual", "output"])
@pytest.mark.parametrize("steps", [9, 11])
def test_a_schedule_of_another_length_is_refused_at_the_first_step(steps: int, forecast_of: str) -> None:
    schedule, pipe = "#.#.#.#.##", FLUX.build(0)
    bare = FLUX.run(pipe, steps=steps)
    backend = make_cache_backend({"backend": "tea_cache", "schedule": schedule, "forecast_of": forecast_of})
    assert backend is not None
    handle = backend.enable(pipe)
    seen: list[int] = []
    block = pipe.transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: seen.append(1))
    with pytest.raises(SettingError, match=rf"schedule is for 10 steps, and this run has {steps} steps"):
        FLUX.run(pipe, steps=steps)
    assert not seen, "nothing was computed"
    block.remove()
    FLUX.run(pipe, steps=10)
    assert {branch.mask for branch in backend.stats().denoisers["transformer"].branches.values()} == {schedule}
    handle.detach()
    assert torch.equal(FLUX.run(pipe, steps=steps), bare)
