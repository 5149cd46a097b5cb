"""Ring: every attention, masks included; the bytes of the textbook; the merge."""

from __future__ import annotations

import math

import pytest
import torch

from samovar.parallel.ring import ROWS_AT_ONCE, attend_with_lse, merge

from . import attentions
from .conftest import OnRanks
from .test_ulysses import sent_bytes


@pytest.mark.parametrize("size", [2, 4])
def test_every_attention(size: int, on_ranks: OnRanks) -> None:
    for found in on_ranks(size, attentions.errors, {"ring_degree": size}, (6 * size - 1,), ((3, 3), (4, 2))):
        assert all(isinstance(apart, float) for apart in found.values()), "nothing is refused"
        assert max(found.values()) <= 1e-5, max(found, key=lambda name: found[name])


def test_bytes_are_those_of_the_textbook(on_ranks: OnRanks) -> None:
    """Keys and values go round in P - 1 turns: 2 n/P h d (P - 1) numbers, of whichever ranks they are."""
    for total, rows, calls in on_ranks(4, sent_bytes, {"ring_degree": 4}, 16, 8, 4):
        assert total == 4 * (2 * rows * 8 * 4 * 3)
        assert calls == {"ring": 3}, "no sizes are exchanged"
    uneven = on_ranks(4, sent_bytes, {"ring_degree": 4}, 18, 8, 4)
    for rank, (total, _, _) in enumerate(uneven):
        passed_on = sum(uneven[(rank - turn) % 4][1] for turn in range(3))
        assert total == 4 * (2 * passed_on * 8 * 4)


def test_rows_that_every_rank_has_do_not_travel(on_ranks: OnRanks) -> None:
    for total, rows, _ in on_ranks(2, sent_bytes, {"ring_degree": 2}, 16, 4, 4, 5):
        assert total == 4 * (2 * rows * 4 * 4)


def test_gathered_sends_what_ring_sends(on_ranks: OnRanks) -> None:
    for total, rows, calls in on_ranks(4, sent_bytes, {"allgather_degree": 4}, 16, 8, 4):
        assert total == 4 * (2 * rows * 8 * 4 * 3)
        assert calls == {"all-gather": 1}


def test_parts_merge_to_the_whole() -> None:
    query, key, value = torch.randn(3, 1, 2, 12, 4)
    mask = torch.rand(1, 1, 12, 12) > 0.4
    mask[..., 0, :6], mask[..., 1, 6:] = False, False  # Queries that see nothing of one part.
    mask[..., 0, 6] = mask[..., 1, 0] = True
    whole = attend_with_lse(query, key, value, mask, None)
    parts = [attend_with_lse(query, key[:, :, s], value[:, :, s], mask[..., s], None) for s in (slice(6), slice(6, 12))]
    merged = merge(merge(None, parts[0], True), parts[1], True)
    torch.testing.assert_close(merged, whole)
    torch.testing.assert_close(
        merged[0], torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    )


def test_a_query_that_sees_no_key_gives_zero() -> None:
    query, key, value = torch.randn(3, 1, 1, 4, 4)
    nothing = attend_with_lse(query, key, value, torch.zeros(1, 1, 4, 4, dtype=torch.bool), None)
    assert nothing[0].eq(0).all()
    assert nothing[1].eq(-math.inf).all()
    merged = merge(merge(None, nothing, True), nothing, True)
    assert merged[0].eq(0).all()


def test_many_queries_are_taken_some_at_a_time() -> None:
    query = torch.randn(1, 1, ROWS_AT_ONCE + 7, 4)
    key, value = torch.randn(2, 1, 1, 6, 4)
    mask = torch.randn(1, 1, ROWS_AT_ONCE + 7, 6)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attend_with_lse(query, key, value, mask, 0.3)[0], expected)


def test_merging_in_half_precision() -> None:
    query, key, value = torch.randn(3, 1, 1, 4, 4).to(torch.bfloat16)
    part = attend_with_lse(query, key, value, None, None)
    assert merge(None, part, True)[0].dtype == torch.float32
    assert merge(None, part, False)[0].dtype == torch.bfloat16
