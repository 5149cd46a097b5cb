"""TeaCache on every transformer class of the installed diffusers, with no code for any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from driving import Stepped, stepped
from torch.utils import _pytree as pytree

import zoo
from samovar.arch import find_anatomy
from samovar.cache import AutoConfig, TeaCacheConfig, TeaCacheHook, apply_teacache_hook
from samovar.hooks import call_context

CASES = zoo.load()
INFINITE = TeaCacheConfig(rel_l1_thresh=float("inf"), max_skips=None, min_steps=0)

BLIND = {"PriorTransformer"}
"""Its output is read off a token that is learned: what enters the blocks there does not depend on the sample."""


def installed(case: zoo.Case) -> zoo.Case:
    if case.model not in zoo.exported_classes():
        pytest.skip(f"the installed diffusers has no {case.model}")
    return case


def run(case: zoo.Case, loop: Stepped, step: int = 0) -> Any:
    """A step of a loop, with the inputs of any step."""
    with call_context(branch="only"):
        return loop.call(lambda: case.run(loop.transformer, step))


def difference(one: Any, other: Any) -> float:
    """The largest difference of two outputs, in proportion to the largest value."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    tensors = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor)]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in tensors)


@contextmanager
def counted_blocks(case: zoo.Case, model: torch.nn.Module) -> Iterator[list[str]]:
    """The stacks whose blocks are run, call by call."""
    calls: list[str] = []
    stacks = {stack.path for stack in case.stacks}
    handles = [
        block.register_forward_pre_hook(lambda *_, path=stack.path: calls.append(path))
        for stack in find_anatomy(model).stacks
        for block in stack.modules(model)
        if stack.path in stacks
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_class(case: zoo.Case) -> None:
    model = installed(case).build()
    exact = [case.run(model, step) for step in range(3)]
    before = [(type(module), set(vars(module))) for module in model.modules()]

    hook = apply_teacache_hook(model, {"rel_l1_thresh": 0})
    with stepped(model) as loop:
        assert [zoo.equal(run(case, loop, step), exact[step]) for step in range(3)] == [True] * 3, "neutral"
    hook.detach()

    hook = apply_teacache_hook(model, INFINITE)
    with stepped(model) as loop:  # It takes two steps to see which arguments change, where their names do not say.
        for step in range(3):
            run(case, loop, step)
    hook.reset_state(model)
    with counted_blocks(case, model) as calls, stepped(model) as loop:
        _check_skips(case, loop, hook, exact, calls)
    hook.detach()
    assert [(type(module), set(vars(module))) for module in model.modules()] == before, "no trace is left"
    assert zoo.equal(case.run(model), exact[0])


def _check_skips(case: zoo.Case, loop: Stepped, hook: TeaCacheHook, exact: Any, calls: list[str]) -> None:
    assert zoo.equal(run(case, loop), exact[0]), "a computed step is not disturbed"
    assert set(calls) == {stack.path for stack in case.stacks}
    calls.clear()
    skipped = run(case, loop)
    assert hook.stats().branches["only"].mask == "#.", hook.stats()
    assert not calls, "a skipped step runs no block"
    assert difference(skipped, exact[0]) <= 1e-5
    moved = run(case, loop, 1)
    if case.model not in BLIND:
        assert not zoo.equal(moved, skipped), "a skipped step sees its own input"
    (state,) = hook.state_manager.states().values()
    for residual in state.residuals:
        if residual is not None:
            residual.zero_()
    assert difference(run(case, loop, 1), moved) > 1e-3, "what the blocks did is in what is stored"
    assert not calls
    hook.reset_state(loop.transformer)
    assert zoo.equal(run(case, loop, 2), exact[2]), "computing after skipping is exact"


@pytest.mark.parametrize("case", {case.model: case for case in CASES}.values(), ids=lambda case: case.id)
def test_auto_on_every_class(case: zoo.Case) -> None:
    """Computed steps have the model's bits; a skipped one runs nothing, and is a sum of what was computed."""
    model = installed(case).build()
    exact = [case.run(model, step) for step in range(4)]
    hook = apply_teacache_hook(model, AutoConfig(1e6))
    with stepped(model) as loop:  # It takes two steps to see which arguments change, where their names do not say.
        for step in range(3):
            run(case, loop, step)
    hook.reset_state(model)
    calls: list[Any] = []
    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [leaf.register_forward_pre_hook(lambda module, _: calls.append(module)) for leaf in leaves]
    with stepped(model) as loop:
        for step in range(3):
            assert zoo.equal(run(case, loop, step), exact[step]), "computed"
        calls.clear()
        skipped = run(case, loop, 3)
        assert hook.stats().branches["only"].mask == "###.", hook.stats().branches["only"].steps
        assert not calls, "nothing runs"
        assert all(torch.isfinite(t).all() for t in pytree.tree_leaves(skipped) if isinstance(t, torch.Tensor))
        assert pytree.tree_structure(skipped) == pytree.tree_structure(exact[3])
        tensors = zip(pytree.tree_leaves(skipped), pytree.tree_leaves(exact[3]), strict=True)
        assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in tensors if isinstance(b, torch.Tensor))
    for handle in handles:
        handle.remove()
    hook.detach()
    assert zoo.equal(case.run(model), exact[0])


def test_the_number_of_classes(record_property: Callable[[str, object], None]) -> None:
    """Shown in the README; `test_every_class` is what each of them passed."""
    exported, served = zoo.exported_classes(), {case.model for case in CASES}
    record_property("count", f"tea_cache: {len(exported & served)} of {len(exported)} transformer classes are served")
    assert exported <= served | set(zoo.UNSERVED)
