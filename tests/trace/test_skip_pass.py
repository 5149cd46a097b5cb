"""Forwards whose blocks are skipped: what they give, who decides, and which models are found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Leaking, Plain, at, case, counted
from gated import Gated, given

import zoo
from samovar.arch import BlockDeclaration, find_anatomy
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import ModelError
from samovar.trace.forward import Given
from samovar.trace.skip_pass import Mode, Replay, StepPass, rehearse
from samovar.trace.twin import TrialFailed

TEXT_FIRST = "HunyuanVideoTransformer3DModel"
"""Its text runs through blocks of its own before the sample does."""


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for stack in find_anatomy(model).stacks for block in stack.modules(model)]


def test_what_is_skipped_gives_what_was_computed_with_the_residuals_of_that_step() -> None:
    name = "FluxTransformer2DModel-controlnet"
    model = case(name).build()
    exact, gated = case(name).run(model, 1), Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    step = StepPass(trace, "compute")
    assert zoo.equal(gated.through(step, gated.of(case(name), 1)), exact)
    assert step.residuals is not None
    assert not zoo.equal(step.residuals, first)
    skipped = gated.through(StepPass(trace, "skip", step.residuals), gated.of(case(name), 1))
    torch.testing.assert_close(skipped, exact, rtol=1e-5, atol=1e-5)


def test_skipping_runs_no_block_and_nothing_between() -> None:
    name = "WanAnimateTransformer3DModel"
    model = case(name).build()
    gated = Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    between = [module for path in trace.side for module in model.get_submodule(path)]
    assert between
    with counted([*blocks_of(model), *between]) as calls:
        gated.through(StepPass(trace, "skip", first), gated.of(case(name), 1))
    assert not calls


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


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", TEXT_FIRST])
@pytest.mark.parametrize("answer", ["skip", "compute"])
def test_the_leader_is_asked_once_with_its_arguments(name: str, answer: Mode) -> None:
    model = case(name).build()
    exact, gated = case(name).run(model, 1), Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    asked: list[torch.nn.Module] = []

    def choose(given: Given) -> Mode:
        asked.append(given.module)
        return answer

    with counted(blocks_of(model)) as calls:
        output = gated.through(StepPass(trace, "ask", first, choose), gated.of(case(name), 1))
    assert trace.leader.segment is not None
    assert asked == [model.get_submodule(trace.leader.segment.stack.block_paths[0])]
    early = [block for segment in trace.early_segments for block in segment.stack.modules(model)]
    assert bool(early) is (name == TEXT_FIRST)
    assert any(block not in early for block in calls) is (answer == "compute")
    assert zoo.equal(output, exact) is (answer == "compute")


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

LEADERS = {
    "FluxTransformer2DModel": ("transformer_blocks", "hidden_states"),
    TEXT_FIRST: ("transformer_blocks", "hidden_states"),
    "Kandinsky5Transformer3DModel": ("visual_transformer_blocks", "visual_embed"),
    "Flux3Transformer2DModel-reference": ("mode_blocks.image", "hidden_states"),
    "Lumina2Transformer2DModel": ("noise_refiner", "hidden_states"),
}
"""By zoo case: the stack that leads and the parameter that carries what is denoised; several run text first."""


@pytest.mark.parametrize("name", LEADERS)
def test_the_first_stack_that_sees_the_sample_leads_unless_one_is_declared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = Gated(case(name).build())
    (trace, _, first_calls), (one, other) = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    segment = trace.leader.segment
    assert segment is not None
    assert (trace.leader.gate.path, segment.stack.streams[trace.stream].parameter) == LEADERS[name]
    assert one is first_calls[segment]
    assert other is not None
    streams = [trace.leader.read(given.args, given.kwargs)[trace.stream] for given in (one, other)]
    assert not torch.equal(*streams), "the other one has another sample"
    last = trace.segments[-1].stack.path
    monkeypatch.setitem(DECLARATIONS, case(name).model, BlockDeclaration(leader=last))
    (trace, _, _), _ = gated.rehearsed(gated.of(case(name)), gated.of(case(name), 1))
    assert trace.leader.gate.path == last


def test_nobody_sees_a_rehearsal() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    watched, output = gated.watched(gated.of(case(name)))
    with counted(gated.model.modules()) as calls:
        rehearse(
            gated.model, gated.gates.by_module, watched, gated.of(case(name)), output,
            lambda with_time: gated.of(case(name), 1),
        )  # fmt: skip
    assert not calls


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
