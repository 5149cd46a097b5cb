"""What is kept of a branch: no more than is needed, never for another, and nothing when the run is over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from driving import COND, INFINITE, UNCOND, UNGUARDED, Plain, at, case, differing, loop, tensors_in

from pipelines import PIPELINES
from samovar.cache import TeaCacheBackend, TeaCacheConfig, TeaCacheState, apply_teacache_hook
from samovar.cache.decision import Signal, Step, Verdict
from samovar.cache.inputs import Inputs
from samovar.cache.state import Clock
from samovar.hooks import Roles, Run, call_context, running

COUNTING: dict[str, Callable[[], Any]] = {
    "flow": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "unipc": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    "dpm": DPMSolverMultistepScheduler,
    "heun": HeunDiscreteScheduler,
}
SKIP = Verdict("skip", "below the threshold")


def call(time: Any = None, sample: torch.Tensor | None = None) -> Inputs:
    """A call at some time, with a sample of its own unless one is given."""
    given = (torch.ones(1) if sample is None else sample, *(() if time is None else (time,)))
    return Inputs(given, {}, ("hidden_states", "timestep"), Roles())


class Scheduled:
    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


def run_of(make: Callable[[], Any]) -> tuple[Run, Any]:
    """A run of a pipeline that is nothing but its scheduler."""
    scheduler = make()
    scheduler.pipeline = pipeline = Scheduled(scheduler)  # A run does not keep its pipeline alive.
    return Run(pipeline, "request"), scheduler


def steps_of(scheduler: Any, begin: int = 0) -> Iterator[int]:
    """A denoising loop; gives the number of each step before it is made."""
    sample = torch.ones(1, 4, 2, 2)
    if begin:
        scheduler.set_begin_index(begin)
    for number, time in enumerate(scheduler.timesteps[begin:], start=begin):
        yield number
        if hasattr(scheduler, "scale_model_input"):  # Some complain if nobody calls it.
            scheduler.scale_model_input(sample, time)
        sample = scheduler.step(torch.ones_like(sample), time, sample).prev_sample


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's word to diffusers.
@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("begin", [0, 3])
def test_a_scheduler_tells_the_step_however_many_branches_there_are(make: Callable[[], Any], begin: int) -> None:
    run, scheduler = run_of(make)
    scheduler.set_timesteps(6)
    total, clock, places = len(scheduler.timesteps), Clock(None), []
    for number in steps_of(scheduler, begin):
        for branch in ("cond", "uncond", "cond"):
            assert clock.advance(branch, run, call(scheduler.timesteps[number]))
            assert clock.is_scheduled
            assert (clock.index, clock.step) == (number, Step(number, total, total))
            assert clock.verdict is (None if branch == "cond" and len(places) <= number - begin else SKIP)
            assert clock.is_again is (clock.verdict is SKIP and branch == "cond"), "the same branch once more"
            assert not clock.has_gap
            if clock.verdict is None:
                places.append(clock.place)
            clock.verdict = SKIP
        assert clock.is_last is (number == total - 1)
    assert clock.leader == "cond"
    assert places == [-float(scheduler.sigmas[number]) for number in range(begin, total)]
    assert places == sorted(places), "noise goes down, so that places go up"


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_a_second_loop_in_one_run_begins_anew(make: Callable[[], Any]) -> None:
    run, scheduler = run_of(make)
    clock = Clock(None)
    scheduler.set_timesteps(4)
    for _ in steps_of(scheduler):
        assert clock.advance("cond", run, call())
    scheduler.set_timesteps(4)
    assert not clock.advance("cond", run, call())


@pytest.mark.parametrize(("steps", "begin"), [(20, 10), (20, 4), (8, 4)])
def test_a_second_loop_that_begins_later_than_the_first_ended_begins_anew_too(steps: int, begin: int) -> None:
    """Enlarge and refine: a short run, and then the later part of a long one."""
    run, scheduler = run_of(COUNTING["flow"])
    clock = Clock(None)
    scheduler.set_timesteps(4)
    for _ in steps_of(scheduler):
        assert clock.advance("cond", run, call())
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(begin)
    assert not clock.advance("cond", run, call())


def test_a_run_may_be_shorter_than_its_scheduler() -> None:
    run, scheduler = run_of(COUNTING["flow"])
    run.pipeline._num_timesteps = 4
    scheduler.set_timesteps(10)
    scheduler.set_begin_index(6)
    clock = Clock(99)
    assert clock.advance("cond", run, call())
    assert clock.step == Step(6, 10, 4), "what was announced is for loops of one's own"


def test_a_scheduler_that_does_not_count_leaves_it_to_the_branches() -> None:
    run, scheduler = run_of(DDIMScheduler)
    scheduler.set_timesteps(5)
    clock = Clock(None)
    for number in steps_of(scheduler):
        for branch in ("cond", "uncond"):
            assert clock.advance(branch, run, call(scheduler.timesteps[number]))
            assert not clock.is_scheduled
            assert clock.step == Step(number, 5, 5)
            assert clock.place == float(number)


@pytest.mark.parametrize("strength", [1.0, 0.6])
@pytest.mark.parametrize("first_steps", [1, 3])
def test_image_to_image_computes_its_first_steps(strength: float, first_steps: int) -> None:
    flux = PIPELINES["flux"]
    pipe = FluxImg2ImgPipeline(**flux.build(0).components)
    pipe.set_progress_bar_config(disable=True)
    backend = TeaCacheBackend({"rel_l1_thresh": float("inf"), "min_steps": 0, "first_steps": first_steps})
    handle = backend.enable(pipe)
    flux.run(pipe, steps=20, image=torch.zeros(1, 3, 16, 24), strength=strength)
    for branch in backend.stats().denoisers["transformer"].branches.values():
        length = round(20 * strength)
        assert [record.step for record in branch.steps] == list(range(20 - length, 20))
        assert branch.mask[: first_steps + 4] == "#" * first_steps + "...."
        assert branch.mask[-1] == "#"
    handle.detach()


class Copying:
    """A pipeline that steps copies of its scheduler, as those of SkyReels-V2 do, so that its own never moves."""

    def __init__(self) -> None:
        self.transformer = Plain()
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        self.scheduler.set_timesteps(12)
        scheduler = copy.deepcopy(self.scheduler)
        sample = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
        for time in scheduler.timesteps:
            sample = scheduler.step(self.transformer(sample, time[None] / 1000, COND), time, sample).prev_sample
        return sample


def test_a_scheduler_that_is_never_stepped_does_not_stand_in_the_way() -> None:
    pipe, backend = Copying(), TeaCacheBackend({"rel_l1_thresh": float("inf")})
    handle = backend.enable(pipe)
    pipe()
    (branch,) = backend.stats().denoisers["transformer"].branches.values()
    assert branch.mask == "#....#....##"
    handle.detach()


class Tiled:
    """A pipeline that denoises two tiles in turn, with one text for both."""

    def __init__(self) -> None:
        self.transformer = Plain()
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        tiles = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
        self.scheduler.set_timesteps(12)
        for time in self.scheduler.timesteps:
            noise = torch.stack([self.transformer(tile, time[None] / 1000, COND) for tile in tiles])
            tiles = self.scheduler.step(noise, time, tiles).prev_sample
        return tiles


@pytest.mark.parametrize(
    "settings",
    [{"rel_l1_thresh": 0.1}, {"rel_l1_thresh": 0.1, "forecast_of": "output"}, {"schedule": "#.#.#.#.#.##"}],
    ids=["residual", "output", "schedule"],
)
def test_a_branch_that_is_called_twice_a_step_never_gets_what_is_the_other_calls(settings: dict[str, Any]) -> None:
    pipe = Tiled()
    bare, backend = pipe(), TeaCacheBackend(settings)
    handle = backend.enable(pipe)
    assert float((pipe() - bare).norm() / bare.norm()) < 0.1, backend.stats()
    handle.detach()


# ------------------------------------------------------------------------------------------------ loops of one's own


def indices(*branches: Any, announced: int | None = None) -> list[int]:
    clock, found = Clock(announced), []
    for branch in branches:
        assert clock.advance(branch, None, call())
        assert not clock.is_scheduled
        assert clock.step == Step(clock.index, announced, announced)
        found.append(clock.index)
    assert clock.leader == branches[0]
    return found


def test_a_step_begins_with_a_branch_that_was_called_in_the_last_one() -> None:
    assert indices("only", "only", "only") == [0, 1, 2]
    assert indices("cond", "uncond", "cond", "uncond", announced=2) == [0, 0, 1, 1]
    assert indices("cond", "uncond", "uncond", "cond") == [0, 0, 1, 1], "in any order"
    assert indices("a", "b", "c", "a", "b", "c") == [0, 0, 0, 1, 1, 1]
    assert indices("cond", "cond", "cond", "uncond", "cond", "uncond") == [0, 1, 2, 2, 3, 3], "guidance from half-way"
    assert indices("cond", "uncond", "cond", "cond") == [0, 0, 1, 2], "guidance until half-way"


def calls(*given: tuple[str, float | None]) -> list[tuple[int, bool, bool]]:
    """The step of each call, whether its branch was called in that step before, and whether it has missed some."""
    clock, found = Clock(None), []
    for branch, time in given:
        assert clock.advance(branch, None, call(time))
        found.append((clock.index, clock.is_again, clock.has_gap))
    return found


def test_a_step_begins_with_another_time_whichever_branch_is_called() -> None:
    assert calls(("cond", 1.0), ("uncond", 1.0), ("uncond", 0.9), ("cond", 0.9)) == [
        (0, False, False), (0, False, False), (1, False, False), (1, False, False)
    ]  # fmt: skip
    assert calls(("cond", 1.0), ("late", 0.9)) == [(0, False, False), (1, False, False)]


def test_a_second_call_at_the_same_time_is_no_step() -> None:
    assert calls(("cond", 1.0), ("cond", 1.0), ("cond", 0.9), ("uncond", 0.9), ("cond", 0.9)) == [
        (0, False, False), (0, True, False), (1, False, False), (1, False, False), (1, True, False)
    ]  # fmt: skip


def test_a_branch_that_missed_a_step_has_a_gap() -> None:
    times = [("cond", 1.0), ("uncond", 1.0), ("cond", 0.9), ("cond", 0.8), ("uncond", 0.8), ("cond", 0.7)]
    assert [has_gap for _, _, has_gap in calls(*times)] == [False] * 4 + [True, False]


def unclear(*samples: torch.Tensor) -> list[tuple[bool, bool]]:
    """Whether each of some calls at later and later times may be, or is, a second one of its step."""
    clock, found = Clock(None), []
    for index, sample in enumerate(samples):
        assert clock.advance("only", None, call(1.0 - index / 10, sample))
        found.append((clock.is_unclear, clock.is_again))
    return found


def test_a_call_with_the_sample_of_the_one_before_may_be_a_second_one_of_its_step() -> None:
    one, two, three = torch.ones(1), torch.ones(1), torch.ones(1)
    assert unclear(one, two, three) == [(False, False)] * 3
    assert unclear(one, one, two, two) == [(False, False), (True, False), (False, True), (True, False)]


def test_a_sample_that_never_changes_is_a_step_at_each_time() -> None:
    """Somebody tries the cache with the same tensor over and over."""
    one = torch.ones(1)
    assert unclear(one, one, one, one) == [(False, False), (True, False), (False, False), (False, False)]


def test_what_was_decided_is_for_one_step() -> None:
    clock = Clock(None)
    clock.advance("cond", None, call())
    clock.verdict = SKIP
    clock.advance("uncond", None, call())
    assert clock.verdict is SKIP
    clock.advance("cond", None, call())
    assert clock.verdict is None


def test_the_last_step_is_known_if_the_length_was_announced() -> None:
    clock, found = Clock(3), []
    for _ in range(3):
        clock.advance("only", None, call())
        found.append(clock.is_last)
    assert found == [False, False, True]
    assert not Clock(None).is_last


def test_a_call_at_an_earlier_time_begins_a_run() -> None:
    clock = Clock(None)
    assert [clock.advance("only", None, call(time)) for time in (1.0, 0.9, 0.8, 1.0)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0, 0.9, 0.8, 0.1, 0.0], []),
        ([0, 1, 2, 3], []),
        ([1.0, 1.0, 0.9, 0.9, 0.8], []),
        ([1.0, 0.9, 1.0], [2]),
        ([1.0, 1.0, 0.9, 0.9, 1.0], [4]),
        ([0.0, 0.1, 0.0], [2]),
        ([1.0], []),
        ([1.0, 0.5], []),
        ([0.5, 1.0], []),
        ([1.0, 0.0, 1.0], [2]),
    ],
)
def test_a_run_begins_when_time_turns_back(times: list[float], expected: list[int]) -> None:
    clock = Clock(None)
    assert [number for number, time in enumerate(times) if clock.turns_back(time)] == expected


def test_times_of_long_runs_are_not_kept() -> None:
    clock = Clock(None)
    for time in range(1000):
        assert not clock.turns_back(float(time))
    assert len(clock._times) <= 3


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
    assert state.obstacle(inputs(1, UNCOND[:, :2]), asks=True) == "the shapes, dtypes or set of arguments changed"
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
