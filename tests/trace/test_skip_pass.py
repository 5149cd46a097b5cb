"""Forwards whose blocks are skipped: what they give, who decides, and which models are found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Leaking, Plain, at, case, counted
from gated import Gated, given

import zoo
from samovar.core.errors import ModelError
from samovar.trace.skip_pass import Mode, Replay, StepPass
from samovar.trace.twin import TrialFailed


class Controlled(Plain):
    """Adds to the stream between blocks, which write into what they are given."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x.add_(super().forward(x, temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x.add_(index), temb)
        return x


@pytest.mark.parametrize("make", [Plain, Controlled])
def test_a_skipped_step_adds_the_residual_to_its_own_input(make: type[Plain]) -> None:
    model = make()
    gated = Gated(model)
    (trace, (first,), _), exact = gated.watched(given(*at(0), COND))
    with torch.no_grad():
        expected = model.unembed(model.embed_x(at(1)[0]) + first)
    assert torch.equal(gated.through(StepPass(trace, "skip", [first]), given(*at(1), COND)), expected)
    again = gated.through(StepPass(trace, "skip", [first]), given(*at(0), COND))
    torch.testing.assert_close(again, exact)
    step = StepPass(trace, "compute")
    gated.through(step, given(*at(0), COND))
    assert zoo.equal(step.residuals, [first])


# ------------------------------------------------------------------------------------------------ out of step


class Wayward(Plain):
    """Calls its blocks in another order or in another way than at first."""

    order: tuple[int, ...] = (0, 1, 2)
    by_name = False

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x=x, temb=temb) if self.by_name else self.blocks[index](x, temb)
        return x


WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer": ({"order": (0, 1)}, "the forward ended before it called a block of 'blocks'"),
    "more": ({"order": (0, 1, 2, 2)}, "a block of 'blocks' was not expected here"),
    "other": ({"order": (0, 2, 1)}, "a block of 'blocks' was not expected here"),
    "none": ({"order": ()}, "the forward ended before it called a block of 'blocks'"),
    "by name": ({"by_name": True}, "a block of 'blocks' got other arguments than in the traced forward"),
}


@pytest.mark.parametrize("mode", ["skip", "compute"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_goes_another_way_says_so_and_runs_to_its_end(way: str, mode: Mode) -> None:
    model, (changes, lost) = Wayward(), WAYS[way]
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(given(*at(0), COND))
    vars(model).update(changes)
    step, replayed = StepPass(trace, mode, first), StepPass(trace, "skip", first)
    output = gated.through(step, given(*at(1), COND))
    assert (step.lost, step.residuals) == (lost, None)
    with torch.no_grad():
        assert torch.equal(output, model(*at(1), COND)) or mode == "skip"
    Replay(model, gated.gates.by_module, trace).skip(replayed, (*at(1), COND), {})
    assert replayed.lost == lost


def test_a_block_that_returns_something_else_is_noticed() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(given(*at(0), COND))
    model.run = lambda x, temb: Plain.run(model, x, temb)[0]  # type: ignore[method-assign]
    model.blocks[2].register_forward_hook(lambda module, args, output: (output, output))
    step = StepPass(trace, "compute")
    gated.through(step, given(*at(1), COND))
    assert step.lost == "a block of 'blocks' returned other shapes than in the traced forward"


# ------------------------------------------------------------------------------------------------ the rehearsal


class Tapped(Plain):
    """A value in the middle of the stack is used behind it."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        middle = self.blocks[1](self.blocks[0](x, temb), temb)
        return self.blocks[2](middle, temb) + middle


class Deaf(Plain):
    """Its blocks see the conditioning alone; the sample is added behind them."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        temb = self.embed(timestep, encoder_hidden_states)
        return self.unembed(self.run(temb.expand(1, 5, -1), temb)) + hidden_states


class Strict(Plain):
    """Takes the very sample that it was made for, and no other."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not torch.equal(hidden_states, at(0)[0]):
            raise ValueError("another sample")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


class Endless(Plain):
    """Its output is no number."""

    def forward(self, *given: Any) -> torch.Tensor:
        return super().forward(*given) * torch.nan


class Once(Plain):
    """Cannot be run outside of its own run."""

    itself: Any = None

    def forward(self, *given: Any) -> torch.Tensor:
        if self.itself not in (None, id(self)):
            raise RuntimeError("not at home")
        return super().forward(*given)


REFUSED: dict[type[Plain], str] = {
    Leaking: r"a skipped step differs from a computed one by \d",
    Tapped: r"a skipped step differs from a computed one by \d",
    Endless: "differs from a computed one by nan",
    Deaf: "the sample reaches none of its blocks directly",
    Strict: r"could not test which blocks depend on the sample \(ValueError: another",
    Once: r"a trial of the model failed \(RuntimeError: not at home\)",
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_model_that_cannot_be_skipped_is_found_out(make: type[Plain]) -> None:
    gated = Gated(make())
    vars(gated.model)["itself"] = id(gated.model)
    with pytest.raises(ModelError, match=REFUSED[make]):
        gated.rehearsed(given(*at(0), COND), given(*at(1), COND))


class Refining(Plain):
    """Refines its text with a token for the time before the sample comes in, and knows some times only."""

    def __init__(self) -> None:
        super().__init__()
        self.refiner = torch.nn.ModuleList(Block(self.width) for _ in range(2))

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if float(timestep[0]) != 1.0:
            raise ValueError("no such time")
        text = torch.cat([self.embed_c(encoder_hidden_states), self.embed_t(timestep[:, None])])[None]
        for block in self.refiner:
            text = block(text, torch.zeros(1).to(text))
        return self.unembed(self.run(self.embed_x(hidden_states), text.mean(1, keepdim=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stack_that_sees_the_time_but_not_the_sample_does_not_lead(dtype: torch.dtype) -> None:
    gated = Gated(Refining().to(dtype))
    now, later = ([tensor.to(dtype) for tensor in (*at(step), COND)] for step in (0, 1))
    (trace, _, _), rehearsed = gated.rehearsed(given(*now), given(*later))
    assert trace.leader.gate.path == "blocks"
    assert rehearsed[1] is None, "it takes no other time"


def test_a_replay_calls_nothing_of_the_model_and_survives_a_failure() -> None:
    name = "Krea2Transformer2DModel"
    model = case(name).build()
    gated = Gated(model)
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    replay, inputs = Replay(model, gated.gates.by_module, trace), gated.of(case(name), 1)
    exact = gated.through(StepPass(trace, "skip", residuals), inputs)
    with counted(model.modules()) as calls, pytest.raises(TrialFailed):
        replay.skip(StepPass(trace, "skip", residuals), (), {})
    with counted(model.modules()) as calls:
        output = replay.skip(StepPass(trace, "skip", residuals), *inputs)
    assert not calls
    assert zoo.equal(output, exact)
