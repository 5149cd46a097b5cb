"""Gathered, ring and Ulysses: every attention; the bytes of the textbook; the merge."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from samovar.parallel import SequenceParallelConfig, make_mesh
from samovar.parallel.attention import AttentionCall, compute_sharded
from samovar.parallel.layout import Layout, Partition, Segment
from samovar.parallel.strategies import ROWS_AT_ONCE, attend_with_lse, merge, strategy_of

from . import attentions
from .conftest import OnRanks


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"ulysses_degree": 2}, ((4, 4), (3, 3), (4, 2), (5, 1))),
        ({"ulysses_degree": 2, "ring_degree": 2}, ((3, 3), (4, 2))),
        ({"ulysses_degree": 4}, ((5, 5), (8, 2), (3, 3))),
    ],
    ids=["2", "2 x ring 2", "4"],
)
def test_ulysses_computes_every_attention(settings: dict[str, int], heads: Any, on_ranks: OnRanks) -> None:
    size = settings["ulysses_degree"] * settings.get("ring_degree", 1)
    for found in on_ranks(size, attentions.errors, settings, (8 * size // 2, 6 * size - 1)[-1:], heads):
        for name, apart in found.items():
            if "3/3 heads" in name and settings["ulysses_degree"] == 4 and "to text" not in name:
                assert "needs at least as many heads, but this attention has 3. Use gathered" in apart, name
            else:
                assert not isinstance(apart, str), f"{name}: {apart}"
                assert apart <= 1e-5, name


def sent_bytes(
    settings: dict[str, int], length: int, heads: int, width: int, text: int = 0
) -> tuple[int, int, dict[str, int]]:
    """What one attention of float32 sent from this rank, how many tokens it has, and the number of exchanges."""
    config = SequenceParallelConfig(**settings)
    mesh = make_mesh(config)
    partition = Partition(length, mesh.sequence.size)
    rows = partition.tokens[mesh.sequence.index]
    layout = Layout([*([Segment(text, None)] if text else []), Segment(rows, partition)])
    call = AttentionCall(*torch.randn(3, 1, heads, text + rows, width))
    mesh.traffic.reset()
    compute_sharded(call, layout, layout, mesh.sequence, strategy_of(config, mesh, or_gathered=False))
    return mesh.traffic.sent_bytes.total(), rows, dict(mesh.traffic.calls)


def test_ulysses_sends_the_bytes_of_the_textbook(on_ranks: OnRanks) -> None:
    """Of query, key and value a rank sends all but its own heads, of the output all but its own tokens; where all
    divides, that is 4 n/P h d (P - 1)/P numbers."""
    for length in (16, 18):
        for total, rows, calls in on_ranks(4, sent_bytes, {"ulysses_degree": 4}, length, 8, 4):
            assert total == 4 * (3 * rows * 6 * 4 + 2 * (length - rows) * 4)
            assert length == 18 or total == 4 * (4 * 4 * 8 * 4 * 3 // 4)
            assert calls == {"all-to-all": 2}, "no sizes are exchanged"


def test_ulysses_sends_of_replicated_rows_only_the_output(on_ranks: OnRanks) -> None:
    """Every rank has the text, so only its output is sent: this rank's heads of it, to each of the others."""
    for total, rows, calls in on_ranks(2, sent_bytes, {"ulysses_degree": 2}, 16, 4, 4, 5):
        assert total == 4 * (4 * rows * 4 * 4 // 2) + 4 * (5 * 4 * 4 // 2)
        assert calls == {"all-to-all": 2}


def test_gathered_computes_every_attention(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, attentions.errors, {"allgather_degree": 2}, (8, 11), ((4, 4), (3, 3), (4, 2))):
        assert len(found) > 270
        assert all(isinstance(apart, float) for apart in found.values()), "nothing is refused"
        assert max(found.values()) <= 1e-5, max(found, key=lambda name: found[name])


@pytest.mark.parametrize("size", [2, 4])
def test_ring_computes_every_attention(size: int, on_ranks: OnRanks) -> None:
    for found in on_ranks(size, attentions.errors, {"ring_degree": size}, (6 * size - 1,), ((3, 3), (4, 2))):
        assert all(isinstance(apart, float) for apart in found.values()), "nothing is refused"
        assert max(found.values()) <= 1e-5, max(found, key=lambda name: found[name])


def test_ring_sends_the_bytes_of_the_textbook(on_ranks: OnRanks) -> None:
    """Keys and values go round in P - 1 turns: 2 n/P h d (P - 1) numbers, of whichever ranks they are."""
    for total, rows, calls in on_ranks(4, sent_bytes, {"ring_degree": 4}, 16, 8, 4):
        assert total == 4 * (2 * rows * 8 * 4 * 3)
        assert calls == {"ring": 3}, "no sizes are exchanged"
    uneven = on_ranks(4, sent_bytes, {"ring_degree": 4}, 18, 8, 4)
    for rank, (total, _, _) in enumerate(uneven):
        passed_on = sum(uneven[(rank - turn) % 4][1] for turn in range(3))
        assert total == 4 * (2 * passed_on * 8 * 4)


def test_ring_does_not_send_rows_that_every_rank_has(on_ranks: OnRanks) -> None:
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
