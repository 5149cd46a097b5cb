"""What the blocks do in a forward: compute, hand on, or put a stored residual in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driving import COND, Gated, Plain, at, case, counted
from samovar.cache.memo import Memo
from samovar.cache.passage import Given, Passage, Recompute
from samovar.cache.trace import Call, Desynchronised
from torch.utils import _pytree as pytree

import zoo
from samovar.arch import find_anatomy
from samovar.cache.forecast import Outlook
from samovar.cache.schedule import Mode

TEXT_FIRST = ["HunyuanVideoTransformer3DModel", "Krea2Transformer2DModel", "Flux3Transformer2DModel"]
"""Their text runs through blocks of its own before the sample does."""


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [block for stack in find_anatomy(model).stacks for block in stack.modules(model)]


def stored(parts: Any) -> Outlook:
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
    trace, first = gated.computed(gated.of(case(name)))
    passage = Passage(trace, "compute")
    assert zoo.equal(gated.through(passage, gated.of(case(name), 1)), exact)
    assert passage.synchronised
    assert first.parts is not None
    assert [part is None for part in passage.residuals] == [part is None for part in first.parts]
    assert not zoo.equal(passage.residuals, first.parts), "those of this step"
    skipped = gated.through(Passage(trace, "skip", stored(passage.residuals)), gated.of(case(name), 1))
    assert close(skipped, exact)


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "WanAnimateTransformer3DModel", *TEXT_FIRST])
def test_skipping_runs_no_block_and_nothing_between(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    trace, first = gated.computed(gated.of(case(name)))
    between = [module for path in trace.side for module in model.get_submodule(path)]
    with counted([*blocks_of(model), *between]) as calls:
        gated.through(Passage(trace, "skip", stored(first.parts)), gated.of(case(name), 1))
    assert not calls


def test_a_skipped_step_adds_the_stored_residual_to_its_own_input() -> None:
    model = Plain()
    gated = Gated(model)
    trace, first = gated.computed(gated.inputs(*at(0), COND))
    assert first.parts is not None
    (residual,) = first.parts
    assert residual is not None
    with torch.no_grad():
        expected = model.unembed(model.embed_x(at(1)[0]) + residual)
    output = gated.through(Passage(trace, "skip", stored(first.parts)), gated.inputs(*at(1), COND))
    assert torch.equal(output, expected)


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
    trace, first = gated.computed(gated.inputs(*at(0), COND))
    output = gated.through(Passage(trace, "skip", stored(first.parts)), gated.inputs(*at(0), COND))
    assert close(output, exact)


# ------------------------------------------------------------------------------------------------ asking the leader


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", *TEXT_FIRST])
def test_the_leader_is_asked_once_before_any_block_runs(name: str) -> None:
    model = case(name).build()
    gated = Gated(model)
    trace, first = gated.computed(gated.of(case(name)))
    asked: list[tuple[Call, torch.nn.Module]] = []

    def lead(call: Call, given: Given, guessed: bool) -> Mode:
        asked.append((call, given.block))
        return "skip"

    with counted(blocks_of(model)) as calls:
        gated.through(Passage(trace, "ask", stored(first.parts), lead), gated.of(case(name), 1))
    assert not calls
    assert trace.leader.segment is not None
    block = model.get_submodule(trace.leader.segment.stack.block_paths[0])
    assert asked == [(trace.leader, block)]


@pytest.mark.parametrize(("name", "guesses"), [("FluxTransformer2DModel", False), *((n, True) for n in TEXT_FIRST)])
def test_a_step_that_is_computed_after_all_owes_nothing_to_a_guess(name: str, guesses: bool) -> None:
    model = case(name).build()
    exact = case(name).run(model, 1)
    gated = Gated(model)
    trace, first = gated.computed(gated.of(case(name)))
    passage = Passage(trace, "ask", stored(first.parts), lambda call, given, guessed: "compute")
    if guesses:
        with pytest.raises(Recompute):
            gated.through(passage, gated.of(case(name), 1))
    else:
        assert zoo.equal(gated.through(passage, gated.of(case(name), 1)), exact)
    assert passage.guessed is guesses


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
def test_a_skipped_step_that_goes_another_way_is_given_up(order: tuple[int, ...]) -> None:
    model = Wayward()
    gated = Gated(model)
    trace, first = gated.computed(gated.inputs(*at(0), COND))
    model.order = order
    with pytest.raises(Desynchronised, match="'blocks'"):
        gated.through(Passage(trace, "skip", stored(first.parts)), gated.inputs(*at(1), COND))


@pytest.mark.parametrize("order", OTHER_ORDERS.values(), ids=OTHER_ORDERS)
def test_a_computed_step_that_goes_another_way_is_computed(order: tuple[int, ...]) -> None:
    model = Wayward()
    gated = Gated(model)
    trace, _ = gated.computed(gated.inputs(*at(0), COND))
    model.order = order
    with torch.no_grad():
        exact = model(*at(1), COND)
    passage = Passage(trace, "compute")
    assert torch.equal(gated.through(passage, gated.inputs(*at(1), COND)), exact)
    assert not passage.synchronised


# ------------------------------------------------------------------------------------------------ what stays the same


def test_what_depends_on_the_conditioning_alone_is_made_again_only_if_it_is_new() -> None:
    model = Plain()
    gated = Gated(model)
    trace, _ = gated.computed(gated.inputs(*at(0), COND))
    memo = Memo()
    with counted([model.embed_c]) as calls:
        for step in range(1, 4):
            gated.through(Passage(trace, "compute", None, None, memo), gated.inputs(*at(step), COND))
        before = len(calls)
        assert before >= 2, "two real steps must agree"
        passage = Passage(trace, "compute", None, None, memo)
        gated.through(passage, gated.inputs(*at(4), COND))
        skipped = Passage(trace, "skip", stored(passage.residuals), None, memo)
        gated.through(skipped, gated.inputs(*at(5), COND))
        assert len(calls) <= before + 1
        memo.clear()
        gated.through(Passage(trace, "skip", stored(passage.residuals), None, memo), gated.inputs(*at(6), COND))
        assert calls[before:], "a memo that is empty has nothing to give"


def test_what_moves_with_the_sample_or_the_time_is_always_made() -> None:
    model = Plain()
    gated = Gated(model)
    trace, first = gated.computed(gated.inputs(*at(0), COND))
    memo = Memo()
    with counted([model.embed_x, model.embed_t, model.unembed]) as calls:
        for step in range(1, 5):
            gated.through(Passage(trace, "skip", stored(first.parts), None, memo), gated.inputs(*at(step), COND))
            assert len(calls) == 3 * step


def test_what_was_changed_in_place_is_not_reused() -> None:
    class Adding(Plain):
        def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
            temb: torch.Tensor = self.embed_c(conditioning)
            temb += self.embed_t(time[:, None])  # Into the tensor that a memo would keep.
            return temb[:, None]

    model = Adding()
    gated = Gated(model)
    trace, _ = gated.computed(gated.inputs(*at(0), COND))
    memo = Memo()
    for step in range(1, 5):
        with torch.no_grad():
            exact = Adding()(*at(step), COND)
        output = gated.through(Passage(trace, "compute", None, None, memo), gated.inputs(*at(step), COND))
        assert torch.equal(output, exact), f"step {step}"
