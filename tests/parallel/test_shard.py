"""What a plan does at a module: split, split in part, pad, gather, and refuse shapes that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.core.errors import SettingError
from samovar.hooks import HookRegistry
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelGatherHook,
    SequenceParallelInput,
    SequenceParallelOutput,
    SequenceParallelPartialInput,
    SequenceParallelSplitHook,
    apply_sequence_parallel,
)

from . import toys
from .conftest import OnRanks

CLASSIC = {
    "": {"hidden_states": SequenceParallelInput(split_dim=1, expected_dims=3)},
    "proj_out": SequenceParallelOutput(gather_dim=1, expected_dims=3),
}
RETURNED = SequenceParallelInput(split_dim=1, split_output=True)
PLANS: dict[str, dict[str, Any]] = {
    "classic": CLASSIC | {"embed": {0: RETURNED}},
    "ids at the root": CLASSIC | {"": CLASSIC[""] | {"ids": SequenceParallelInput(1, 2)}},  # type: ignore[operator]
    "first block, tables at each": {
        "blocks.0": {"hidden_states": SequenceParallelInput(1)},
        "blocks.*": {"table": SequenceParallelInput(-2)},
        "blocks.2": SequenceParallelOutput(gather_dim=-2),
    },
    "each block": {
        "blocks.*": {"hidden_states": SequenceParallelInput(1), "table": SequenceParallelInput(1)},
        **{f"blocks.{index}": [SequenceParallelOutput(1)] for index in range(3)},
    },
    "text stays whole": {
        "": {"hidden_states": SequenceParallelPartialInput(1, 3), "ids": SequenceParallelPartialInput(1, 3, 2)},
        "proj_out": SequenceParallelOutput(1),
    },
    "text at the end": {
        "": {
            "hidden_states": SequenceParallelPartialInput(1, 4, text_first=False),
            "ids": SequenceParallelPartialInput(1, 4, text_first=False),
        },
        "proj_out": SequenceParallelOutput(1),
    },
    "padded": {
        "": {"hidden_states": SequenceParallelInput(1, auto_pad=True), "ids": SequenceParallelInput(1, auto_pad=True)},
        "proj_out": SequenceParallelOutput(1),
    },
    "gathered and split again": {
        "": {"hidden_states": SequenceParallelInput(1), "ids": SequenceParallelInput(1)},
        "blocks.0": [SequenceParallelOutput(1)],
        "blocks.1": {"hidden_states": SequenceParallelInput(1)},
        "proj_out": SequenceParallelOutput(1),
    },
}


@torch.no_grad()
def by_plan() -> dict[str, float]:
    errors = {}
    for name, plan in PLANS.items():
        for length in (12, 15):
            model, hidden_states = toys.build(), toys.tokens(length)
            ids = torch.arange(length)[None]
            bare = model(hidden_states, ids=ids)
            with apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=2), plan):
                errors[f"{name}, {length}"] = float((model(hidden_states, ids=ids) - bare).abs().max())
            assert torch.equal(model(hidden_states, ids=ids), bare)
    return errors


def test_plans(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, by_plan):
        assert len(errors) == 2 * len(PLANS)
        assert max(errors.values()) <= 1e-5, errors


@torch.no_grad()
def by_text() -> list[float]:
    """Text stays whole; its length is that of the text itself, or a number."""
    split = SequenceParallelPartialInput(1, "text", expected_dims=3)
    ids = SequenceParallelPartialInput(1, text_len_source="text", expected_dims=2)
    plan = {"": {"hidden_states": split, "ids": ids}, "proj_out": SequenceParallelOutput(1)}
    model, hidden_states = toys.build(), toys.tokens(14)
    numbers = torch.arange(14)[None]
    bare = model(hidden_states, ids=numbers)
    apply_sequence_parallel(model, SequenceParallelConfig(ring_degree=2), plan)
    texts = (hidden_states[:, :3], hidden_states[0, :5], 4)
    return [float((model(hidden_states, ids=numbers, text=text) - bare).abs().max()) for text in texts]


def test_the_length_of_the_text_is_read_from_a_parameter(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, by_text):
        assert len(errors) == 3
        assert max(errors) <= 1e-5


@torch.no_grad()
def misfits() -> dict[str, str]:
    found = {}
    wrong: dict[str, dict[str, Any]] = {
        "input": {"": {"hidden_states": SequenceParallelInput(1, expected_dims=4)}, "proj_out": CLASSIC["proj_out"]},
        "dim": {"": {"hidden_states": SequenceParallelInput(3)}, "proj_out": CLASSIC["proj_out"]},
        "list": {"": {"hidden_states": [SequenceParallelInput(1)]}, "proj_out": CLASSIC["proj_out"]},
        "output": {"": CLASSIC[""], "proj_out": SequenceParallelOutput(1, expected_dims=2)},
        "outputs": {"": CLASSIC[""], "proj_out": [SequenceParallelOutput(1), SequenceParallelOutput(1)]},
        "index": {"": CLASSIC[""], "embed": {1: RETURNED}, "proj_out": CLASSIC["proj_out"]},
        "text": {"": {"hidden_states": SequenceParallelPartialInput(1, "ids")}, "proj_out": CLASSIC["proj_out"]},
        "length": CLASSIC,
        "tables": CLASSIC,
    }
    for name, plan in wrong.items():
        model = toys.build()
        apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=2), plan)
        ids = None if name in ("text", "output", "outputs", "length") else torch.arange(12)[None]
        try:
            model(toys.tokens(3 if name == "length" else 12), ids=ids)
        except (SettingError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_does_not_fit_raises(on_ranks: OnRanks) -> None:
    found = on_ranks(2, misfits)[0]
    assert "is a tensor of shape (1, 12, 16); the plan expects 4 dimensions" in found["input"]
    assert "the plan expects more dimensions, to split dimension 3" in found["dim"]
    assert "the plan expects a tuple or list of 1" in found["list"]
    assert "Output 0 of 'proj_out' is a tensor" in found["output"]
    assert "the plan expects 2 dimensions, to gather dimension 1" in found["output"]
    assert "'proj_out' returned a tensor of shape (1, 6, 4); the plan gathers 2 outputs" in found["outputs"]
    assert "splits output 1 of 'embed', which returns 1 values" in found["index"]
    assert "'ids' of 'the model' is None; expected the number of text tokens, or the text itself" in found["text"]
    assert "3 tokens cannot be split over 2 ranks" in found["length"]
    assert "must match the size" in found["tables"], "a table that was left whole"


def names() -> list[list[str]]:
    model = toys.build()
    apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=2), PLANS["first block, tables at each"])
    first, last = (HookRegistry.get_or_create(model.blocks[index]) for index in (0, 2))
    assert isinstance(first.get_hook("sp_input---blocks.*"), SequenceParallelSplitHook)
    assert isinstance(last.get_hook("sp_output---blocks.2"), SequenceParallelGatherHook)
    return [list(first._hooks), list(last._hooks)]


def test_hooks_have_the_names_that_users_know(on_ranks: OnRanks) -> None:
    first, last = on_ranks(2, names)[0]
    assert first == ["sp_input---blocks.0", "sp_input---blocks.*", "sequence_parallel_block"]
    assert last == ["sp_input---blocks.*", "sp_output---blocks.2", "sequence_parallel_block"]


@pytest.mark.parametrize("plan", list(PLANS))
def test_one_rank_is_left_as_it_is(plan: str) -> None:
    model = toys.build()
    before = [set(vars(module)) for module in model.modules()]
    apply_sequence_parallel(model, SequenceParallelConfig(), PLANS[plan]).detach()
    assert [set(vars(module)) for module in model.modules()] == before
