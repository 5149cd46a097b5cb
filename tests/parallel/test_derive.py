"""Derived plans: which come first, what they split, and how many classes of diffusers run by one."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch

import zoo
from samovar.arch import find_anatomy
from samovar.core.errors import ModelError
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    SequenceParallelPartialInput,
)
from samovar.parallel import enable_sequence_parallel_for_model as enable
from samovar.parallel.derive import candidates, in_block_plan, split_stack, stack_plan
from samovar.parallel.plan import place_plan
from samovar.trace.watch import Watcher

from . import toys
from .conftest import Count, OnRanks

LEAST_CLASSES, LEAST_WHOLE = 75, 65
"""Of diffusers' transformer classes that run sharded by a derived plan, and of those whose blocks are split as a whole
and not around the modules in them. May only grow."""
UNSHARED = {"T5FilmDecoder": "attention by a processor that multiplies its scores"}
"""Classes that cannot run on several ranks, each with the attention that is why."""
CASES = toys.CASES


def test_the_plan_of_a_stack() -> None:
    model, anatomy, watched = toys.watched_run("WanTransformer3DModel")
    stack = {stack.path: stack for stack in anatomy.stacks}["blocks"]
    split = split_stack(model, stack, watched, 2)
    once = stack_plan(stack, split, watched, each_block=False)
    assert list(once) == ["blocks.0", "blocks.*", "blocks.2"]
    each = stack_plan(stack, split, watched, each_block=True)
    assert list(each) == ["blocks.*", "blocks.0", "blocks.1", "blocks.2"]
    assert list(each["blocks.*"]) == ["hidden_states", "rotary_emb"]


# ------------------------------------------------------------------------------------------------ one module


def split(name: str, stack: str, size: int = 2) -> Any:
    model, anatomy, watched = toys.watched_run(name)
    return split_stack(model, {each.path: each for each in anatomy.stacks}[stack], watched, size)


def test_tokens_and_tables() -> None:
    wan = split("WanTransformer3DModel", "blocks")
    assert (wan.stream, wan.dim, wan.length) == ("hidden_states", 1, 60)
    assert wan.outputs == SequenceParallelOutput(1)
    assert wan.tables == {"rotary_emb": (SequenceParallelInput(1),) * 2}


def test_tables_of_text_and_image() -> None:
    for name in ("FluxTransformer2DModel", "FluxTransformer2DModel-equal-lengths"):
        flux = split(name, "transformer_blocks")
        both = SequenceParallelPartialInput(0, "encoder_hidden_states")
        assert (flux.stream, flux.outputs) == ("hidden_states", [None, SequenceParallelOutput(1)])
        assert flux.tables == {"image_rotary_emb": (both, both)}


def test_the_sequence_need_not_be_the_second_dimension() -> None:
    assert split("ErnieImageTransformer2DModel", "layers").dim == 0


def test_blocks_that_mix_tokens_otherwise_are_refused() -> None:
    with pytest.raises(ModelError, match=r"'transformer_blocks' cannot be split.*SanaTransformerBlock"):
        split("SanaTransformer2DModel", "transformer_blocks")
    with pytest.raises(ModelError, match="a dimension of at least 99"):
        split("WanTransformer3DModel", "blocks", size=99)


# ------------------------------------------------------------------------------------------------ the order


class Rolling(toys.Block):
    """Moves its tokens between its modules, so that it cannot be split."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.ff = torch.nn.Sequential(torch.nn.Linear(toys.WIDTH, 32), torch.nn.GELU(), torch.nn.Linear(32, toys.WIDTH))

    def forward(self, hidden_states: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states + self.ff(hidden_states.roll(1, dims=1)), table)


class MovingAttention(toys.Attention):
    """Moves its tokens itself."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x.roll(1, dims=1), mask)


class MovingBlock(toys.Block):
    """One that moves tokens and has nothing in it that does not."""

    def __init__(self, attention: Any) -> None:
        super().__init__(MovingAttention)


def build(kind: str) -> toys.Transformer:
    torch.manual_seed(0)
    model = toys.Transformer()
    block, attention = {
        "plain": (toys.Block, toys.Attention),
        "rolling": (Rolling, toys.Attention),
        "network alone": (Rolling, MovingAttention),
        "nothing": (MovingBlock, None),
    }[kind]
    model.blocks = torch.nn.ModuleList(block(attention) for _ in range(3))
    return model.eval()


KINDS = {
    "plain": "derived for blocks (split once)",
    "rolling": "derived inside blocks",
    "network alone": "derived inside blocks (attention shared)",
    "nothing": "attention only",
}


def test_the_order() -> None:
    model = build("rolling")
    anatomy, rejected = find_anatomy(model), {}
    watched = Watcher(model, anatomy, keeps_calls=True)
    with watched.watching():
        model(toys.tokens(12))
    found = list(candidates(model, anatomy, watched, 2, rejected))
    assert [candidate.source for candidate in found] == list(KINDS.values())[1:]
    assert "cannot be split" in rejected["blocks"]
    assert [candidate.shares_attention for candidate in found] == [True, True, True]
    assert list(found[1].plan) == ["blocks.*.ff", "blocks.0.ff", "blocks.1.ff", "blocks.2.ff"]
    assert found[2].plan == {}


@torch.no_grad()
def chosen(settings: dict[str, int]) -> dict[str, tuple[str, float]]:
    """Which plan is taken for each, and how far its output is from one rank."""
    found = {}
    for kind in KINDS:
        model, hidden_states = build(kind), toys.tokens(13)
        bare = model(hidden_states)
        with enable(model, SequenceParallelConfig(**settings)) as sharding:
            error = max(float((model(hidden_states) - bare).abs().max()) for _ in range(2))
            found[kind] = sharding.source, error
        assert torch.equal(model(hidden_states), bare)
    return found


def test_what_fits_is_taken(on_ranks: OnRanks) -> None:
    for settings in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"allgather_degree": 2}):
        for found in on_ranks(2, chosen, settings):
            assert {kind: source for kind, (source, _) in found.items()} == KINDS
            assert max(apart for _, apart in found.values()) <= 1e-5


# ------------------------------------------------------------------------------------------------ inside of blocks


def plan(name: str, *, attends: bool) -> Any:
    model, anatomy, watched = toys.watched_run(name)
    made = in_block_plan(model, anatomy.stacks[0], watched, 2, attends=attends)
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
    with pytest.raises(ModelError, match=r"'visual_transformer_blocks' has tokens that meet only in attention"):
        plan("Kandinsky6SRTransformer3DModel", attends=True)


def test_an_error_leaves_no_hook_behind() -> None:
    model, anatomy, watched = toys.watched_run.__wrapped__("HeliosTransformer3DModel")
    watched.calls["blocks.0"].arguments["hidden_states"] = torch.zeros(1, 3, 5)
    with pytest.raises(RuntimeError):
        in_block_plan(model, anatomy.stacks[0], watched, 2, attends=True)
    assert not any(module._forward_hooks for module in model.modules())


# ------------------------------------------------------------------------------------------------ all models


def test_watching_leaves_nothing_behind() -> None:
    model = CASES["WanTransformer3DModel"].build()
    with Watcher(model, find_anatomy(model)).watching(), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def apart(one: Any, other: Any) -> float:
    if isinstance(one, torch.Tensor):
        return float((one - other).abs().max()) if one.shape == other.shape else float("inf")
    return max(map(apart, one, other), default=0.0) if isinstance(one, (list, tuple)) else 0.0


def survey(names: list[str]) -> dict[str, Any]:
    """Each case by a derived plan and no model code: its greatest error, or why it was refused."""
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name in names:
        model = CASES[name].build()
        vars(model)["_cp_plan"] = None
        bare = CASES[name].run(model), CASES[name].run(model, step=1)
        try:
            with enable(model, SequenceParallelConfig(ulysses_degree=2), strategy="auto") as sharding:
                error = max(apart(CASES[name].run(model, step), bare[step]) for step in range(2))
                found[name] = error, sharding.source
            assert zoo.equal(CASES[name].run(model), bare[0]), name
        except ValueError as error:
            found[name] = None, str(error)
    return found


def test_how_many_classes_run_by_a_derived_plan(on_ranks: OnRanks, record_property: Count) -> None:
    """One case of each class; all cases in the slow tests."""
    plain = {case.model: name for name, case in reversed(CASES.items())}
    record_property("count", check(on_ranks, list(plain.values())))


@pytest.mark.slow
def test_how_many_cases_run_by_a_derived_plan(on_ranks: OnRanks, record_property: Count) -> None:
    record_property("count", check(on_ranks, list(CASES)))


def check(on_ranks: OnRanks, names: list[str]) -> str:
    """Asserts that enough classes run, and that what runs is right; how many do, in a line."""
    names = [name for name in names if CASES[name].model in zoo.exported_classes()]
    found = on_ranks(2, survey, names)[0]
    sources = {CASES[name].model: source for name, (error, source) in reversed(found.items()) if error is not None}
    derived = {model for model, source in sources.items() if source.startswith("derived ")}
    inside = {model for model in derived if sources[model].startswith("derived inside")}
    wrong = {name: error for name, (error, _) in found.items() if error is not None and not error <= 1e-5}
    assert wrong == {}, "a model that runs gives the right output; any other is refused"
    classes = {CASES[name].model for name in names}
    refused = {CASES[name].model: reason for name, (error, reason) in found.items() if error is None}
    assert {model for model, reason in refused.items() if UNSHARED.get(model, "?") not in reason} == set()
    missing = len({case.model for case in CASES.values()} - zoo.exported_classes())  # in an older diffusers
    assert len(derived) >= LEAST_CLASSES - missing
    assert len(derived - inside) >= LEAST_WHOLE - missing
    return (
        f"parallel: {len(derived)} of {len(classes)} transformer classes run by a derived plan, {len(inside)} of them "
        f"split inside their blocks: {', '.join(sorted(inside))}; attention only: "
        f"{', '.join(sorted(set(sources) - derived)) or 'none'}; not at all: "
        f"{', '.join(sorted(classes - set(sources))) or 'none'}"
    )
