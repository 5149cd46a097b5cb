"""Every transformer class that the installed diffusers exports: it builds, runs, and its stacks are found."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from arch import time_shares
from samovar.arch import Anatomy, BlockStack, find_anatomy
from samovar.trace import probe_anatomy
from zoo import table

CASES = zoo.load()
Count = Callable[[str, object], None]


def installed(case: zoo.Case) -> zoo.Case:
    if case.model not in zoo.exported_classes():
        pytest.skip(f"the installed diffusers has no {case.model}")
    return case


def test_every_exported_class_has_a_case(record_property: Count) -> None:
    exported, served = zoo.exported_classes(), {case.model for case in CASES}
    assert exported - served - set(zoo.UNSERVED) == set(), "write a case for each in tests/zoo"
    assert not set(zoo.UNSERVED) & served
    record_property("count", f"anatomy: {len(exported & served)} of {len(exported)} transformer classes are served")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_anatomy(case: zoo.Case) -> None:
    with zoo.borrowed(installed(case)) as model:
        check_anatomy(model, case)


def check_anatomy(model: torch.nn.Module, case: zoo.Case) -> None:
    before = [(type(module), set(vars(module))) for module in model.modules()]
    anatomy = probe_anatomy(model, case.inputs(0), case.inputs(1))

    assert [_summary(stack) for stack in anatomy.stacks] == [
        (stack.path, stack.count, (stack.block,), stack.carried, stack.kinds) for stack in case.stacks
    ]
    assert anatomy.side == case.side
    assert anatomy.leader in [stack.path for stack in case.stacks if {"image", "joint"} & set(stack.kinds)]
    assert {stack.path for stack in anatomy.stacks} <= {stack.path for stack in find_anatomy(model).stacks}
    assert [(type(module), set(vars(module))) for module in model.modules()] == before, "nothing is left behind"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    _check_outputs(model, anatomy, case)


def _summary(stack: BlockStack) -> tuple[Any, ...]:
    parameters = tuple(stream.parameter for stream in stack.streams)
    return stack.path, len(stack), stack.block_classes, parameters, tuple(stream.kind for stream in stack.streams)


def _check_outputs(model: torch.nn.Module, anatomy: Anatomy, case: zoo.Case) -> None:
    """Reading every block's output and putting it together again changes nothing."""
    ran: set[str] = set()

    def take_apart(stack: BlockStack, module: torch.nn.Module, args: Any, output: Any) -> Any:
        ran.add(stack.path)
        rebuilt = stack.rebuild(output, stack.read(output))
        assert type(rebuilt) is type(output)
        return rebuilt

    handles = [
        block.register_forward_hook(functools.partial(take_apart, stack))
        for stack in anatomy.stacks
        for block in stack.modules(model)
    ]
    rebuilt = case.run(model)
    for handle in handles:
        handle.remove()
    assert ran == {stack.path for stack in anatomy.stacks}
    assert zoo.equal(rebuilt, case.run(model)), "deterministic, and the same when outputs are taken apart"
    assert not zoo.equal(rebuilt, case.run(model, step=1)), "the next step differs"


def test_the_documented_table_is_the_tested_one() -> None:
    file = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
    assert file.read_text(encoding="utf-8") == table.page(CASES), "run `make models-table`"


def test_the_documented_shares_are_of_every_class() -> None:
    assert json.loads(time_shares.FILE.read_text(encoding="utf-8")).keys() == {case.model for case in CASES}


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "GlmImageTransformer2DModel", "HunyuanDiT2DModel"])
def test_the_documented_share_of_time_only_layers_is_what_is_found(name: str) -> None:
    """By a call, by paths, and not at all."""
    documented = json.loads(time_shares.FILE.read_text(encoding="utf-8"))[name]
    assert time_shares.share_of(installed(next(case for case in CASES if case.model == name))) == documented
