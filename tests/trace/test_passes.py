"""What the blocks do in a forward: compute, hand on, or put a stored residual in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Gated, Leaking, Plain, at, case, counted
from torch.utils import _pytree as pytree

import zoo
from samovar.arch import BlockDeclaration, find_anatomy
from samovar.arch.declarations import DECLARATIONS
from samovar.core.errors import ModelError
from samovar.trace.forward import Given
from samovar.trace.passes import Mode, Rehearsal, Replay, StepPass
from samovar.trace.shadow import TrialFailed

TEXT_FIRST = ["HunyuanVideoTransformer3DModel", "Krea2Transformer2DModel", "Flux3Transformer2DModel"]
"""Their text runs through blocks of its own before the sample does."""


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for stack in find_anatomy(model).stacks for block in stack.modules(model)]


def close(one: Any, other: Any) -> bool:
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs if isinstance(a, torch.Tensor))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel-controlnet", *TEXT_FIRST])
def test_computing_gives_the_bits_and_the_residuals(name: str) -> None:
    model = case(name).build()
    exact = case(name).run(model, 1)
    gated = Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)))
    step = StepPass(trace, "compute")
    assert zoo.equal(gated.through(step, gated.of(case(name), 1)), exact)
    assert step.lost is None
    assert step.residuals is not None
    assert [part is None for part in step.residuals] == [slot in trace.idle_slots for slot in range(len(first))]
    assert not zoo.equal(step.residuals, first), "those of this step"
    skipped = gated.through(StepPass(trace, "skip", step.residuals), gated.of(case(name), 1))
    assert close(skipped, exact)


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "WanAnimateTransformer3DModel", *TEXT_FIRST])
def test_skipping_runs_no_block_and_nothing_between(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)))
    between = [module for path in trace.side for module in model.get_submodule(path)]
    with counted([*blocks_of(model), *between]) as calls:
        gated.through(StepPass(trace, "skip", first), gated.of(case(name), 1))
    assert not calls


def test_a_skipped_step_adds_the_stored_residual_to_its_own_input() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    (residual,) = first
    assert residual is not None
    with torch.no_grad():
        expected = model.unembed(model.embed_x(at(1)[0]) + residual)
    output = gated.through(StepPass(trace, "skip", first), gated.inputs(*at(1), COND))
    assert torch.equal(output, expected)


def test_a_residual_may_be_replaced_by_a_number_to_see_what_it_does() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    output = gated.through(StepPass(trace, "skip", first, poison=(0, 7.0)), gated.inputs(*at(1), COND))
    with torch.no_grad():
        assert torch.equal(output, model.unembed(torch.full((1, 5, 8), 7.0)))


def test_what_a_model_adds_between_blocks_counts_once() -> None:
    class Controlled(Plain):
        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                x = block(x + index, temb) * 2
            return x

    model = Controlled()
    with torch.no_grad():
        exact = model(*at(0), COND)
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    output = gated.through(StepPass(trace, "skip", first), gated.inputs(*at(0), COND))
    assert close(output, exact)


class InPlace(Plain):
    """Its blocks write into what they are given."""

    class Block(Block):
        def forward(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            return x.add_(super().forward(x, temb))

    def block(self) -> torch.nn.Module:
        return self.Block(self.width)


def test_residuals_of_blocks_that_write_in_place_are_those_of_the_step() -> None:
    gated = Gated(InPlace())
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    step = StepPass(trace, "compute")
    exact = gated.through(step, gated.inputs(*at(1), COND))
    with torch.no_grad():
        assert torch.equal(exact, InPlace()(*at(1), COND))
    assert close(gated.through(StepPass(trace, "skip", step.residuals), gated.inputs(*at(1), COND)), exact)


# ------------------------------------------------------------------------------------------------ asking the leader


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", *TEXT_FIRST])
@pytest.mark.parametrize("answer", ["skip", "compute"])
def test_the_leader_is_asked_once_with_its_arguments(name: str, answer: Mode) -> None:
    model = case(name).build()
    exact = case(name).run(model, 1)
    gated = Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)))
    asked: list[torch.nn.Module] = []

    def choose(given: Given) -> Mode:
        asked.append(given.module)
        return answer

    with counted(blocks_of(model)) as calls:
        output = gated.through(StepPass(trace, "ask", first, choose), gated.of(case(name), 1))
    assert trace.leader.segment is not None
    assert asked == [model.get_submodule(trace.leader.segment.stack.block_paths[0])]
    late = [block for block in calls if block not in early_blocks(model, trace)]
    assert bool(late) is (answer == "compute"), "blocks before the leader run while it is not known"
    assert zoo.equal(output, exact) is (answer == "compute")


def early_blocks(model: torch.nn.Module, trace: Any) -> list[torch.nn.Module]:
    return [block for segment in trace.early_segments for block in segment.stack.modules(model)]


# ------------------------------------------------------------------------------------------------ out of step


class Wayward(Plain):
    """A model that does not always call its blocks in the same order."""

    order: tuple[int, ...] = (0, 1, 2)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.blocks[index](x, temb)
        return x


OTHER_ORDERS = {"fewer": (0, 1), "more": (0, 1, 2, 2), "other": (0, 2, 1), "later": (1, 2), "none": ()}


@pytest.mark.parametrize("order", OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_a_skipped_step_that_goes_another_way_says_so_and_runs_to_its_end(order: tuple[int, ...]) -> None:
    model = Wayward()
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.order = order
    step = StepPass(trace, "skip", first)
    assert gated.through(step, gated.inputs(*at(1), COND)).shape == (1, 5, 4)
    assert step.lost is not None
    assert "'blocks'" in step.lost


@pytest.mark.parametrize("order", OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_a_computed_step_that_goes_another_way_is_computed(order: tuple[int, ...]) -> None:
    model = Wayward()
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.order = order
    with torch.no_grad():
        exact = model(*at(1), COND)
    step = StepPass(trace, "compute")
    assert torch.equal(gated.through(step, gated.inputs(*at(1), COND)), exact)
    assert step.lost is not None
    assert step.residuals is None


class Restyled(Plain):
    """Calls its blocks with names for what it gives them, or without."""

    by_name = False

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x=x, temb=temb) if self.by_name else block(x, temb)
        return x


@pytest.mark.parametrize("by_name", [True, False])
def test_blocks_that_are_called_in_another_way_are_noticed(by_name: bool) -> None:
    model = Restyled()
    model.by_name = by_name
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.by_name = not by_name
    step = StepPass(trace, "skip", first)
    gated.through(step, gated.inputs(*at(1), COND))
    assert step.lost == "a block of 'blocks' got other arguments than in the traced forward"


def test_a_block_that_returns_something_else_is_noticed() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.run = lambda x, temb: Plain.run(model, x, temb)[0]  # type: ignore[method-assign]
    model.blocks[2].register_forward_hook(lambda module, args, output: (output, output))
    step = StepPass(trace, "compute")
    gated.through(step, gated.inputs(*at(1), COND))
    assert step.lost == "a block of 'blocks' returned other shapes than in the traced forward"


KEPT = {
    "FluxTransformer2DModel": [False, True, False, True],
    "Flux2Transformer2DModel": [False, True, True],
    "QwenImageTransformer2DModel": [False, True],
    "SD3Transformer2DModel": [False, True],
    "HunyuanVideoTransformer3DModel": [False, True, False, True, False],
    "WanVACETransformer3DModel": [False, False, True],
    "Krea2Transformer2DModel": [True, True, True],
    "LTXVideoTransformer3DModel": [True],
}
"""By zoo case: which streams of which segments matter for the output or the signal, as read from the model's source."""

LEADERS = {
    "FluxTransformer2DModel": ("transformer_blocks", "hidden_states"),
    "SD3Transformer2DModel": ("transformer_blocks", "hidden_states"),
    "HunyuanVideoTransformer3DModel": ("transformer_blocks", "hidden_states"),
    "Krea2Transformer2DModel": ("transformer_blocks", "hidden_states"),
    "Kandinsky5Transformer3DModel": ("visual_transformer_blocks", "visual_embed"),
    "Flux3Transformer2DModel-reference": ("mode_blocks.image", "hidden_states"),
    "Lumina2Transformer2DModel": ("noise_refiner", "hidden_states"),
    "ZImageTransformer2DModel": ("noise_refiner", "x"),
}
"""By zoo case: the stack that leads and the parameter that carries what is denoised; several run text first."""


@pytest.mark.parametrize("name", KEPT)
def test_only_residuals_that_have_an_effect_are_wanted(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)))
    kept = [part is not None and slot not in trace.idle_slots for slot, part in enumerate(residuals)]
    assert kept == KEPT[name]


@pytest.mark.parametrize("name", LEADERS)
def test_the_first_stack_that_sees_the_sample_leads(name: str) -> None:
    gated = Gated(case(name).build())
    (trace, _, first_calls), rehearsed = gated.rehearsed(gated.of(case(name)))
    segment = trace.leader.segment
    assert segment is not None
    assert (trace.leader.gate.path, segment.stack.streams[trace.stream].parameter) == LEADERS[name]
    assert trace.leader.is_first
    one, other = rehearsed
    assert one is first_calls[segment]
    assert other is not None
    streams = [trace.leader.read(given.args, given.kwargs)[trace.stream] for given in (one, other)]
    assert not torch.equal(*streams), "the other one has another sample"


def test_the_declared_leader_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "Lumina2Transformer2DModel"
    monkeypatch.setitem(DECLARATIONS, name, BlockDeclaration(leader="layers"))
    gated = Gated(case(name).build())
    (trace, _, _), _ = gated.rehearsed(gated.of(case(name)))
    assert trace.leader.gate.path == "layers"


def test_nobody_sees_a_rehearsal() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    with counted(gated.model.modules()) as calls:
        gated.watched(gated.of(case(name)))
        bare = len(calls)
        calls.clear()
        gated.rehearsed(gated.of(case(name)))
    assert len(calls) == bare


class Tapped(Plain):
    """A value in the middle of the stack is used behind it."""

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x, temb)
        middle = self.blocks[1](x, temb)
        return self.blocks[2](middle, temb) + middle


@pytest.mark.parametrize("make", [Leaking, Tapped])
def test_a_model_whose_skipped_step_differs_is_found_out(make: type[Plain]) -> None:
    gated = Gated(make())
    with pytest.raises(ModelError, match=r"a skipped step differs from a computed one by \d"):
        gated.rehearsed(gated.inputs(*at(0), COND))


def test_an_output_that_is_no_number_is_not_taken_for_equal() -> None:
    gated = Gated(Plain())
    watched, output = gated.watched(gated.inputs(*at(0), COND))
    rehearsal = Rehearsal(gated.model, gated.gates.by_module, watched, (*at(0), COND), {})
    with pytest.raises(ModelError, match="differs from a computed one by nan"):
        rehearsal.rehearse(output * torch.nan, lambda with_time: ((*at(1), COND), {}))


class Deaf(Plain):
    """Its blocks see the conditioning alone; the sample is added behind them."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        temb = self.embed(timestep, encoder_hidden_states)
        return self.unembed(self.run(temb.expand(1, 5, -1), temb)) + hidden_states


def test_a_model_whose_sample_reaches_no_block_is_refused() -> None:
    gated = Gated(Deaf())
    with pytest.raises(ModelError, match="the sample reaches none of its blocks directly"):
        gated.rehearsed(gated.inputs(*at(0), COND))


class Refining(Plain):
    """Refines its text together with a token for the time, before the sample comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.refiner = torch.nn.ModuleList(Block(self.width) for _ in range(2))

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        text = torch.cat([self.embed_c(encoder_hidden_states), self.embed_t(timestep[:, None])])[None]
        for block in self.refiner:
            text = block(text, torch.zeros(1))
        return self.unembed(self.run(self.embed_x(hidden_states), text.mean(1, keepdim=True)))


def test_a_stack_that_sees_the_time_but_not_the_sample_does_not_lead() -> None:
    gated = Gated(Refining())
    (trace, _, _), _ = gated.rehearsed(gated.inputs(*at(0), COND))
    assert trace.leader.gate.path == "blocks"


class Picky(Plain):
    """Knows some times only."""

    times: tuple[float, ...] = (1.0,)

    def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
        if float(time[0]) not in self.times:
            raise ValueError("no such time")
        return super().embed(time, conditioning)


def test_a_model_that_does_not_take_another_time_is_tried_at_its_own_alone() -> None:
    gated = Gated(Picky())
    (trace, _, _), rehearsed = gated.rehearsed(gated.inputs(*at(0), COND))
    assert trace.leader.gate.path == "blocks"
    assert rehearsed[1] is None


class Strict(Plain):
    """Takes the very sample that it was made for, and no other."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not torch.equal(hidden_states, at(0)[0]):
            raise ValueError("another sample")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


def test_a_model_that_refuses_another_sample_is_not_skipped() -> None:
    gated = Gated(Strict())
    with pytest.raises(ModelError, match=r"could not test which blocks depend on the sample \(ValueError: another"):
        gated.rehearsed(gated.inputs(*at(0), COND))


class Once(Plain):
    """Cannot be run outside of its own run."""

    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> torch.Tensor:
        if not at_home():
            raise RuntimeError("not at home")
        return super().forward(hidden_states, timestep, encoder_hidden_states)


HOME = [True]


def at_home() -> bool:
    return HOME[0]


def test_a_model_that_cannot_be_tried_is_not_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = Gated(Once())
    watched, output = gated.watched(gated.inputs(*at(0), COND))
    rehearsal = Rehearsal(gated.model, gated.gates.by_module, watched, (*at(0), COND), {})
    monkeypatch.setitem(globals(), "HOME", [False])
    with pytest.raises(ModelError, match=r"a trial of the model failed \(RuntimeError: not at home\)"):
        rehearsal.rehearse(output, lambda with_time: ((*at(1), COND), {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_are_rehearsed_as_well(dtype: torch.dtype) -> None:
    gated = Gated(Plain().to(dtype))
    sample, time = at(0)
    (trace, _, _), _ = gated.rehearsed(gated.inputs(sample.to(dtype), time.to(dtype), COND.to(dtype)))
    assert trace.leader.gate.path == "blocks"


# ------------------------------------------------------------------------------------------------ replays


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "WanAnimateTransformer3DModel", "Krea2Transformer2DModel"])
def test_it_gives_what_the_model_gives_with_its_blocks_skipped_and_calls_nothing_of_it(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    (trace, residuals, _), _ = gated.rehearsed(gated.of(case(name)))
    replay, inputs = Replay(model, gated.gates.by_module, trace), gated.of(case(name), 1)
    exact = gated.through(StepPass(trace, "skip", residuals), inputs)
    with counted(model.modules()) as calls:
        output = replay.skip(StepPass(trace, "skip", residuals), inputs.args, inputs.kwargs)
    assert not calls
    assert zoo.equal(output, exact)


def test_what_reaches_the_first_block_of_each_segment_is_copied_if_that_is_asked_for() -> None:
    name = "FluxTransformer2DModel"
    gated = Gated(case(name).build())
    inputs = gated.of(case(name))
    (trace, residuals, first_calls), _ = gated.rehearsed(inputs)
    replay = Replay(gated.model, gated.gates.by_module, trace)
    replay.skip(StepPass(trace, "skip", residuals), inputs.args, inputs.kwargs)
    assert replay.first_calls == {}
    replay.skip(StepPass(trace, "skip", residuals), inputs.args, inputs.kwargs, keeps_calls=True)
    assert set(replay.first_calls) == set(trace.segments)
    first = trace.segments[0]
    assert replay.first_calls[first].module is gated.model.transformer_blocks[0]
    found, known = replay.first_calls[first].kwargs, first_calls[first].kwargs
    assert all(zoo.equal(found[key], known[key]) for key in ("hidden_states", "encoder_hidden_states", "temb"))


def test_a_replay_that_goes_another_way_says_so() -> None:
    gated = Gated(Wayward())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    gated.model.order = (0, 1)
    replay, step = Replay(gated.model, gated.gates.by_module, trace), StepPass(trace, "skip", residuals)
    replay.skip(step, (*at(0), COND), {})
    assert step.lost == "the forward ended before it called a block of 'blocks'"


def test_a_replay_that_the_model_refuses_fails_and_the_next_one_works() -> None:
    gated = Gated(Plain())
    (trace, residuals, _), _ = gated.watched(gated.inputs(*at(0), COND))
    replay = Replay(gated.model, gated.gates.by_module, trace)
    with pytest.raises(TrialFailed):
        replay.skip(StepPass(trace, "skip", residuals), (torch.ones(1, 5, 99), at(0)[1], COND), {})
    step = StepPass(trace, "skip", residuals)
    assert replay.skip(step, (*at(0), COND), {}).shape == (1, 5, 4)
    assert step.lost is None
