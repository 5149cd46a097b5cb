"""What has no weights is remembered while the conditioning is the same, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import pytest
import torch
from driving import COND, UNCOND, Plain, at, case, counted, stepped

from samovar.cache import apply_teacache_hook
from samovar.hooks import NOT_BYPASSED, call_context
from samovar.trace.constants import Constants, Key, versions


class Wave(torch.nn.Module):
    """Something without weights; counts how often it runs."""

    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x.cos()


class Steps:
    """Forwards that call one module."""

    def __init__(self, module: torch.nn.Module, calls: int = 1) -> None:
        self.constants = Constants()
        self.allowed: dict[Key, bool] = {(module, number): False for number in range(calls)}
        self._module = module

    def begin(self, conditioning: list[torch.Tensor], form: Hashable = None) -> None:
        self.constants.begin_step(self.allowed, conditioning, form)

    def call(self, x: torch.Tensor) -> Any:
        output = self.constants.recall(self._module)
        if output is NOT_BYPASSED:
            output = self._module(x)
            self.constants.keep(self._module, output)
        return output

    def step(self, x: torch.Tensor, form: Hashable = None) -> Any:
        self.begin([x], form)
        return self.call(x)


def test_what_was_seen_twice_to_be_the_same_is_not_run_again() -> None:
    wave, x = Wave(), torch.arange(4.0)
    steps = Steps(wave)
    outputs = [steps.step(x) for _ in range(5)]
    assert wave.calls == 2
    assert all(torch.equal(output, x.cos()) for output in outputs)
    assert steps.allowed == {(wave, 0): True}
    steps.constants.clear()
    steps.step(x)
    assert wave.calls == 3


def test_another_branch_of_the_same_trace_needs_to_see_it_once() -> None:
    wave = Wave()
    one, other = Steps(wave), Steps(wave)
    other.allowed = one.allowed
    for _ in range(3):
        assert torch.equal(one.step(COND), COND.cos())
    for _ in range(3):
        assert torch.equal(other.step(UNCOND), UNCOND.cos())
    assert wave.calls == 3


def test_several_calls_in_one_forward_are_kept_apart() -> None:
    wave, texts = Wave(), [torch.ones(2), torch.zeros(3)]
    steps = Steps(wave, calls=2)
    for _ in range(4):
        steps.begin(texts)
        for text in texts:
            assert torch.equal(steps.call(text), text.cos())
    assert wave.calls == 4


def test_what_is_not_allowed_runs_every_time() -> None:
    wave, x = Wave(), torch.arange(4.0)
    steps = Steps(wave, calls=0)
    for _ in range(4):
        steps.step(x)
    assert wave.calls == 4


@pytest.mark.parametrize("change", ["another tensor", "an equal one", "written into", "another form", "one more"])
def test_it_runs_again_when_the_conditioning_is_other(change: str) -> None:
    wave, x = Wave(), torch.arange(4.0)
    steps = Steps(wave)
    for _ in range(3):
        steps.step(x)
    assert wave.calls == 2
    given = {"another tensor": x + 1, "an equal one": x.clone()}.get(change, x)
    if change == "written into":
        x.add_(1)
    steps.begin([given, x] if change == "one more" else [given], form=change == "another form" or None)
    assert torch.equal(steps.call(given), given.cos())
    assert wave.calls == 3


def test_an_output_that_somebody_wrote_into_is_not_given_again() -> None:
    steps, x = Steps(Wave()), torch.arange(4.0)
    for index in range(8):
        output = steps.step(x)
        assert torch.equal(output, x.cos())
        if index >= 4:
            output.mul_(2)


class Counting(torch.nn.Module):
    """Gives something else each time, whatever it is given."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


def test_what_gives_something_else_for_the_same_is_never_remembered() -> None:
    steps, x = Steps(Counting()), torch.zeros(1)
    assert [float(steps.step(x)) for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_change_that_nobody_counts_is_not_risked() -> None:
    wave = Wave()
    steps = Steps(wave)
    with torch.inference_mode():
        x = torch.arange(4.0)
        for _ in range(3):
            assert torch.equal(steps.step(x), x.cos())
            x.add_(1)
    assert wave.calls == 3
    with torch.inference_mode():
        assert versions([torch.ones(1)]) is None


def test_a_module_that_somebody_watches_runs_at_every_step() -> None:
    wave, x, seen = Wave(), torch.arange(4.0), []
    steps = Steps(wave)
    for _ in range(3):
        steps.step(x)
    wave.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(2):
        steps.step(x)
    assert len(seen) == 2


class Opaque(NamedTuple):
    value: torch.Tensor
    secret: object


def test_an_output_that_cannot_be_looked_into_is_not_remembered() -> None:
    class Secretive(Wave):
        def forward(self, x: Any) -> Any:
            return Opaque(super().forward(x), open)

    module, x = Secretive(), torch.arange(4.0)
    steps = Steps(module)
    for _ in range(4):
        steps.step(x)
    assert module.calls == 4


# ------------------------------------------------------------------------------------------------ in a model


class Waving(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.wave = Wave()

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        return super().embed(time, conditioning) + self.wave(conditioning).mean()


@pytest.mark.parametrize("change", ["nothing", "another prompt", "the prompt in place", "autocast"])
def test_computed_steps_are_those_of_the_bare_model(change: str) -> None:
    model, bare, text, calls = Waving(), Waving(), COND.clone(), []
    apply_teacache_hook(model, {"schedule": "###########."})
    with torch.no_grad(), call_context(branch="only"):
        for index in range(11):
            if index == 6 and change == "another prompt":
                text = UNCOND
            if index == 6 and change == "the prompt in place":
                text.neg_()
            with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast" and index >= 6):
                outputs = [built(*at(index), text) for built in (model, bare)]
            assert torch.equal(*outputs), f"step {index}"
            calls.append(model.wave.calls)
    assert calls[5] == calls[3], "it was remembered"
    assert (calls[10] == calls[5]) is (change == "nothing")


def test_in_a_model_of_diffusers_what_has_weights_runs_at_every_step() -> None:
    name = "FluxTransformer2DModel"
    model = case(name).build()
    apply_teacache_hook(model, {"schedule": "####...."})
    kept = case(name).inputs(0) | {"return_dict": False}
    with torch.no_grad(), call_context(branch="only"), stepped(model, 8) as loop:
        for index in range(8):
            moving = {key: case(name).inputs(index)[key] for key in ("hidden_states", "timestep")}
            with counted([model.context_embedder, model.x_embedder]) as calls:
                loop.call(lambda moving=moving: model(**kept | moving))
            assert len(calls) == 2, f"step {index}"
