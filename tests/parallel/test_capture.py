"""Attention is captured on this thread and inside a sharded forward only; what ranks cannot share is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch.nn.attention import flex_attention as torch_flex

from samovar.core.errors import ShardingError
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    apply_sequence_parallel,
    enable_sequence_parallel_for_model,
    remove_sequence_parallel,
)
from samovar.parallel.attention import AttentionCall, sdpa
from samovar.parallel.capture import attention_through, capturing

from . import toys
from .conftest import OnRanks

TENSORS = torch.randn(3, 1, 2, 4, 8)
TWO = SequenceParallelConfig(ulysses_degree=2)
eager: Any = torch.compiler.set_stance


def nothing(call: AttentionCall) -> torch.Tensor:
    return torch.zeros(1)


def test_only_inside_and_only_here() -> None:
    elsewhere: list[torch.Tensor] = []
    with capturing(nothing, everywhere=False):
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
        thread = threading.Thread(target=lambda: elsewhere.append(F.scaled_dot_product_attention(*TENSORS)))
        thread.start()
        thread.join()
        with attention_through(None):
            assert torch.equal(F.scaled_dot_product_attention(*TENSORS), sdpa(*TENSORS))
        with capturing(lambda call: torch.zeros(2), everywhere=False):
            assert F.scaled_dot_product_attention(*TENSORS).shape == (2,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
        assert sdpa(*TENSORS).shape == TENSORS[0].shape
    assert torch.equal(elsewhere[0], sdpa(*TENSORS))
    with pytest.raises(ZeroDivisionError), capturing(nothing, everywhere=True):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is sdpa, "torch is as it was"


def test_what_others_put_there_is_what_they_find_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users compile flex attention and put it in the place of torch's own."""

    def theirs(*args: object) -> str:
        return "theirs"

    monkeypatch.setattr(torch_flex, "flex_attention", theirs)
    with capturing(nothing, everywhere=False):
        assert torch_flex.flex_attention(*TENSORS).shape == (1,)
        with attention_through(None):
            assert torch_flex.flex_attention(*TENSORS) == "theirs"
    assert torch_flex.flex_attention is theirs


# ------------------------------------------------------------------------------------------------ other attention


def test_flex_attention_without_a_mask_is_any_attention() -> None:
    seen: list[AttentionCall] = []

    def note(call: AttentionCall) -> Any:
        seen.append(call)
        with attention_through(None):
            return call.run_here()

    query, key, value = torch.randn(3, 1, 2, 6, 4)
    with eager("force_eager"):
        expected = torch_flex.flex_attention(query, key, value, scale=0.5)
        with capturing(note, everywhere=False):
            # As diffusers calls it.
            found = torch_flex.flex_attention(
                query=query, key=key, value=value, score_mod=None, block_mask=None, scale=0.5, return_lse=False
            )
    torch.testing.assert_close(found, expected)
    assert not seen[0].rare


class RareAttention(toys.Attention):
    """Computes its scores by diffusers' oldest processor, or by flex attention with a mask."""

    def __init__(self, is_flex: bool) -> None:
        super().__init__()
        self.is_flex = is_flex
        self.scores = Attention(toys.WIDTH, heads=1, dim_head=toys.WIDTH // toys.HEADS, processor=AttnProcessor())

    def attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None) -> torch.Tensor:
        if self.is_flex:
            return torch_flex.flex_attention(query, key, value, score_mod=lambda score, b, h, q, k: score + (q >= k))
        folded = (tensor.flatten(0, 1) for tensor in (query, key, value))
        scores = self.scores.get_attention_scores(next(folded), next(folded))
        return torch.bmm(scores, next(folded)).unflatten(0, query.shape[:2])


class BlockWithNetwork(toys.Block):
    """One that ranks can still share: tokens do not meet in its network."""

    def __init__(self, attention: Any) -> None:
        super().__init__(attention)
        self.ff = torch.nn.Linear(toys.WIDTH, toys.WIDTH)

    def forward(self, hidden_states: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        attended = hidden_states + self.attn(self.norm(hidden_states))
        return attended + self.ff(attended)


@torch.no_grad()
def rare(is_flex: bool) -> tuple[str, float, str, str]:
    """By a plan that splits the tokens of a rare attention, by the plan that is derived, and in compiled blocks."""
    torch.manual_seed(0)
    model, tokens = toys.build(), toys.tokens(14)
    model.blocks = torch.nn.ModuleList(BlockWithNetwork(lambda: RareAttention(is_flex)) for _ in range(2))
    plan = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_out": SequenceParallelOutput(1)}
    with eager("force_eager"):
        expected = model.eval()(tokens)
        apply_sequence_parallel(model, TWO, plan)
        with pytest.raises(ShardingError) as refused:
            model(tokens)
        remove_sequence_parallel(model, plan)
        sharding = enable_sequence_parallel_for_model(model, TWO)
        apart = max(float((model(tokens) - expected).abs().max()) for _ in range(2))
    toys.compile_blocks(model)
    with pytest.raises(ShardingError) as in_compiled:
        model(tokens)
    return str(refused.value), apart, sharding.source, str(in_compiled.value)


@pytest.mark.parametrize(
    ("is_flex", "name"),
    [(True, "flex attention with a mask"), (False, "multiplies its scores, instead of AttnProcessor2_0")],
)
def test_rare_attention_is_refused_by_name_and_another_plan_found(is_flex: bool, name: str, on_ranks: OnRanks) -> None:
    """In compiled blocks it would hold all scores at a time."""
    for refused, apart, source, in_compiled in on_ranks(2, rare, is_flex):
        assert "The plan splits the tokens of " in refused
        assert name in refused
        assert apart <= 1e-5
        assert "split inside blocks" in source
        assert name in in_compiled
        assert "would run uncompiled in compiled code. Run the blocks" in in_compiled
