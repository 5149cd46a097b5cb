"""Derived plans: which come first, what they split, and how many classes of diffusers run by one."""

from __future__ import annotations

from typing import Any

import torch

from samovar.parallel import (
    SequenceParallelConfig,
)
from samovar.parallel import enable_sequence_parallel_for_model as enable

from . import models, toys
from .conftest import OnRanks

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
    "rolling": "derived for blocks (split inside blocks)",
    "network alone": "derived for blocks (split inside blocks, attention shared)",
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
