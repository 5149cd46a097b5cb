"""What the blocks do in a forward: compute, hand on, or put a stored residual in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Block, Gated, Plain, at, case, counted
from torch.utils import _pytree as pytree

import zoo
from samovar.arch import find_anatomy
from samovar.trace.forward import Given, Tensors
from samovar.trace.passes import Mode, Outlook, StepPass

TEXT_FIRST = ["HunyuanVideoTransformer3DModel", "Krea2Transformer2DModel", "Flux3Transformer2DModel"]
"""Their text runs through blocks of its own before the sample does."""


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for stack in find_anatomy(model).stacks for block in stack.modules(model)]


def stored(parts: Tensors | None) -> Outlook:
    assert parts is not None
    return Outlook([1.0], [parts])


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
    skipped = gated.through(StepPass(trace, "skip", stored(step.residuals)), gated.of(case(name), 1))
    assert close(skipped, exact)


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "WanAnimateTransformer3DModel", *TEXT_FIRST])
def test_skipping_runs_no_block_and_nothing_between(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    (trace, first, _), _ = gated.rehearsed(gated.of(case(name)))
    between = [module for path in trace.side for module in model.get_submodule(path)]
    with counted([*blocks_of(model), *between]) as calls:
        gated.through(StepPass(trace, "skip", stored(first)), gated.of(case(name), 1))
    assert not calls


def test_a_skipped_step_adds_the_stored_residual_to_its_own_input() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    (residual,) = first
    assert residual is not None
    with torch.no_grad():
        expected = model.unembed(model.embed_x(at(1)[0]) + residual)
    output = gated.through(StepPass(trace, "skip", stored(first)), gated.inputs(*at(1), COND))
    assert torch.equal(output, expected)


def test_a_residual_may_be_replaced_by_a_number_to_see_what_it_does() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, first, _), _ = gated.watched(gated.inputs(*at(0), COND))
    output = gated.through(StepPass(trace, "skip", stored(first), poison=(0, 7.0)), gated.inputs(*at(1), COND))
    with torch.no_grad():
        assert torch.equal(output, model.unembed(torch.full((1, 5, 8), 7.0)))


def test_only_residuals_that_are_wanted_are_kept() -> None:
    gated = Gated(case("HunyuanVideoTransformer3DModel").build())
    inputs = gated.of(case("HunyuanVideoTransformer3DModel"))
    (trace, _, _), _ = gated.rehearsed(inputs)
    early = trace.early_segments
    assert early
    step = StepPass(trace, "compute", keeps=early)
    gated.through(step, inputs)
    slots = {slot for segment in early for slot in range(segment.slot, segment.slot + len(segment.stack.streams))}
    assert step.residuals is not None
    kept = {slot for slot, part in enumerate(step.residuals) if part is not None}
    assert kept == slots - trace.idle_slots
    nothing = StepPass(trace, "compute", keeps=())
    gated.through(nothing, inputs)
    assert nothing.residuals is None


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
    output = gated.through(StepPass(trace, "skip", stored(first)), gated.inputs(*at(0), COND))
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
    assert close(gated.through(StepPass(trace, "skip", stored(step.residuals)), gated.inputs(*at(1), COND)), exact)


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
        output = gated.through(StepPass(trace, "ask", stored(first), choose), gated.of(case(name), 1))
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
    step = StepPass(trace, "skip", stored(first))
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
    step = StepPass(trace, "skip", stored(first))
    gated.through(step, gated.inputs(*at(1), COND))
    assert step.lost == "a block of 'blocks' is called in another way than before"


def test_a_block_that_returns_something_else_is_noticed() -> None:
    model = Plain()
    gated = Gated(model)
    (trace, _, _), _ = gated.watched(gated.inputs(*at(0), COND))
    model.run = lambda x, temb: Plain.run(model, x, temb)[0]  # type: ignore[method-assign]
    model.blocks[2].register_forward_hook(lambda module, args, output: (output, output))
    step = StepPass(trace, "compute")
    gated.through(step, gated.inputs(*at(1), COND))
    assert step.lost == "a block of 'blocks' returned another form than before"
