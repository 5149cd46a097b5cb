"""Attention is captured on this thread and inside a sharded forward only; so are flex attention and scores."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor
from torch.nn.attention import flex_attention as torch_flex

from samovar.core.errors import ShardingError, StrategyError
from samovar.parallel import (
    SequenceParallelConfig,
    SequenceParallelInput,
    apply_sequence_parallel,
    enable_sequence_parallel_for_model,
    make_mesh,
)
from samovar.parallel.attention import AttentionCall, sdpa
from samovar.parallel.capture import FlexCall, attention_through, capturing, read_flex_call, share_heads
from samovar.parallel.collectives import Group, Traffic
from zoo import flux

from . import models
from .conftest import OnRanks

TENSORS = torch.randn(3, 1, 2, 4, 8)
ROWS, WIDTH = 128, 16


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
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
    assert torch.equal(elsewhere[0], sdpa(*TENSORS))
    assert F.scaled_dot_product_attention is sdpa, "torch is as it was"


def test_torch_s_own_function_is_seen_everywhere() -> None:
    direct: list[bool] = []

    def note(call: AttentionCall) -> torch.Tensor:
        direct.append(call.is_direct)
        return torch.zeros(1)

    with capturing(note, everywhere=True):
        assert sdpa(*TENSORS).shape == (1,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
        with attention_through(None):
            assert sdpa(*TENSORS).shape == TENSORS[0].shape
    assert direct == [True, False], "the second call came the other way"
    with capturing(nothing, everywhere=False):
        assert sdpa(*TENSORS).shape == TENSORS[0].shape


def test_an_error_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError), capturing(nothing, everywhere=True):
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is sdpa
    assert F.scaled_dot_product_attention(*TENSORS).shape == TENSORS[0].shape


def test_one_inside_another() -> None:
    with capturing(nothing, everywhere=False):
        with capturing(lambda call: torch.zeros(2), everywhere=False):
            assert F.scaled_dot_product_attention(*TENSORS).shape == (2,)
        assert F.scaled_dot_product_attention(*TENSORS).shape == (1,)
    assert F.scaled_dot_product_attention is sdpa


def test_flex_attention_and_scores_come_the_same_way() -> None:
    own = torch_flex.flex_attention, Attention.get_attention_scores
    with capturing(nothing, everywhere=False):
        assert torch_flex.flex_attention(*TENSORS).shape == (1,)
        scores = Attention(8, heads=2, dim_head=4).get_attention_scores(*TENSORS[:2, 0])
        assert not isinstance(scores, torch.Tensor), "they wait for the values"
    assert (torch_flex.flex_attention, Attention.get_attention_scores) == own


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


# ------------------------------------------------------------------------------------------------ flex attention


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


def test_each_rank_computes_some_heads_of_flex_attention(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, apart):
        assert len(found) == 4
        assert max(found.values()) <= 1e-6, found


def test_flex_attention_without_mask_is_any_attention() -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4)
    call = read_flex_call(torch_flex.flex_attention, False, query, key, value, scale=0.5)
    assert type(call) is AttentionCall
    eager: Any = torch.compiler.set_stance("force_eager")
    with eager:
        torch.testing.assert_close(call.run_here(), torch_flex.flex_attention(query, key, value, scale=0.5))


def test_flex_attention_that_cannot_be_shared_is_refused() -> None:
    call = calls()["grouped heads"]
    with pytest.raises(StrategyError, match="3 key heads are too few for 4 ranks"):
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
        with enable_sequence_parallel_for_model(model, SequenceParallelConfig(**settings)):
            found.append(float((models.run(model, inputs) - bare).abs().max()))
        assert torch.equal(models.run(model, inputs), bare)
    model.set_attention_backend("native")  # diffusers makes a model's backend that of the process, too.
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


def test_the_tokens_of_flex_attention_are_not_split(on_ranks: OnRanks) -> None:
    for message in on_ranks(2, split):
        assert "is a flex attention with a mask: its tokens cannot be split, only its heads" in message


# ------------------------------------------------------------------------------------------------ scores


def build_attention(processor: object = None) -> Attention:
    torch.manual_seed(0)
    return Attention(16, heads=4, dim_head=4, scale_qk=False, processor=processor or AttnProcessor()).eval()


@torch.no_grad()
@pytest.mark.parametrize("processor", [AttnProcessor(), SlicedAttnProcessor(3)])
@pytest.mark.parametrize("kind", ["none", "keys", "all"])
def test_handmade_attention_is_seen_whole(processor: object, kind: str) -> None:
    module, tokens = build_attention(processor), torch.randn(2, 6, 16)
    mask = {"none": None, "keys": torch.randn(2, 1, 6), "all": torch.randn(8, 6, 6)}[kind]
    seen: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return call.run_here()

    expected = module(tokens, attention_mask=mask)
    with capturing(attend, everywhere=False):
        output = module(tokens, attention_mask=mask)
    torch.testing.assert_close(output, expected)
    assert all(call.scale == 1.0 for call in seen)
    if isinstance(processor, AttnProcessor):
        assert [call.query.shape for call in seen] == [(2, 4, 6, 4)], "with heads that a strategy can share"
    torch.testing.assert_close(module(tokens, attention_mask=mask), expected, rtol=0, atol=0)


def test_scores_for_anything_else_are_refused() -> None:
    module = build_attention()
    with capturing(AttentionCall.run_here, everywhere=False):
        scores = module.get_attention_scores(*torch.randn(2, 4, 6, 4))
        with pytest.raises(ShardingError, match=r"uses its scores in softmax.*AttnProcessor2_0"):
            torch.softmax(scores, -1)
