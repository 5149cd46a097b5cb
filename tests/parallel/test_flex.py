"""Flex attention with a mask is shared by its heads, and never split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    StrategyError,
    apply_sequence_parallel,
    disable_sequence_parallel_for_model,
    enable_sequence_parallel_for_model,
    make_mesh,
)
from samovar.parallel.attention import AttentionCall
from samovar.parallel.collectives import Group, Traffic
from samovar.parallel.failures import ShardingError
from samovar.parallel.flex import FlexCall, read_flex_call, share_heads
from zoo import flux

from . import models
from .conftest import OnRanks

ROWS, WIDTH = 128, 16


def by_head(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (query >= key) | (head == 3) & (key < 100)


def steeper(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - 0.1 * head * (query - key).abs()


def calls() -> dict[str, FlexCall]:
    torch.manual_seed(0)
    query, few_keys, few_values = torch.randn(2, 6, ROWS, WIDTH), *torch.randn(2, 2, 3, ROWS, WIDTH)
    key, value = torch.randn(2, 2, 6, ROWS, WIDTH)
    every = torch_flex.create_block_mask(by_head, 2, 6, ROWS, ROWS, device="cpu")
    alike = torch_flex.create_block_mask(lambda b, h, q, k: (q - k).abs() < 40, None, None, ROWS, ROWS, device="cpu")
    flex = torch_flex.flex_attention
    return {
        "a mask for each head": FlexCall(query, key, value, flex=flex, block_mask=every),
        "a mask for all heads": FlexCall(query, key, value, scale=0.3, flex=flex, block_mask=alike),
        "a function of scores": FlexCall(query, key, value, flex=flex, score_mod=steeper),
        "grouped heads": FlexCall(
            query, few_keys, few_values, enable_gqa=True, flex=flex, block_mask=every, score_mod=steeper
        ),
    }


@torch.no_grad()
def apart() -> dict[str, float]:
    group = make_mesh(SequenceParallelConfig(ulysses_degree=2)).sequence
    eager: Any = torch.compiler.set_stance("force_eager")
    with eager:
        return {name: float((share_heads(c, group) - c.run_here()).abs().max()) for name, c in calls().items()}


def test_each_rank_computes_some_heads(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, apart):
        assert len(found) == 4
        assert max(found.values()) <= 1e-6, found


def test_without_mask_it_is_any_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4)
    call = read_flex_call(torch_flex.flex_attention, False, query, key, value, scale=0.5)
    assert type(call) is AttentionCall
    eager: Any = torch.compiler.set_stance("force_eager")
    with eager:
        torch.testing.assert_close(call.run_here(), torch_flex.flex_attention(query, key, value, scale=0.5))


def test_what_cannot_be_shared_is_refused_by_name() -> None:
    call = calls()["grouped heads"]
    with pytest.raises(StrategyError, match="3 of keys are too few for 4 ranks"):
        share_heads(call, Group((0, 1, 2, 3), 0, None, Traffic()))
    given = call.query, call.key, call.value, None, call.block_mask
    with pytest.raises(ShardingError, match="inside compiled code"):
        read_flex_call(torch_flex.flex_attention, True, *given)
    with pytest.raises(ShardingError, match="log-sum-exp"):
        read_flex_call(torch_flex.flex_attention, False, *given, return_lse=True)


@torch.no_grad()
def by_backend() -> list[float]:
    """A model whose attention is flex attention because its user wants it so, by every strategy."""
    found = []
    config = flux.FLUX | {"attention_head_dim": 16, "axes_dims_rope": (4, 6, 6)}
    model, inputs = models.build("FluxTransformer2DModel", config), models.flux1(4, 3, 5, 7)[1]
    model.set_attention_backend("flex")
    bare = models.run(model, inputs)
    for settings in ({"ulysses_degree": 2}, {"ring_degree": 2}, {"allgather_degree": 2}):
        enable_sequence_parallel_for_model(model, SequenceParallelConfig(**settings))
        found.append(float((models.run(model, inputs) - bare).abs().max()))
        disable_sequence_parallel_for_model(model)
        assert torch.equal(models.run(model, inputs), bare)
    return found


@pytest.mark.slow
def test_a_backend_of_diffusers_that_is_flex_attention(on_ranks: OnRanks) -> None:
    for errors in on_ranks(2, by_backend):
        assert max(errors) <= 1e-5


class _Flex(torch.nn.Module):
    """A model whose only attention is a flex attention with a mask."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        heads = hidden_states.unflatten(-1, (2, -1)).transpose(1, 2)
        mask = calls()["a mask for all heads"].block_mask
        return torch_flex.flex_attention(heads, heads, heads, block_mask=mask)


def split() -> str:
    model = _Flex()
    plan = {"": {"hidden_states": SequenceParallelInput(1)}}
    apply_sequence_parallel(model, SequenceParallelConfig(ulysses_degree=2), plan)
    try:
        model(torch.randn(1, 2 * ROWS, 2 * WIDTH))
    except ShardingError as error:
        return str(error)
    return ""


def test_its_tokens_are_not_split(on_ranks: OnRanks) -> None:
    for message in on_ranks(2, split):
        assert "is a flex attention with a mask: its tokens cannot be split, only its heads" in message
