"""No run is answered with what belongs to another time, prompt, request or set of weights.

Each of these was wrong once without a word: an output, a gradient, or memory that grew.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from driving import COND, UNCOND, Plain, at, case, differing, loop, masks, recorded, second

import samovar
from pipelines import PIPELINES
from samovar.cache import AutoConfig, CacheBackend, apply_teacache_hook, make_cache_backend
from samovar.core.errors import ModelError
from samovar.hooks import HookOrder, HookRegistry, ModelHook, call_context

BACKENDS = ("tea_cache",)
flux, wan, controlled = PIPELINES["flux"], PIPELINES["wan"], PIPELINES["flux-controlnet"]
both = pytest.mark.parametrize("name", BACKENDS)


def on(target: Any, name: str, **settings: Any) -> CacheBackend:
    backend = make_cache_backend({"backend": name, **settings})
    assert backend is not None
    backend.enable(target)
    return backend


def steps_of(backend: CacheBackend, branch: int = 0) -> Sequence[Any]:
    """What was done with each step of a branch of the only denoiser."""
    (stats,) = backend.stats().denoisers.values()
    steps: Sequence[Any] = list(stats.branches.values())[branch].steps
    return steps


# ------------------------------------------------------------------------------------------------ history


def assert_begins_anew(computed: Sequence[bool], at: int) -> None:
    """Whether as many steps are computed from a place on as at the beginning of a run, and others skipped later."""
    assert list(computed[at : at + 3]) == [True] * 3, "nothing that is stored stands for them"
    assert not all(computed[at + 3 :])


def test_a_forecast_does_not_span_a_change_of_the_prompt() -> None:
    model, steps, switch = Plain(), 24, 11
    backend = on(model, "auto", tolerance=1e6)
    outputs, sample = [], torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(0))
    with call_context(branch="cond"), torch.no_grad():
        for step in range(steps):
            time, text = torch.full((1,), 1 - step / steps), COND if step < switch else UNCOND
            outputs.append(model(sample, time, text))
            sample = sample + 0.3 * outputs[-1] / steps
    records = steps_of(backend)
    assert not all(record.computed for record in records[:switch])
    assert records[switch].reason == "conditioning changed"
    assert_begins_anew([record.computed for record in records], switch)


def test_a_forecast_does_not_span_the_end_of_a_controlnet() -> None:
    pipe, steps = controlled.build(0), 30
    backend = on(pipe, "auto", tolerance=1e6)
    with recorded(pipe.transformer) as recorder:
        controlled.run(pipe, steps, control_guidance_end=0.5, controlnet_conditioning_scale=3.0)
    calls = recorder.calls[::2]
    is_on = [any(bool(part.any()) for part in kwargs["controlnet_block_samples"]) for _, kwargs in calls]
    switch = is_on.index(False)
    assert 0 < switch < steps - 2
    assert_begins_anew([record.computed for record in steps_of(backend)], switch)


def test_a_forecast_does_not_span_steps_that_a_branch_was_left_out_of() -> None:
    """Guidance is switched off and on again by a callback, as diffusers documents it."""
    pipe, steps, off, back = wan.build(0), 50, 8, 34
    pipe.transformer_2 = None
    pipe.register_to_config(boundary_ratio=None)

    def switch(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        pipe._guidance_scale = 1.0 if off <= step + 1 < back else 2.0
        return given

    backend = on(pipe, "auto", tolerance=1e6)
    wan.run(pipe, steps, callback_on_step_end=switch)
    following = steps_of(backend, branch=1)
    after = [record.step for record in following].index(back)
    assert [record.step for record in following] == [*range(off), *range(back, steps)]
    assert_begins_anew([record.computed for record in following], after)


class GaveUp(Exception):
    """What a callback raises."""


def give_up(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
    if step:
        raise GaveUp
    return {}


def other_of(pipe: Any) -> Any:
    """A pipeline made by hand of the same transformer."""
    other = second(pipe)
    other.image_encoder = other.feature_extractor = None
    return other


@both
def test_a_run_after_one_that_was_given_up_is_as_if_it_had_been_alone(name: str) -> None:
    results = []
    for aborts in (False, True):
        pipe = flux.build(0)
        other = other_of(pipe)
        on(pipe, name).enable(other)
        if aborts:
            with pytest.raises(GaveUp):
                flux.run(other, 12, seed=1, prompt="an owl", callback_on_step_end=give_up)
        results.append(flux.run(other, 12, seed=2, prompt="a cat"))
    assert torch.equal(*results)


def test_requests_of_a_loop_of_ones_own_do_not_fill_the_memory() -> None:
    model = Plain()
    hook, counts = apply_teacache_hook(model), []
    for number in range(60):
        with call_context(request=f"user {number}"):
            loop(model)
        counts.append(len(hook.state_manager.states()))
    assert counts[-1] == counts[30] <= 20


@contextlib.contextmanager
def perturbed(model: Any) -> Iterator[None]:
    """Guidance by layers left out, as SLG has it: the same inputs, but some blocks do nothing."""
    blocks = model.single_transformer_blocks[:1]
    for block in blocks:
        block.forward = lambda hidden_states, encoder_hidden_states, **_: (encoder_hidden_states, hidden_states)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class Guided:
    """A loop with two calls a step that nothing but their result tells apart; or a time, which is no name."""

    def __init__(self, kind: str) -> None:
        self.case = case("FluxTransformer2DModel")
        self.transformer = self.case.build()
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self._kind = kind

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        given = self.case.inputs(0) | {"return_dict": False}
        sample, _ = given.pop("hidden_states").clone(), given.pop("timestep")
        self.scheduler.set_timesteps(12)
        for time in self.scheduler.timesteps:
            now = (time / 1000).reshape(1)
            good = self.transformer(hidden_states=sample, timestep=now, **given)[0]
            with perturbed(self.transformer) if self._kind == "blocks" else contextlib.nullcontext():
                when = now if self._kind == "blocks" else 0.9 * now
                bad = self.transformer(hidden_states=sample, timestep=when, **given)[0]
            sample = self.scheduler.step(good + 3.0 * (good - bad), time, sample, return_dict=False)[0]
        return sample


@both
@pytest.mark.parametrize("hooked", [True, False], ids=["pipeline", "own loop"])
@pytest.mark.parametrize("kind", ["blocks", "time"])
def test_two_calls_of_one_step_never_get_what_is_the_others(kind: str, hooked: bool, name: str) -> None:
    guided = Guided(kind)
    exact = guided()
    on(guided if hooked else guided.transformer, name)
    assert torch.equal(guided(), exact)


# ------------------------------------------------------------------------------------------------ weights and inputs


def test_an_adapter_that_comes_between_two_calls_is_part_of_the_second() -> None:
    peft = pytest.importorskip("peft")
    found = case("SD3Transformer2DModel")
    model = found.build()
    hook, given = apply_teacache_hook(model), found.inputs(0) | {"return_dict": False}
    with torch.no_grad():
        model(**given)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False)
    model.add_adapter(config, adapter_name="one")
    with torch.no_grad():
        output = model(**given)[0]
        hook.is_paused = True
        assert torch.equal(output, model(**given)[0])


def adapted() -> Any:
    """A pipeline with an adapter that is there, but counts for nothing yet."""
    peft = pytest.importorskip("peft")
    pipe = flux.build(0)
    targets = ["context_embedder", "x_embedder", "to_q", "to_k"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=targets, init_lora_weights=False)
        pipe.transformer.add_adapter(config, "style")
    pipe.transformer.set_adapters("style", 0.0)
    return pipe


def in_place(transformer: Any) -> None:
    with torch.no_grad():
        transformer.context_embedder.weight.mul_(3)


def in_data(transformer: Any) -> None:
    """No count of torch's tells of this."""
    transformer.context_embedder.weight.data.mul_(3)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "adapters": (adapted, lambda transformer: transformer.set_adapters("style", 1.0)),
    "in place": (lambda: flux.build(0), in_place),
    "in data": (lambda: flux.build(0), in_data),
}


@both
@pytest.mark.parametrize("kind", CHANGES)
def test_computed_steps_have_the_weights_of_the_moment(kind: str, name: str) -> None:
    build, change = CHANGES[kind]
    pipe, twin, steps, at = build(), build(), 20, 8

    def callback(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        if step + 1 == at:
            change(pipe.transformer)
        return given

    backend = on(pipe, name)
    with recorded(pipe.transformer) as recorder:
        flux.run(pipe, steps, callback_on_step_end=callback)
    mask, wrong = masks(backend.stats())[0], []
    assert "." in mask[at:]
    assert "#" in mask[at:]
    with torch.no_grad():
        for step in range(steps):
            if step == at:
                change(twin.transformer)
            args, kwargs = recorder.calls[2 * step]
            is_exact = torch.equal(recorder.outputs[2 * step], twin.transformer(*args, **kwargs)[0])
            wrong += [step] * (mask[step] == "#" and not is_exact)
    assert wrong == []


@both
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_conditioning_that_is_overwritten_in_place_is_never_stale(mode: Callable[[], Any], name: str) -> None:
    """A buffer that is filled anew. Under inference mode torch counts no changes."""
    found, steps, at = case("QwenImageTransformer2DModel"), 16, 7
    model, bare, wrong = found.build(), found.build(), []
    on(model, name)
    with mode():
        given = {
            key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in found.inputs(0).items()
        }
        for step in range(steps):
            if step == at:
                given["encoder_hidden_states"].copy_(torch.randn(given["encoder_hidden_states"].shape))
            given["timestep"] = torch.full((1,), 1 - step / steps)
            outputs = [built(**given, return_dict=False)[0] for built in (model, bare)]
            given["hidden_states"] = given["hidden_states"] + 0.01 * outputs[1]
            wrong += [step] * (not torch.equal(*outputs))
    assert at not in wrong
    assert wrong, "else nothing was skipped"


class Listed(Plain):
    """Takes its conditioning in a list."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
        return super().forward(hidden_states, timestep, encoder_hidden_states[0])


class Swapping(ModelHook):
    """Puts another prompt into that list, between the hooks that name the branch and the cache."""

    order = HookOrder.SHARD
    swaps = False

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self.swaps:
            args[2][0] = UNCOND
        return args, kwargs


@torch.no_grad()
def test_what_an_inner_hook_puts_into_a_list_is_seen() -> None:
    model, swapping = Listed(), Swapping()
    hook = apply_teacache_hook(model, AutoConfig(1e6))
    HookRegistry.get_or_create(model).register_hook("swapping", swapping)
    with call_context(branch="only"):
        for step in range(12):
            swapping.swaps = step >= 6
            model(*at(step), [COND])
    reasons = [record.reason for record in hook.stats().branches["only"].steps]
    assert [step for step, reason in enumerate(reasons) if reason == "conditioning changed"] == [6]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize("name", ["flux", "qwen-image", "sd3", "wan"])
def test_a_run_under_autocast_is_nobody_elses_business(name: str) -> None:
    tiny = PIPELINES[name]
    fresh, pipe = tiny.build(0), tiny.build(0)
    for built in (fresh, pipe):
        on(built, "tea_cache")
    with torch.autocast("cpu", torch.bfloat16):
        tiny.run(pipe, 10)
    assert torch.equal(tiny.run(pipe, 10), tiny.run(fresh, 10))


@both
@pytest.mark.parametrize("model", ["FluxTransformer2DModel", "QwenImageTransformer2DModel"])
def test_training_with_a_cache_on_is_refused(model: str, name: str) -> None:
    found = case(model)
    built = found.build().train()
    handle = samovar.attach(built, name)
    with pytest.raises(ModelError, match=f"{model} is being trained with a cache on"):
        built(**found.inputs(0), return_dict=False)
    handle.detach()
    built(**found.inputs(0), return_dict=False)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in built.transformer_blocks[0].attn.to_q.parameters())


def test_a_forward_that_is_replaced_on_the_class_counts_for_a_cached_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found = case("FluxTransformer2DModel")
    bare, model = found.build(), found.build()
    on(model, "tea_cache", rel_l1_thresh=0)
    original = type(bare).forward
    monkeypatch.setattr(type(bare), "forward", lambda self, *args, **kwargs: (original(self, *args, **kwargs)[0] * 2,))
    assert torch.equal(found.run(model)[0], found.run(bare)[0])


# ------------------------------------------------------------------------------------------------ threads


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns much more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_restless")
@pytest.mark.parametrize("settings", [{}, {"schedule": "##.#.##.#..#.#"}], ids=["signal", "schedule"])
@pytest.mark.parametrize(("pipeline", "name"), [("flux", "tea_cache"), ("qwen-image", "tea_cache")])
def test_runs_on_two_threads_are_as_one_after_the_other(pipeline: str, name: str, settings: dict[str, Any]) -> None:
    tiny = PIPELINES[pipeline]
    pipe = tiny.build(0)
    pipes = pipe, second(pipe)
    backend = make_cache_backend({"backend": name, **settings})
    assert backend is not None
    handles = [backend.enable(built) for built in pipes]
    expected = [tiny.run(built, 14, seed=seed) for seed, built in enumerate(pipes)]
    for is_cold in (False, True):
        if is_cold:  # Nothing is known of the model when both begin.
            for handle in handles:
                handle.detach()
            handles = [backend.enable(built) for built in pipes]
        found: dict[int, Any] = {}

        def work(seed: int, found: dict[int, Any] = found) -> None:
            found[seed] = tiny.run(pipes[seed], 14, seed=seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert differing([found.get(seed) for seed in range(2)], expected) == []
