"""What a plan does at a module: split, split in part, gather, and refuse shapes that do not fit."""

from __future__ import annotations

from typing import Any

import torch

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

TWO = SequenceParallelConfig(ulysses_degree=2)
SPLIT, GATHER = SequenceParallelInput(1), SequenceParallelOutput(1)
RETURNED = SequenceParallelInput(split_dim=1, split_output=True)
WHOLE = {"": {"hidden_states": SequenceParallelInput(1, 3)}, "proj_out": SequenceParallelOutput(1, 3)}


def after_text(text: str | int, **more: Any) -> dict[str, Any]:
    names = ("hidden_states", "ids")
    return {"": {name: SequenceParallelPartialInput(1, text, **more) for name in names}, "proj_out": GATHER}


PLANS: dict[str, dict[str, Any]] = {
    "output of the table": WHOLE | {"embed": {0: RETURNED}},
    "ids at the root": {"": {"hidden_states": SPLIT, "ids": SequenceParallelInput(1, 2)}, "proj_out": GATHER},
    "first block, tables at each": {
        "blocks.0": {"hidden_states": SPLIT},
        "blocks.*": {"table": SequenceParallelInput(-2)},
        "blocks.2": SequenceParallelOutput(gather_dim=-2),
    },
    "each block": {
        "blocks.*": {"hidden_states": SPLIT, "table": SPLIT},
        **{f"blocks.{index}": [GATHER] for index in range(3)},
    },
    "text stays whole": after_text(3),
    "text at the end": after_text(4, text_first=False),
    "text of a parameter": after_text("text"),
    "padded": {
        "": {name: SequenceParallelInput(1, auto_pad=True) for name in ("hidden_states", "ids")},
        "proj_out": GATHER,
    },
    "gathered and split again": {
        "": {"hidden_states": SPLIT, "ids": SPLIT},
        "blocks.0": [GATHER],
        "blocks.1": {"hidden_states": SPLIT},
        "proj_out": GATHER,
    },
}


@torch.no_grad()
def by_plan() -> dict[str, float]:
    errors = {}
    for name, plan in PLANS.items():
        model = toys.build()
        for length in (12, 15):
            hidden_states, ids = toys.tokens(length), torch.arange(length)[None]
            bare = model(hidden_states, ids=ids)
            texts = (hidden_states[:, :3], hidden_states[0, :5], 4) if name == "text of a parameter" else (None,)
            with apply_sequence_parallel(model, TWO, plan):
                for text in texts:
                    output = model(hidden_states, ids=ids, text=text)
                    errors[f"{name}, {length}, {len(errors)}"] = float((output - bare).abs().max())
            assert torch.equal(model(hidden_states, ids=ids), bare)
    return errors


def test_plans(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, by_plan):
        assert len(errors) == 2 * (len(PLANS) + 2)
        assert max(errors.values()) <= 1e-5, errors


MISFITS: dict[str, tuple[Any, str]] = {
    "input": (
        {"": {"hidden_states": SequenceParallelInput(1, expected_dims=4)}, "proj_out": GATHER},
        "hidden_states of 'the model' is a tensor of shape (1, 12, 16); the plan expects 4 dimensions, to split dimen",
    ),
    "dim": (
        {"": {"hidden_states": SequenceParallelInput(3)}, "proj_out": GATHER},
        "the plan expects more dimensions, to split dimension 3",
    ),
    "list": ({"": {"hidden_states": [SPLIT]}, "proj_out": GATHER}, "the plan expects a tuple or list of 1"),
    "output": (
        WHOLE | {"proj_out": SequenceParallelOutput(1, expected_dims=2)},
        "the output of 'proj_out' is a tensor of shape (1, 6, 4); the plan expects 2 dimensions, to gather dimension 1",
    ),
    "outputs": (
        WHOLE | {"proj_out": [GATHER, GATHER]},
        "the output of 'proj_out' is a tensor of shape (1, 6, 4); the plan expects 2 v",
    ),
    "index": (WHOLE | {"embed": {1: RETURNED}}, "the output of 'embed' is a tensor of shape (1, 12, 16); the plan exp"),
    "text": (
        {"": {"hidden_states": SequenceParallelPartialInput(1, "text")}, "proj_out": GATHER},
        "text of 'the model' is NoneType; the plan expects the number of text tokens, or the text itself",
    ),
    "length": (WHOLE, "3 tokens cannot be split over 2 ranks"),
    "tables": (WHOLE, "must match the size"),  # A table that was left whole.
}


@torch.no_grad()
def misfits() -> dict[str, str]:
    found = {}
    for name, (plan, _) in MISFITS.items():
        model, length = toys.build(), 3 if name == "length" else 12
        ids = torch.arange(length)[None] if name in ("tables", "index") else None
        apply_sequence_parallel(model, TWO, plan)
        try:
            model(toys.tokens(length), ids=ids)
        except (ValueError, RuntimeError) as error:
            found[name] = str(error)
    return found


def test_what_does_not_fit_raises(on_ranks: OnRanks) -> None:
    found = on_ranks(2, misfits)[0]
    assert {name: message for name, (_, message) in MISFITS.items() if message not in found.get(name, "")} == {}, found


def names() -> list[list[str]]:
    model = toys.build()
    apply_sequence_parallel(model, TWO, PLANS["first block, tables at each"])
    first, last = (HookRegistry.get_or_create(model.blocks[index]) for index in (0, 2))
    assert isinstance(first.get_hook("sp_input---blocks.*"), SequenceParallelSplitHook)
    assert isinstance(last.get_hook("sp_output---blocks.2"), SequenceParallelGatherHook)
    return [list(first.by_name), list(last.by_name)]


def test_hooks_have_the_names_that_users_know(on_ranks: OnRanks) -> None:
    first, last = on_ranks(2, names)[0]
    assert first == ["sequence_parallel_block", "sp_input---blocks.*", "sp_input---blocks.0"]
    assert last == ["sequence_parallel_block", "sp_input---blocks.*", "sp_output---blocks.2"]
