"""Derived plans: which come first, what they split, and how many classes of diffusers run by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import zoo
from samovar.parallel import (
    SequenceParallelConfig,
)
from samovar.parallel import enable_sequence_parallel_for_model as enable

from . import models, toys
from .conftest import Count, OnRanks

LEAST_CLASSES, LEAST_WHOLE = 75, 65
"""Of diffusers' transformer classes that run sharded by a derived plan, and of those whose blocks are split as a whole
and not around the modules in them. May only grow."""
UNSHARED = {"T5FilmDecoder": "attention by a processor that multiplies its scores"}
"""Classes that cannot run on several ranks, each with the attention that is why."""
CASES = toys.CASES


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


@torch.no_grad()
def other_lengths() -> dict[str, tuple[str, float]]:
    """Models whose plan was found with one prompt and size, with others: tables of text and image in one, and none."""
    found = {}
    for name in ("Flux", "Qwen-Image", "Wan", "HunyuanVideo"):
        model, inputs = models.MODELS[name](4, 4, 4, 6)
        vars(model)["_cp_plan"] = None
        others = [inputs, *(models.MODELS[name](4, *shape)[1] for shape in ((4, 4, 9), (3, 5, 6), (4, 6, 4)))]
        bare = [models.run(model, each) for each in others]
        with enable(model, SequenceParallelConfig(ulysses_degree=2)) as sharding:
            errors = [
                float((models.run(model, each) - one).abs().max()) for each, one in zip(others, bare, strict=True)
            ]
            found[name] = sharding.source, max(errors)
    return found


def test_a_plan_that_is_found_once_serves_other_prompts_and_sizes(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, other_lengths):
        assert all(source.endswith("(split once)") for source, _ in found.values()), found
        assert all(error <= 1e-5 for _, error in found.values()), found


# ------------------------------------------------------------------------------------------------ all models


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
