"""Why a step is computed or skipped, and what later steps are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from driving import COND, INFINITE, UNCOND, UNGUARDED, Plain, at, differing, stepped

from samovar.cache import AutoConfig, TeaCacheConfig, TeaCacheHook, apply_teacache_hook
from samovar.cache import auto as auto_under_test
from samovar.cache import inputs as inputs_under_test
from samovar.cache import step as step_under_test
from samovar.cache.config import CacheConfig
from samovar.cache.pace import Pace
from samovar.core.errors import ModelError
from samovar.hooks import call_context

SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}
LINEAR = {**SKIPPING, "forecast": "linear", "first_steps": 2}
OUTPUT = {**LINEAR, "forecast_of": "output"}
WAYS = {"reuse": {**SKIPPING, "first_steps": 2}, "linear": LINEAR, "output": OUTPUT}
"""Whatever is stored, the same rules say whether it may be used."""


def reasons(hook: TeaCacheHook, branch: str = "only") -> list[str]:
    return [record.reason for record in hook.stats().branches[branch].steps]


def mask(hook: TeaCacheHook, branch: str = "only") -> str:
    return hook.stats().branches[branch].mask


@torch.no_grad()
def steps(model: torch.nn.Module, calls: Sequence[Any], branch: str = "only") -> list[torch.Tensor]:
    """The outputs of one call a step, in a loop whose scheduler counts."""
    with call_context(branch=branch), stepped(model, len(calls)) as loop:
        return [loop.call(lambda given=given: model(*given)) for given in calls]


def usual(count: int, conditioning: torch.Tensor = COND) -> list[Any]:
    return [(*at(index), conditioning) for index in range(count)]


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_step_is_skipped_below_the_threshold_and_computed_where_it_is_reached(settings: dict[str, Any]) -> None:
    model = Plain()
    hook = apply_teacache_hook(model, settings | {"rel_l1_thresh": 0.5})
    steps(model, usual(10))
    found = hook.stats().branches["only"].steps
    assert {record.reason for record in found[2:]} == {"below the threshold", "the threshold is reached"}
    total = 0.0
    for record in found[2:]:
        assert record.distance is not None
        total += record.distance
        assert record.accumulated == pytest.approx(total)
        assert record.computed is (total >= 0.5)
        total = 0.0 if record.computed else total


# ------------------------------------------------------------------------------------------------ where a history ends


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_history_ends_where_the_conditioning_changes(settings: dict[str, Any]) -> None:
    """The step after the change is not a line through the old prompt's steps: it is as in a run of the new prompt."""
    model, fresh = Plain(), Plain()
    hook = apply_teacache_hook(model, settings | {"rel_l1_thresh": 100.0, "first_steps": 2})
    apply_teacache_hook(fresh, settings | {"rel_l1_thresh": 100.0, "first_steps": 1})
    calls = usual(4) + [(*at(index), UNCOND) for index in range(4, 8)]
    found = steps(model, calls)
    assert reasons(hook)[4] == "conditioning changed"
    assert mask(hook) == "##..#..."
    assert differing(found[4:], steps(fresh, calls[4:])) == []


def test_a_history_ends_where_the_conditioning_changes_by_a_saved_schedule_too() -> None:
    model = Plain()
    settings = {"schedule": "##..#...", "forecast": "linear", "forecast_of": "output"}
    apply_teacache_hook(model, settings)
    outputs = steps(model, usual(4) + [(*at(index), UNCOND) for index in range(4, 8)])
    assert not torch.equal(outputs[2], outputs[1]), "a line goes on"
    assert torch.equal(outputs[5], outputs[4]), "but not from one prompt to another"


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_history_ends_at_inputs_of_another_form(settings: dict[str, Any]) -> None:
    model = Plain()
    hook = apply_teacache_hook(model, settings)
    longer = [(torch.cat([at(index)[0]] * 2, dim=1), at(index)[1], COND) for index in range(4, 6)]
    found = steps(model, usual(4) + longer)
    assert reasons(hook)[4] == "the shapes, dtypes or set of arguments changed"
    assert mask(hook) == "##..#."
    with torch.no_grad():
        assert torch.equal(found[4], Plain()(*longer[0]))


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
def test_a_history_ends_where_a_branch_was_not_called_for_a_while(settings: dict[str, Any]) -> None:
    model, bare = Plain(), Plain()
    hook = apply_teacache_hook(model, settings)
    outputs: list[Any] = []
    with torch.no_grad(), stepped(model, 10) as loop:
        for index in range(10):
            loop.scheduler._step_index += 1
            with call_context(branch="cond"):
                model(*at(index), COND)
            if not 4 <= index < 8:
                with call_context(branch="uncond"):
                    outputs.append((model(*at(index), UNCOND), bare(*at(index), UNCOND)))
    records = hook.stats().branches["uncond"].steps
    assert [record.step for record in records] == [0, 1, 2, 3, 8, 9]
    assert [record.computed for record in records] == [True, True, False, False, True, False]
    assert torch.equal(*outputs[4])
    assert mask(hook, "cond") == "##........"


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("is_scheduled", [True, False])
def test_several_calls_of_one_step_by_one_name_are_all_computed(settings: dict[str, Any], is_scheduled: bool) -> None:
    model, bare = Plain(), Plain()
    hook = apply_teacache_hook(model, settings)
    calls = [(*at(index), conditioning) for index in range(6) for conditioning in (COND, UNCOND)]
    with torch.no_grad():
        exact = [bare(*given) for given in calls]
        with call_context(branch="only"), stepped(model, 6) as loop:
            if not is_scheduled:
                loop.scheduler = None  # type: ignore[assignment]
            found = []
            for number, given in enumerate(calls):
                if is_scheduled:
                    loop.scheduler._step_index = number // 2
                found.append(model(*given))
    assert differing(found, exact) == []
    assert set(mask(hook)) == {"#"}
    assert "this branch was called twice at the same step" in reasons(hook)


def test_a_sample_that_stays_is_no_step_where_nobody_counts_them() -> None:
    """Guidance by another time: the second call of a step has its sample."""
    model, bare = Plain(), Plain()
    hook = apply_teacache_hook(model, SKIPPING)
    found, exact = [], []
    with torch.no_grad(), call_context(branch="only"):
        for index in range(6):
            sample, time = at(index)
            for when in (time, 0.99 * time):
                found.append(model(sample, when, COND))
                exact.append(bare(sample, when, COND))
    assert reasons(hook)[1] == "the sample is the same as in the previous call"
    assert differing(found, exact) == []


def test_weights_that_change_during_a_run_end_the_history() -> None:
    model, bare, outputs = Plain(), Plain(), []
    hook = apply_teacache_hook(model, OUTPUT)
    with torch.no_grad(), call_context(branch="only"), stepped(model, 8) as loop:
        for index in range(8):
            if index == 5:
                for built in (model, bare):
                    built.blocks[0].norm.weight.mul_(3)
            outputs.append(loop.call(lambda index=index: model(*at(index), COND)))
        assert torch.equal(outputs[5], bare(*at(5), COND))
    assert torch.equal(outputs[6], outputs[5]), "no line goes through what the old weights gave"
    assert reasons(hook)[5] == "weights or adapters changed"
    assert mask(hook) == "##...#.."


# ------------------------------------------------------------------------------------------------ times on a device


@pytest.fixture
def _times_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator: what time it is can be read with the signal alone."""
    monkeypatch.setattr(inputs_under_test, "on_host", lambda time: None)
    monkeypatch.setattr(step_under_test, "is_on_host", lambda time: False)


@pytest.mark.usefixtures("_times_on_a_device")
def test_a_run_that_begins_by_a_time_on_a_device_is_computed_and_begins_anew() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, {**SKIPPING, "first_steps": 1})
    with torch.no_grad(), call_context(branch="only"):
        for name in ("one", "two"):
            for index in range(6):
                output = model(*at(index, 6, name), COND)
                if index == 0:
                    assert torch.equal(output, Plain()(*at(0, 6, name), COND))
    assert (reasons(hook)[0], mask(hook)) == ("a new run", "#.....")


@pytest.mark.usefixtures("_times_on_a_device")
def test_auto_waits_once_for_a_time_on_a_device_and_for_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is read behind what was measured, which the device is waited for anyway; and tells a new run all the
    same."""
    model, read = Plain(), list[str]()
    drifts, strays = Pace._drifts, auto_under_test.stray
    monkeypatch.setattr(Pace, "_drifts", lambda *given: (read.append("drift"), drifts(*given))[1])
    monkeypatch.setattr(auto_under_test, "stray", lambda *given: (read.append("time"), strays(*given))[1])
    hook = apply_teacache_hook(model, AutoConfig(1e6))
    with torch.no_grad(), call_context(branch="only"):
        for name in ("one", "two"):
            for index in range(12):
                read.append("step")
                output = model(*at(index, 12, name), COND)
                assert index or torch.equal(output, Plain()(*at(0, 12, name), COND))
            assert "." in mask(hook)
    assert reasons(hook)[0] == "a new run"
    around = [(before, after) for before, one, after in zip(read, read[1:], read[2:], strict=False) if one == "drift"]
    assert around
    assert set(around) == {("step", "time")}


class Perturbed(Plain):
    """Guidance by a model that is made worse for every other call, of which its inputs say nothing."""

    strength = 1.0

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return super().run(x, temb * self.strength)


@pytest.mark.usefixtures("_times_on_a_device")
@pytest.mark.parametrize("config", [TeaCacheConfig(**SKIPPING), AutoConfig(1e6)], ids=["tea_cache", "auto"])
def test_a_time_on_a_device_that_stands_still_is_a_second_call_of_a_step(config: CacheConfig) -> None:
    """The sample is made anew for each call, so that it does not tell."""
    model, bare = Perturbed(), Perturbed()
    hook = apply_teacache_hook(model, config)
    found, exact = [], []
    with torch.no_grad(), call_context(branch="only"):
        for index in range(6):
            for strength in (1.0, 0.0):
                model.strength = bare.strength = strength
                sample, time = at(index)
                found.append(model(sample.clone(), time, COND))
                exact.append(bare(sample.clone(), time, COND))
    assert differing(found, exact) == []
    assert "this branch was called twice at the same step" in reasons(hook)


# ------------------------------------------------------------------------------------------------ branches that follow


@pytest.mark.parametrize("forecast_of", ["residual", "output"])
def test_a_branch_that_follows_learns_its_own_form(forecast_of: str) -> None:
    """Its prompt has another length than the leader's."""

    class Worded(Plain):
        def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
            return super().embed(time, conditioning.mean(dim=1))

    model = Worded()
    hook = apply_teacache_hook(model, {**LINEAR, "forecast_of": forecast_of})
    texts = {"cond": torch.randn(1, 7, 4), "uncond": torch.randn(1, 5, 4)}
    with torch.no_grad(), stepped(model, 10) as loop:
        for index in range(10):
            loop.scheduler._step_index = index
            for branch, text in texts.items():
                with call_context(branch=branch):
                    model(*at(index), text)
    assert [mask(hook, branch) for branch in texts] == ["##........"] * 2


def test_the_last_step_leaves_nothing_behind() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, {**LINEAR, "last_steps": 1})
    hook.refresh(model, 4)
    kept = []
    with torch.no_grad(), call_context(branch="only"):
        for index in range(4):
            model(*at(index, 4), COND)
            (state,) = hook.state_manager.states().values()
            kept.append(len(state.history))
    assert kept == [1, 2, 2, 0]


def test_training_is_refused_by_name() -> None:
    model = Plain().train()
    apply_teacache_hook(model, SKIPPING)
    with call_context(branch="only"):
        with pytest.raises(ModelError, match=r"Plain is being trained with a cache on.*attached.detach\(\)"):
            model(*at(0), COND)
        with torch.no_grad():
            model(*at(0), COND)
        model.eval()(*at(1), COND)
        model.train().requires_grad_(False)(*at(2), COND)
