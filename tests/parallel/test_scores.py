"""The attention that diffusers computes by hand is an attention like any other."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor

from samovar.parallel.attention import AttentionCall
from samovar.parallel.capture import attention_through
from samovar.parallel.failures import ShardingError


def build(processor: object = None) -> Attention:
    torch.manual_seed(0)
    return Attention(16, heads=4, dim_head=4, scale_qk=False, processor=processor or AttnProcessor()).eval()


@torch.no_grad()
@pytest.mark.parametrize("processor", [AttnProcessor(), SlicedAttnProcessor(3)])
@pytest.mark.parametrize("kind", ["none", "keys", "all"])
def test_it_is_seen_whole(processor: object, kind: str) -> None:
    module, tokens = build(processor), torch.randn(2, 6, 16)
    mask = {"none": None, "keys": torch.randn(2, 1, 6), "all": torch.randn(8, 6, 6)}[kind]
    seen: list[AttentionCall] = []

    def attend(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return call.run_here()

    expected = module(tokens, attention_mask=mask)
    with attention_through(attend, everywhere=False):
        output = module(tokens, attention_mask=mask)
    torch.testing.assert_close(output, expected)
    assert all(call.scale == 1.0 for call in seen)
    if isinstance(processor, AttnProcessor):
        assert [call.query.shape for call in seen] == [(2, 4, 6, 4)], "with heads that a strategy can share"
    torch.testing.assert_close(module(tokens, attention_mask=mask), expected, rtol=0, atol=0)


def test_scores_for_anything_else_are_refused() -> None:
    module = build()
    with attention_through(AttentionCall.run_here, everywhere=False):
        scores = module.get_attention_scores(*torch.randn(2, 4, 6, 4))
        with pytest.raises(ShardingError, match=r"uses its scores in softmax.*AttnProcessor2_0"):
            torch.softmax(scores, -1)
