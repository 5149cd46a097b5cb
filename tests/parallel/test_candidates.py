"""Of the plans that may fit, the one that shares most comes first, and the last one always fits."""

from __future__ import annotations

from typing import Any

import torch

from samovar.arch import find_anatomy
from samovar.parallel import SequenceParallelConfig, disable_sequence_parallel_for_model
from samovar.parallel import enable_sequence_parallel_for_model as enable
from samovar.parallel.candidates import candidates
from samovar.trace.watch import Watcher

from . import toys
from .conftest import OnRanks


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
        sharding = enable(model, SequenceParallelConfig(**settings))
        apart = max(float((model(hidden_states) - bare).abs().max()) for _ in range(2))
        assert sharding is not None
        found[kind] = sharding.source, apart
        disable_sequence_parallel_for_model(model)
        assert torch.equal(model(hidden_states), bare)
    return found


def test_what_fits_is_taken(on_ranks: OnRanks) -> None:
    for settings in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"allgather_degree": 2}):
        for found in on_ranks(2, chosen, settings):
            assert {kind: source for kind, (source, _) in found.items()} == KINDS
            assert max(apart for _, apart in found.values()) <= 1e-5
