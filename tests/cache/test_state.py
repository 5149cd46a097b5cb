"""What is kept of a branch: no more than is needed, never for another, and nothing when the run is over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driving import COND, INFINITE, UNCOND, UNGUARDED, Plain, at, case, differing, loop, tensors_in

from samovar.cache import TeaCacheConfig, TeaCacheState, apply_teacache_hook
from samovar.cache.decision import Signal
from samovar.cache.inputs import Inputs
from samovar.hooks import Roles, call_context, running

SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}
NAMES = ("hidden_states", "timestep", "encoder_hidden_states", "scale")
SIGNAL = Signal(torch.ones(1))


def inputs(step: int, conditioning: torch.Tensor = COND, *scale: float) -> Inputs:
    return Inputs((*at(step), conditioning, *scale), {}, NAMES, Roles())


def computed(state: TeaCacheState, step: int, given: Inputs | None = None, signal: Signal | None = None) -> None:
    state.computed(given or inputs(step), signal)
    state.store(float(step), step, [torch.ones(1)])


def test_a_new_state_has_nothing_to_give() -> None:
    state = TeaCacheState()
    assert state.obstacle(inputs(1), asks=True) == "nothing stored"
    computed(state, 0)
    assert state.obstacle(inputs(1), asks=False) is None
    assert state.obstacle(inputs(1), asks=True) == "nothing stored", "there is no signal to compare with"
    computed(state, 1, signal=SIGNAL)
    assert state.obstacle(inputs(1), asks=True) is None
    assert state.obstacle(inputs(1, UNCOND[:, :2]), asks=True) == "inputs have another form"
    state.reset()
    assert state.obstacle(inputs(1), asks=False) == "nothing stored"
    assert tensors_in(state) == []


def test_a_number_that_changed_is_an_obstacle() -> None:
    state = TeaCacheState()
    computed(state, 0, inputs(0, COND, 1.0), SIGNAL)
    assert state.obstacle(inputs(1, COND, 1.0), asks=True) is None
    assert state.obstacle(inputs(1, COND, 0.5), asks=True) == "conditioning changed"


@pytest.mark.parametrize("other", [inputs(2, COND[:, :2]), inputs(2, COND, 0.5)], ids=["form", "number"])
def test_a_step_of_another_form_or_number_begins_a_new_history(other: Inputs) -> None:
    state = TeaCacheState(TeaCacheConfig(forecast="linear"))
    for step in range(2):
        computed(state, step, inputs(step, COND, 1.0))
    assert len(state.history) == 2
    computed(state, 2, other)
    assert len(state.history) == 1
    state.store(3.0, 3, None)
    assert len(state.history) == 0, "what is not known cannot be gone on with"


def test_a_restart_forgets_the_steps() -> None:
    state = TeaCacheState()
    computed(state, 0, signal=SIGNAL)
    state.skipped(inputs(1), SIGNAL, 0.1, False)
    state.reset()
    assert (len(state.history), state.signal, state.skipped_in_a_row) == (0, None, 0)
    assert (state.accumulated_rel_l1_distance, state.watched) == (0.0, {})
    assert state.obstacle(inputs(1), asks=False) == "nothing stored"


def test_skipped_steps_are_counted_until_one_is_computed() -> None:
    state = TeaCacheState()
    computed(state, 0, signal=SIGNAL)
    state.skipped(inputs(1), None, 0.1, False)
    state.skipped(inputs(2), None, 0.3, False)
    assert (state.skipped_in_a_row, state.accumulated_rel_l1_distance) == (2, 0.3)
    assert state.signal is SIGNAL, "a step that was not judged leaves the signal as it was"
    computed(state, 3)
    assert (state.skipped_in_a_row, state.accumulated_rel_l1_distance) == (0, 0.0)


@pytest.mark.parametrize("others_changed", [True, False])
def test_what_changed_at_a_skipped_step_is_compared_with_that_step_from_then_on(others_changed: bool) -> None:
    state, other = TeaCacheState(), UNCOND.clone()
    computed(state, 0)
    state.skipped(inputs(1, other), None, 0.1, others_changed)
    held = state.watched["encoder_hidden_states"].held
    assert held is (other if others_changed else COND)


def test_an_output_is_kept_as_a_copy_and_given_back_as_another() -> None:
    state = TeaCacheState(TeaCacheConfig(forecast_of="output"))
    output = {"sample": torch.ones(2), "of": "something"}
    state.computed(inputs(0), None)
    state.store_output(0.0, 0, output)
    output["sample"].zero_()  # type: ignore[attr-defined]
    for step in (1, 2):
        given = state.forecast_output(state.history.forecast(float(step)))
        assert given["of"] == "something"
        assert torch.equal(given["sample"], torch.ones(2))
        given["sample"].zero_()


# ------------------------------------------------------------------------------------------------ in use


@pytest.mark.parametrize(
    ("settings", "histories"),
    [({}, 1), ({"forecast": "linear"}, 2), ({"forecast": "taylor", "forecast_order": 3}, 4)],
    ids=["reuse", "linear", "taylor"],
)
def test_a_branch_keeps_one_residual_for_each_step_of_its_forecast(settings: Any, histories: int) -> None:
    model = Plain()
    hook = apply_teacache_hook(model, {**UNGUARDED, "rel_l1_thresh": 0.3, **settings})
    with torch.no_grad():
        for step in range(8):
            for branch, conditioning in (("cond", COND), ("uncond", UNCOND)):
                with call_context(branch=branch):
                    model(*at(step), conditioning)
    deciding, following = hook.state_manager.states().values()
    residual = 5 * 8
    assert elements(following) <= histories * residual
    assert elements(deciding) <= histories * residual + residual + 1, "and a signal with its size"


def elements(state: TeaCacheState) -> int:
    """How many numbers a state holds that are not the caller's own."""
    given = {id(tensor) for tensor in (COND, UNCOND)}
    held = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_in(state) if id(tensor) not in given}
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in held.values())


def test_residuals_without_effect_are_not_kept() -> None:
    name = "FluxTransformer2DModel"
    model = case(name).build()
    hook = apply_teacache_hook(model, SKIPPING)
    for step in range(3):
        with call_context(branch="only"):
            case(name).run(model, step)
    (state,) = hook.state_manager.states().values()
    image = [tensor for tensor in state.history.newest if tensor is not None]
    assert [tuple(tensor.shape) for tensor in image] == [(1, 20, 16)] * 2, "of each stack, that of the picture"
    assert [tensor._base for tensor in image] == [None, None], "and no larger tensor behind them"


def test_a_pipeline_that_makes_its_conditioning_anew_does_not_fill_the_memory() -> None:
    """Each step is a branch of its own then, of which nothing will ever be reused."""
    model = Plain()
    hook = apply_teacache_hook(model, SKIPPING)
    with torch.no_grad():
        for step in range(40):
            model(*at(step, 40), COND.clone())
    residuals = [state.history.newest for state in hook.state_manager.states().values() if len(state.history)]
    assert len(residuals) <= 8


class Told:
    """A pipeline whose scheduler is moved by hand."""

    def __init__(self, steps: int) -> None:
        self.scheduler = SimpleNamespace(timesteps=torch.linspace(1, 0, steps), _step_index=None)


def told_steps(model: torch.nn.Module, conditionings: Any, steps: int = 4) -> list[list[Any]]:
    """Several calls a step under one name; what each gave."""
    pipe, outputs = Told(steps), []
    with running(pipe), call_context(branch="cond"), torch.no_grad():
        for step in range(steps):
            pipe.scheduler._step_index = step
            outputs.append([model(*at(step), conditioning) for conditioning in conditionings])
    return outputs


def test_one_name_for_several_inputs_is_noticed_and_nothing_reused() -> None:
    model = Plain()
    exact = [output for step in told_steps(model, (COND, UNCOND)) for output in step]
    hook = apply_teacache_hook(model, SKIPPING)
    outputs = [output for step in told_steps(model, (COND, UNCOND)) for output in step]
    assert differing(outputs, exact) == []
    steps = hook.stats().branches["cond"].steps
    assert [record.step for record in steps] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(record.computed for record in steps)


def test_states_end_with_their_run() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, SKIPPING)
    loop(model)
    assert tensors_in(hook.state_manager)
    hook.end_run(model, None)
    assert hook.state_manager.states() == {}
    assert [tensor for tensor in tensors_in(hook) if tensor.numel() > 1] == []
