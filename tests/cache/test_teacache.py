"""The hook: decides as TeaCache does, once a step, for each run and branch on its own, and comes off exactly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driving import (
    COND,
    INFINITE,
    UNCOND,
    UNGUARDED,
    Plain,
    at,
    cached,
    differing,
    flux,
    loop,
    masks,
    qwen,
    recorded,
)
from torch.utils._python_dispatch import TorchDispatchMode

import zoo
from pipelines import PIPELINES, TinyPipeline
from samovar.cache import TeaCacheHook, apply_teacache_hook
from samovar.cache import threshold as under_test
from samovar.cache.signal import known_coefficients
from samovar.core.errors import HookConflictError, SettingError
from samovar.hooks import HookOrder, HookRegistry, ModelHook, call_context, running

SKIPPING = {**UNGUARDED, "rel_l1_thresh": INFINITE}
THIRD = zoo.cond("third", 1, 4)


def all_masks(hook: TeaCacheHook, request: Any = None) -> dict[str, str]:
    return {name: branch.mask for name, branch in hook.stats(request).branches.items()}


# ------------------------------------------------------------------------------------------------ the decision


def plain_teacache(signals: list[torch.Tensor], coefficients: Any, threshold: float) -> tuple[str, list[float]]:
    """TeaCache as its paper has it: which steps of a run are computed, and the distances between all."""
    mask, distances, accumulated = "#", [], 0.0
    for before, now in itertools.pairwise(signals):
        distance = ((now - before).abs().mean() / before.abs().mean()).item()
        rescaled = sum(value * distance**power for power, value in enumerate(reversed(coefficients)))
        assert rescaled > 0
        accumulated += rescaled
        mask += "." if accumulated < threshold else "#"
        accumulated = accumulated if mask[-1] == "." else 0.0
        distances.append(distance)
    return mask, distances


def modulated_inputs(model: torch.nn.Module, calls: list[tuple[Any, Any]]) -> list[torch.Tensor]:
    """What reaches the first attention of a model without a cache in each of these calls."""
    seen: list[torch.Tensor] = []
    attention = model.transformer_blocks[0].attn
    handle = attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        for args, kwargs in calls:
            model(*args, **kwargs)
    handle.remove()
    return seen


@pytest.mark.parametrize(
    ("tiny", "threshold"), [(flux, 0.2), (flux, 0.5), (qwen, 0.2), (qwen, 0.4)], ids=["f.2", "f.5", "q.2", "q.4"]
)
def test_decisions_are_those_of_plain_teacache(tiny: TinyPipeline, threshold: float) -> None:
    pipe = tiny.build(0)
    backend = cached(pipe, rel_l1_thresh=threshold)
    with recorded(pipe.transformer) as recorder:
        tiny.run(pipe, steps=10)
    cond, uncond = backend.stats().denoisers["transformer"].branches.values()
    backend.handle.detach()
    signals = modulated_inputs(pipe.transformer, recorder.calls[::2])
    coefficients = known_coefficients()[type(pipe.transformer).__name__].values
    mask, distances = plain_teacache(signals, coefficients, threshold)
    assert cond.mask == uncond.mask == mask
    assert set(mask) == {"#", "."}
    assert [step.distance for step in cond.steps[1:]] == pytest.approx(distances, rel=1e-5)
    assert [step.distance for step in uncond.steps] == [None] * 10, "the first branch decides for all"


GUARDS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "#..........."),
    "first": ({"first_steps": 3}, "###........."),
    "last": ({"last_steps": 2}, "#.........##"),
    "in a row": ({"max_skips": 2}, "#..#..#..#.."),
    "window": ({"start": 0.25, "end": 0.75}, "###......###"),
    "few steps": ({"min_steps": 13}, "############"),
    "defaults": ({"max_skips": 4, "last_steps": 1, "min_steps": 8}, "#....#....##"),
    "zero": ({"rel_l1_thresh": 0}, "############"),
}


@pytest.mark.parametrize("name", GUARDS)
def test_guards_on_a_pipeline(name: str) -> None:
    settings, mask = GUARDS[name]
    tiny = PIPELINES["ltx"]
    pipe = tiny.build(0)
    backend = cached(pipe, **{"rel_l1_thresh": INFINITE, **settings})
    tiny.run(pipe, steps=12)
    assert masks(backend.stats()) == [mask]


def _scheduler(begin: int) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(12)
    scheduler.set_begin_index(begin)
    return scheduler


# ------------------------------------------------------------------------------------------------ waiting for a device


class Reads(TorchDispatchMode):
    """Counts what has to wait for a device: numbers that are read, and tensors that are compared."""

    def __init__(self, on_host: set[int]) -> None:
        super().__init__()
        self.count = 0
        self._on_host = on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        if func in waits and args[0].untyped_storage().data_ptr() not in self._on_host:
            self.count += 1
        return func(*args, **(kwargs or {}))


class ReadingHook(ModelHook):
    """Counts the reads within each call of a denoiser; what a scheduler keeps on the host may be read."""

    order = HookOrder.OUTERMOST

    def __init__(self, scheduler: Any) -> None:
        self.counts: list[int] = []
        self._scheduler = scheduler
        self._mode: Reads | None = None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._mode = Reads({self._scheduler.sigmas.untyped_storage().data_ptr()})
        self._mode.__enter__()
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        assert self._mode is not None
        self._mode.__exit__(None, None, None)
        self.counts.append(self._mode.count)
        return output


@contextmanager
def reads(pipe: Any) -> Iterator[list[int]]:
    hook = ReadingHook(pipe.scheduler)
    HookRegistry.get_or_create(pipe.transformer).register_hook("a count", hook)
    yield hook.counts
    HookRegistry.get_or_create(pipe.transformer).remove_hook("a count")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every read of the device for a decision."""
    found: list[Any] = []
    real = under_test.measure

    def measure(*args: Any, **how: Any) -> Any:
        found.append(args)
        return real(*args, **how)

    monkeypatch.setattr(under_test, "measure", measure)
    return found


@pytest.mark.parametrize("how", [{}, {"forecast": "linear", "forecast_of": "output"}])
def test_a_schedule_waits_for_nothing(measured: list[Any], how: dict[str, str]) -> None:
    pipe = flux.build(0)
    with reads(pipe) as bare:
        flux.run(pipe, steps=5)
    backend = cached(pipe, schedule="##.#.", **how)
    with reads(pipe) as counts:
        flux.run(pipe, steps=5)
        assert counts[6:] == bare[6:], "once it was seen at three steps what stays the same at all of them"
        del counts[:]
        flux.run(pipe, steps=5)
        assert counts == bare, "from the first step on, once the model is known"
    assert measured == []
    assert masks(backend.stats()) == ["##.#."] * 2


# ------------------------------------------------------------------------------------------------ branches and requests


@torch.no_grad()
def branched(model: torch.nn.Module, plan: list[list[torch.Tensor]], named: bool) -> list[list[torch.Tensor]]:
    """A loop of one's own that calls the branches of a plan at each step."""
    names = {id(COND): "cond", id(UNCOND): "uncond", id(THIRD): "third"}
    outputs = []
    for step, conditionings in enumerate(plan):
        outputs.append([])
        for conditioning in conditionings:
            with call_context(branch=names[id(conditioning)] if named else None):
                outputs[-1].append(model(*at(step), conditioning))
    return outputs


PLANS = {
    "two": [[COND, UNCOND]] * 12,
    "three": [[COND, UNCOND, THIRD]] * 12,
    "negative first": [[UNCOND, COND]] * 12,
    "on half-way": [[COND]] * 6 + [[COND, UNCOND]] * 6,
    "on half-way, first": [[COND]] * 6 + [[UNCOND, COND]] * 6,
    "off half-way": [[UNCOND, COND]] * 6 + [[COND]] * 6,
    "an interval": [[COND]] * 3 + [[UNCOND, COND]] * 5 + [[COND]] * 4,
    "now and then": [[COND, UNCOND], [COND]] * 6,
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("plan", PLANS)
def test_each_branch_is_as_if_it_had_a_model_of_its_own(plan: str, named: bool) -> None:
    """With a schedule, so that each is skipped at the same steps; what is stored for one never reaches another."""
    schedule = "##.#..##.#.#"
    model = Plain()
    hook = apply_teacache_hook(model, {"schedule": schedule})
    outputs = branched(model, PLANS[plan], named)
    for conditioning in (COND, UNCOND, THIRD):
        called = [step for step, given in enumerate(PLANS[plan]) if any(c is conditioning for c in given)]
        if not called:
            continue
        alone = Plain()
        own = apply_teacache_hook(alone, {"schedule": schedule})
        pipe = _Stepped()
        with running(pipe), torch.no_grad():
            expected = []
            for pipe.scheduler._step_index in called:
                with call_context(branch="only"):
                    expected.append(alone(*at(pipe.scheduler._step_index), conditioning))
        found = [outputs[step][[c is conditioning for c in PLANS[plan][step]].index(True)] for step in called]
        assert [called[index] for index in differing(found, expected)] == []
        assert all_masks(own)["only"] in all_masks(hook).values()


class _Stepped:
    """The least that says at which step it is; without sigmas, so that steps count as they do in a loop."""

    def __init__(self) -> None:
        self.scheduler: Any = SimpleNamespace(timesteps=torch.linspace(1, 0, 12), _step_index=None)


@pytest.mark.parametrize("settings", [{"rel_l1_thresh": 0.3}])
def test_requests_in_turn_are_as_one_after_the_other(settings: dict[str, Any]) -> None:
    requests = {"one": COND, "two": UNCOND, "three": COND}
    serial, model = Plain(), Plain()
    hooks = [apply_teacache_hook(found, {**UNGUARDED, **settings}) for found in (serial, model)]
    expected = {}
    for request, conditioning in requests.items():
        with call_context(request=request):
            expected[request] = loop(serial, conditioning=conditioning, name=request)
    found: dict[str, list[torch.Tensor]] = {request: [] for request in requests}
    with torch.no_grad():
        for step in range(12):
            for request, conditioning in requests.items():
                with call_context(request=request, branch="only"):
                    found[request].append(model(*at(step, name=request), conditioning))
    for request in requests:
        assert differing(found[request], expected[request]) == []
        assert hooks[0].stats(request).branches == hooks[1].stats(request).branches
    assert len({str(hooks[0].stats(request).branches) for request in requests}) == 3, "they are not alike"


def test_a_run_may_end_while_another_begins() -> None:
    """As it may in another thread; here the other begins whenever the one is looked for."""
    model = Plain()
    hook = apply_teacache_hook(model, SKIPPING)

    class Request:
        is_watched = False

        def __hash__(self) -> int:
            return id(self)

        def __eq__(self, other: object) -> bool:
            if Request.is_watched:
                Request.is_watched = False
                begin(Request())
                Request.is_watched = True
            return self is other

    @torch.no_grad()
    def begin(request: Request) -> None:
        with call_context(request=request):
            model(*at(0), COND)

    first, later = Request(), Request()
    begin(first)
    begin(later)
    Request.is_watched = True
    hook.end_run(model, first)
    Request.is_watched = False
    assert first not in [context.request for context in hook.state_manager.states()]
    assert later in [context.request for context in hook.state_manager.states()]


def test_a_model_of_sample_and_time_alone_skips_and_begins_a_run_when_time_turns_back() -> None:
    class Unconditional(Plain):
        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden_states, timestep, COND)

    model = Unconditional()
    hook = apply_teacache_hook(model, SKIPPING)
    with torch.no_grad():
        for number in (1, 2):
            for step in range(4):
                model(*at(step))
            assert all_masks(hook) == {f"request {number}": "#..."}


def test_a_call_of_which_nothing_tells_the_branch_is_computed() -> None:
    class Untimed(Plain):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().forward(hidden_states, torch.zeros(1), COND)

    model = Untimed()
    with torch.no_grad():
        exact = [model(at(step)[0]) for step in range(4)]
        hook = apply_teacache_hook(model, SKIPPING)
        assert differing([model(at(step)[0]) for step in range(4)], exact) == []
    assert all_masks(hook) == {"unknown": "####"}
    assert hook.stats().expected_speedup == 1.0


# ------------------------------------------------------------------------------------------------ runs of a loop


@pytest.mark.parametrize("schedule", [None, "#..........."])
@pytest.mark.parametrize("aborted", [2, 5])
def test_a_run_after_one_that_was_aborted_is_a_fresh_one(aborted: int, schedule: str | None) -> None:
    settings = {**UNGUARDED, "rel_l1_thresh": 0.3, "schedule": schedule}
    model, fresh = Plain(), Plain()
    for found in (model, fresh):
        apply_teacache_hook(found, settings)
    with torch.no_grad(), call_context(branch="only"):
        for step in range(aborted):
            model(*at(step, name="aborted"), UNCOND)
    assert differing(loop(model, name="other"), loop(fresh, name="other")) == []


def test_a_refresh_begins_a_run_of_so_many_steps() -> None:
    model = Plain()
    hook = apply_teacache_hook(model, {**SKIPPING, "last_steps": 2, "min_steps": 5})
    for steps, mask in ((6, "#...##"), (8, "#.....##"), (4, "####")):
        hook.refresh(model, steps)
        loop(model, steps=steps)
        assert all_masks(hook) == {"only": mask}
    planned = apply_teacache_hook(other := Plain(), {"schedule": "#.#."})
    with pytest.raises(SettingError, match="4 steps, not for 5"):
        planned.refresh(other, 5)


# ------------------------------------------------------------------------------------------------ forecasts


def test_an_output_is_forecast_along_a_line_through_the_noise() -> None:
    pipe = flux.build(0)
    cached(pipe, schedule="##..#...", forecast="linear", forecast_of="output")
    with recorded(pipe.transformer) as recorder:
        flux.run(pipe, steps=8)
    sigmas = pipe.scheduler.sigmas.tolist()
    cond, known = recorder.outputs[::2], [0, 1]
    for step, sign in enumerate("##..#..."):
        if sign == "#":
            known = [*known, step][-2:]
            continue
        older, newer = known
        slope = (cond[newer] - cond[older]) / (sigmas[newer] - sigmas[older])
        expected = cond[newer] + slope * (sigmas[step] - sigmas[newer])
        torch.testing.assert_close(cond[step], expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------ on and off


def test_a_second_cache_and_a_wrong_place_are_refused() -> None:
    model = Plain()
    hook = apply_teacache_hook(model)
    with pytest.raises(SettingError, match="This Plain has a cache already"):
        apply_teacache_hook(model)
    with pytest.raises(SettingError, match="attaches to a denoiser"):
        apply_teacache_hook("a model")  # type: ignore[arg-type]
    hook.detach()

    class Mine(ModelHook):
        def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call_original(module, *args, **kwargs)

    HookRegistry.get_or_create(model).register_hook("mine", Mine())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    with pytest.raises(HookConflictError, match="'mine' does so already"):
        apply_teacache_hook(model)
    assert [(type(module), set(vars(module))) for module in model.modules()] == before


def test_a_step_whose_gradients_are_wanted_is_computed() -> None:
    """Guidance by gradients through the denoiser: a skipped step would know nothing of the blocks."""
    bare, model = Plain().eval(), Plain().eval()
    hook = apply_teacache_hook(model, SKIPPING)
    for step in range(4):
        gradients = []
        for found in (bare, model):
            sample, time = at(step)
            sample.requires_grad_()
            with call_context(branch="only"):
                output = found(sample, time, COND)
            gradients.append(torch.autograd.grad(output.square().sum(), [sample, found.unembed.weight]))
        assert zoo.equal(*gradients), f"step {step}"
    assert {step.reason for step in hook.stats().branches["only"].steps} == {"gradients are recorded"}
    loop(model)
    assert "." in hook.stats().branches["only"].mask
