"""Blocks that cannot be split as a whole are split around the modules in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zoo
from samovar.arch import find_anatomy
from samovar.errors import ModelError
from samovar.parallel import SequenceParallelInput, SequenceParallelOutput
from samovar.parallel.inside import plan_inside
from samovar.parallel.plan import place_plan
from samovar.trace.watch import Watcher

CASES = {case.id: case for case in zoo.load()}


def plan(name: str, *, attends: bool) -> Any:
    case = CASES[name]
    model = case.build()
    anatomy = find_anatomy(model)
    watched = Watcher(model, anatomy, keeps_calls=True)
    with watched.watching():
        case.run(model)
    made = plan_inside(model, anatomy.stacks[0], watched, 2, attends=attends)
    assert place_plan(model, made)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return made


def test_attention_and_what_comes_after_it() -> None:
    """Found by trial, and the same as the plan that diffusers has for this model."""
    found = plan("HeliosTransformer3DModel", attends=True)
    split, gather = SequenceParallelInput(1), SequenceParallelOutput(1)
    assert found["blocks.*.attn1"] == {"hidden_states": split, "rotary_emb": split}
    assert found["blocks.*.attn2"] == {"hidden_states": split}
    assert list(found["blocks.*.ffn"].values()) == [split]
    assert all(found[f"blocks.{index}.{part}"] == gather for index in range(3) for part in ("attn1", "attn2", "ffn"))


def test_attention_stays_whole_where_it_is_not_asked_for() -> None:
    found = plan("HeliosTransformer3DModel", attends=False)
    assert "blocks.*.ffn" in found
    assert not any("attn" in path for path in found)


def test_experts_that_choose_among_all_tokens_stay_whole() -> None:
    """The first block has a plain network in the place where the others have experts."""
    found = plan("NucleusMoEImageTransformer2DModel", attends=True)
    assert any(path.endswith(".attn") for path in found)
    assert not any("mlp" in path or "moe" in path for path in found)


def test_tables_of_a_network() -> None:
    found = plan("RFD4ProteinaTransformer", attends=False)
    assert any(len(inputs) > 1 for inputs in found.values() if isinstance(inputs, dict)), "the mask of its tokens"


def test_blocks_with_nothing_to_split_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'visual_transformer_blocks' has tokens that meet in attention only"):
        plan("Kandinsky6SRTransformer3DModel", attends=True)


def test_an_error_leaves_no_hook_behind() -> None:
    case = CASES["HeliosTransformer3DModel"]
    model = case.build()
    anatomy = find_anatomy(model)
    watched = Watcher(model, anatomy, keeps_calls=True)
    with watched.watching():
        case.run(model)
    watched.calls["blocks.0"].arguments["hidden_states"] = torch.zeros(1, 3, 5)
    with pytest.raises(RuntimeError):
        plan_inside(model, anatomy.stacks[0], watched, 2, attends=True)
    assert not any(module._forward_hooks for module in model.modules())
