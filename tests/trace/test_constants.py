"""What has no weights is remembered while its inputs are the same, and nothing else ever is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from driving import COND, Gated, Plain, at, case, counted

from samovar.hooks import NOT_BYPASSED
from samovar.trace.constants import Constants
from samovar.trace.passes import StepPass


class Wave(torch.nn.Module):
    """Something without weights; counts how often it runs."""

    calls = 0

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        self.calls += 1
        return (x * scale).cos()


def step(constants: Constants, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A forward that calls the module once."""
    constants.begin_step()
    return call(constants, module, *args, **kwargs)


def call(constants: Constants, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = constants.recall(module, args, kwargs)
    if output is NOT_BYPASSED:
        output = module(*args, **kwargs)
        constants.keep(module, output)
    return output


def test_what_was_seen_twice_to_be_the_same_is_not_run_again() -> None:
    constants, wave, x = Constants(), Wave(), torch.arange(4.0)
    outputs = [step(constants, wave, x) for _ in range(5)]
    assert wave.calls == 2
    assert all(torch.equal(output, x.cos()) for output in outputs)
    constants.clear()
    step(constants, wave, x)
    assert wave.calls == 3


def test_several_calls_in_one_forward_are_kept_apart() -> None:
    constants, wave = Constants(), Wave()
    texts = torch.ones(2), torch.zeros(3)
    for _ in range(4):
        constants.begin_step()
        for text in texts:
            assert torch.equal(call(constants, wave, text), text.cos())
    assert wave.calls == 4


CHANGES: dict[str, Callable[[torch.Tensor], tuple[Any, dict[str, Any]]]] = {
    "another tensor": lambda x: (x + 1, {}),
    "an equal one": lambda x: (x.clone(), {}),
    "written into": lambda x: (x.add_(1), {}),
    "another number": lambda x: (x, {"scale": 2.0}),
    "another shape": lambda x: (x[:2], {}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_runs_again_when_anything_it_is_given_is_other(change: str) -> None:
    constants, wave, x = Constants(), Wave(), torch.arange(4.0)
    for _ in range(3):
        step(constants, wave, x)
    given, kwargs = CHANGES[change](x)
    assert torch.equal(step(constants, wave, given, **kwargs), wave(given, **kwargs))


def test_what_is_called_with_something_else_at_each_step_is_let_be() -> None:
    constants, wave = Constants(), Wave()
    for index in range(6):
        x = torch.full((2,), float(index))
        assert torch.equal(step(constants, wave, x), x.cos())
    assert wave.calls == 6


def test_an_output_that_somebody_wrote_into_is_not_given_again() -> None:
    constants, wave, x = Constants(), Wave(), torch.arange(4.0)
    for _ in range(4):
        output = step(constants, wave, x)
        assert torch.equal(output, x.cos())
        output.mul_(2)


class Counting(torch.nn.Module):
    """Gives something else each time, whatever it is given."""

    count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


def test_what_gives_something_else_for_the_same_is_never_remembered() -> None:
    constants, counting, x = Constants(), Counting(), torch.zeros(1)
    assert [float(step(constants, counting, x)) for _ in range(5)] == [1, 2, 3, 4, 5]


class Buffered(Wave):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, x: Any, scale: float = 1.0) -> Any:
        return super().forward(x, scale) + self.offset


def test_a_buffer_that_is_changed_counts_like_an_input() -> None:
    constants, module, x = Constants(), Buffered(), torch.arange(4.0)
    for _ in range(3):
        step(constants, module, x)
    assert module.calls == 2
    module.offset.add_(1)
    assert torch.equal(step(constants, module, x), x.cos() + 1)


def test_a_change_that_nobody_counts_is_not_risked() -> None:
    constants, wave = Constants(), Wave()
    with torch.inference_mode():
        x = torch.arange(4.0)
        for _ in range(3):
            assert torch.equal(step(constants, wave, x), x.cos())
            x.add_(1)
    assert wave.calls == 3


def test_autocast_makes_another_call_of_it() -> None:
    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    constants, product, x = Constants(), Product(), torch.ones(2, 2)
    for _ in range(3):
        step(constants, product, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert step(constants, product, x).dtype == torch.bfloat16


def test_a_module_that_somebody_watches_runs_at_every_step() -> None:
    constants, wave, x = Constants(), Wave(), torch.arange(4.0)
    for _ in range(3):
        step(constants, wave, x)
    seen: list[int] = []
    wave.register_forward_hook(lambda *_: seen.append(1))
    step(constants, wave, x)
    step(constants, wave, x)
    assert len(seen) == 2


class Opaque(NamedTuple):
    value: torch.Tensor
    secret: object


def test_an_output_that_cannot_be_looked_into_is_not_remembered() -> None:
    class Secretive(Wave):
        def forward(self, x: Any, scale: float = 1.0) -> Any:
            return Opaque(super().forward(x, scale), open)

    constants, module, x = Constants(), Secretive(), torch.arange(4.0)
    for _ in range(4):
        step(constants, module, x)
    assert module.calls == 4


# ------------------------------------------------------------------------------------------------ in a forward


def test_in_a_model_parts_without_weights_are_spared_and_those_with_weights_run() -> None:
    name = "FluxTransformer2DModel"
    model = case(name).build()
    gated = Gated(model)
    kept = {key: value for key, value in case(name).inputs(0).items() if key not in ("hidden_states", "timestep")}
    (trace, _, _), _ = gated.rehearsed(gated.of(case(name)))
    constants = Constants()
    for index in range(1, 5):
        moving = {key: case(name).inputs(index)[key] for key in ("hidden_states", "timestep")}
        inputs = gated.inputs(**kept, **moving, return_dict=False)
        with torch.no_grad():
            exact = case(name).build()(**kept, **moving, return_dict=False)[0]
        with counted([model.context_embedder, model.x_embedder]) as calls:
            output = gated.through(StepPass(trace, "compute", constants=constants), inputs)[0]
        assert torch.equal(output, exact), f"step {index}"
        assert len(calls) == 2, "what has weights is never remembered"


def test_parts_without_weights_run_no_more_than_twice_in_a_run() -> None:
    class Turned(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.wave = Wave()

        def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
            return super().embed(time, conditioning) + self.wave(conditioning).mean()

    model = Turned()
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.wave.calls, constants = 0, Constants()
    for index in range(1, 6):
        with torch.no_grad():
            exact = Turned()(*at(index), COND)
        output = gated.through(StepPass(trace, "compute", constants=constants), gated.inputs(*at(index), COND))
        assert torch.equal(output, exact)
    assert model.wave.calls == 2
