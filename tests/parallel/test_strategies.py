"""Attention on several ranks compared with one: every layout, mask and number of heads, the bytes of the textbook, and
what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from samovar.core.errors import ShardingError, StrategyError
from samovar.parallel import SequenceParallelConfig, make_mesh
from samovar.parallel.attention import AttentionCall, compute_sharded
from samovar.parallel.collectives import Group
from samovar.parallel.layout import Layout, Partition, Segment
from samovar.parallel.strategies import ROWS_AT_ONCE, attend_with_lse, merge, strategy_of

from .conftest import OnRanks
from .traffic import Traffic

BATCH, WIDTH = 2, 4
HeadCounts = tuple[tuple[int, int], ...]
LAYOUTS = ("i", "ti", "it", "Ti", "tit")
"""t: text on every rank; T: text that is split; i: image that is split."""
MASKS = ("none", "keys", "keys here", "all", "queries here", "queries and keys here", "heads", "added", "causal")
"""What a mask differs by; `here` if a rank has only its own rows or columns of it."""


def layout(kinds: str, length: int, text: int) -> Layout:
    segments = []
    for kind in kinds:
        partition = None if kind == "t" else Partition(length if kind == "i" else text, dist.get_world_size())
        rows = text if partition is None else partition.tokens[dist.get_rank()]
        segments.append(Segment(rows, partition))
    return Layout(segments)


def part(tensor: torch.Tensor, of: Layout, dim: int) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    pieces = tensor.split_with_sizes([rows if partition is None else partition.length for rows, partition in of], dim)
    own = [
        piece if partition is None else piece.split_with_sizes(partition.tokens, dim)[dist.get_rank()]
        for piece, (_, partition) in zip(pieces, of, strict=True)
    ]
    return torch.cat(own, dim)


def masks(kind: str, heads: int, queries: Layout, keys: Layout) -> tuple[Any, Any]:
    """The mask of the whole attention, and the one that this rank gets."""
    random = torch.Generator().manual_seed(7)
    q, k = queries.length, keys.length
    if kind in ("none", "causal"):
        return None, None
    if kind == "queries and keys here":
        rows = torch.rand(BATCH, 1, q, 1, generator=random) > 0.2
        columns = torch.rand(1, 1, 1, k, generator=random) > 0.3
        columns[..., 0] = rows[..., 0, :] = True
        return rows & columns, part(rows, queries, 2) & part(columns, keys, 3)
    shape = {"keys": (BATCH, 1, 1, k), "keys here": (BATCH, 1, 1, k), "heads": (BATCH, heads, q, k)}.get(kind, (q, k))
    if kind == "added":
        added = torch.randn(shape, generator=random)
        return added, added
    mask = torch.rand(shape, generator=random) > 0.3
    mask[..., 0] = True
    if kind == "keys here":
        return mask, part(mask, keys, -1)
    return mask, part(mask, queries, -2) if kind == "queries here" else mask


def cases(lengths: tuple[int, ...], head_counts: HeadCounts) -> Iterator[tuple[Any, ...]]:
    for kinds, length, heads, mask in itertools.product(LAYOUTS, lengths, head_counts, MASKS):
        yield kinds, kinds, length, heads, mask
    for kinds, mask in itertools.product(("it", "ti"), ("none", "keys", "all")):  # Cross-attention.
        yield *kinds, lengths[0], head_counts[0], mask


def errors(degrees: dict[str, int], lengths: tuple[int, ...], head_counts: HeadCounts) -> dict[str, Any]:
    """The greatest error of each case, or why it was refused."""
    config = SequenceParallelConfig(**degrees)
    mesh = make_mesh(config)
    found: dict[str, Any] = {}
    for kinds, other, length, (heads, key_heads), mask_kind in cases(lengths, head_counts):
        text = 2 * mesh.sequence.size + 1 if "T" in kinds else 5
        queries, keys = layout(kinds, length, text), layout(other, length, text)
        random = torch.Generator().manual_seed(0)
        query = torch.randn(BATCH, heads, queries.length, WIDTH, generator=random)
        key, value = (torch.randn(BATCH, key_heads, keys.length, WIDTH, generator=random) for _ in range(2))
        mask, own_mask = masks(mask_kind, heads, queries, keys)
        more = {"is_causal": mask_kind == "causal", "enable_gqa": key_heads != heads}
        expected = part(F.scaled_dot_product_attention(query, key, value, mask, **more), queries, 2)
        own = part(query, queries, 2), part(key, keys, 2), part(value, keys, 2)
        name = f"{kinds} to {other}, {length} tokens, {heads}/{key_heads} heads, mask: {mask_kind}"
        try:
            call = AttentionCall(*own, own_mask, **more)
            output = compute_sharded(call, queries, keys, mesh.sequence, strategy_of(config, mesh))
            found[name] = float((output - expected).abs().max())
        except StrategyError as error:
            found[name] = str(error)
    return found


@pytest.mark.parametrize(
    ("degrees", "lengths", "heads"),
    [
        ({"ulysses_degree": 2}, (11,), ((4, 4), (3, 3), (4, 2), (5, 1))),
        ({"ulysses_degree": 2, "ring_degree": 2}, (23,), ((3, 3), (4, 2))),
        ({"ulysses_degree": 4}, (23,), ((5, 5), (8, 2), (3, 3))),
        ({"allgather_degree": 2}, (8, 11), ((4, 4), (3, 3), (4, 2))),
        ({"ring_degree": 2}, (11,), ((3, 3), (4, 2))),
        ({"ring_degree": 4}, (23,), ((3, 3), (4, 2))),
    ],
    ids=str,
)
def test_every_attention(
    degrees: dict[str, int], lengths: tuple[int, ...], heads: HeadCounts, on_ranks: OnRanks
) -> None:
    for found in on_ranks(math.prod(degrees.values()), errors, degrees, lengths, heads):
        assert len(found) == len(list(cases(lengths, heads)))
        for name, apart in found.items():
            if "3/3 heads" in name and degrees.get("ulysses_degree") == 4 and "to t," not in name:
                assert "needs at least as many heads, but this attention has 3. Use gathered" in apart, name
            else:
                assert not isinstance(apart, str), f"{name}: {apart}"
                assert apart <= 1e-5, name


# ------------------------------------------------------------------------------------------------ bytes


def sent(
    degrees: dict[str, int], length: int, heads: int, width: int, text: int = 0
) -> tuple[int, int, dict[str, int]]:
    """What one attention of float32 sends from this rank, how many tokens it has, and the number of exchanges."""
    config = SequenceParallelConfig(**degrees)
    mesh = make_mesh(config)
    of = layout("ti" if text else "i", length, text)
    call = AttentionCall(*torch.randn(3, 1, heads, of.rows, width))
    with Traffic() as traffic:
        compute_sharded(call, of, of, mesh.sequence, strategy_of(config, mesh))
    traffic.calls.pop("recv", None)
    return traffic.sent_bytes, of.rows - text, dict(traffic.calls)


@pytest.mark.parametrize("length", [16, 18])
def test_bytes_and_exchanges_are_those_of_the_textbook(length: int, on_ranks: OnRanks) -> None:
    """By Ulysses a rank sends all but its own heads of query, key and value, and all but its own tokens of the output:
    4 n/P h d (P - 1)/P numbers, where all divides. Keys and values go round a ring in P - 1 turns: 2 n/P h d (P - 1)
    numbers, of whichever ranks they are. No sizes are exchanged."""
    for total, rows, calls in on_ranks(4, sent, {"ulysses_degree": 4}, length, 8, 4):
        assert (total, calls) == (4 * (3 * rows * 6 * 4 + 2 * (length - rows) * 4), {"alltoall_base": 2})
        assert length == 18 or total == 4 * (4 * 4 * 8 * 4 * 3 // 4)
    by_rank = on_ranks(4, sent, {"ring_degree": 4}, length, 8, 4)
    for rank, (total, _, calls) in enumerate(by_rank):
        passed_on = sum(by_rank[(rank - turn) % 4][1] for turn in range(3))
        assert (total, calls) == (4 * (2 * passed_on * 8 * 4), {"send": 3})
    if length == 16:
        for total, rows, calls in on_ranks(4, sent, {"allgather_degree": 4}, length, 8, 4):
            assert (total, calls) == (4 * (2 * rows * 8 * 4 * 3), {"allgather_base": 1})


def test_rows_that_every_rank_has_are_not_sent(on_ranks: OnRanks) -> None:
    """By Ulysses only their output is: this rank's heads of it, to each of the others."""
    for total, rows, _ in on_ranks(2, sent, {"ring_degree": 2}, 16, 4, 4, 5):
        assert total == 4 * (2 * rows * 4 * 4)
    for total, rows, _ in on_ranks(2, sent, {"ulysses_degree": 2}, 16, 4, 4, 5):
        assert total == 4 * (4 * rows * 4 * 4 // 2) + 4 * (5 * 4 * 4 // 2)


# ------------------------------------------------------------------------------------------------ on one rank


def test_parts_merge_to_the_whole() -> None:
    query, key, value = torch.randn(3, 1, 2, 12, 4)
    mask = torch.rand(1, 1, 12, 12) > 0.4
    mask[..., 0, :6], mask[..., 1, 6:] = False, False  # Queries that see nothing of one part.
    mask[..., 0, 6] = mask[..., 1, 0] = True
    parts = [attend_with_lse(query, key[:, :, s], value[:, :, s], mask[..., s], None) for s in (slice(6), slice(6, 12))]
    merged = merge(merge(None, parts[0], True), parts[1], True)
    torch.testing.assert_close(merged, attend_with_lse(query, key, value, mask, None))
    torch.testing.assert_close(merged[0], F.scaled_dot_product_attention(query, key, value, attn_mask=mask))
    nothing = attend_with_lse(query, key, value, torch.zeros_like(mask), None)
    assert nothing[1].eq(-math.inf).all()
    assert merge(merge(None, nothing, True), nothing, True)[0].eq(0).all(), "a query that sees no key"


def test_many_queries_are_taken_some_at_a_time() -> None:
    query, (key, value) = torch.randn(1, 1, ROWS_AT_ONCE + 7, 4), torch.randn(2, 1, 1, 6, 4)
    mask = torch.randn(1, 1, ROWS_AT_ONCE + 7, 6)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(attend_with_lse(query, key, value, mask, 0.3)[0], expected)
    half = attend_with_lse(*torch.randn(3, 1, 1, 4, 4).to(torch.bfloat16), None, None)
    assert [merge(None, half, in_float32)[0].dtype for in_float32 in (True, False)] == [torch.float32, torch.bfloat16]


def test_three_and_five_dimensions() -> None:
    whole = Layout([Segment(6, None)])
    for shape in ((3, 6, 4), (2, 3, 2, 6, 4)):
        mask = torch.rand(6, 6) > 0.2
        mask[:, 0] = True
        made = AttentionCall(*(torch.randn(shape) for _ in range(3)), mask)
        out = compute_sharded(made, whole, whole, Group((0,), 0, None), lambda a: a.attend(a.key, a.value, a.mask))
        torch.testing.assert_close(out, made.run_here())


def never(attention: object) -> torch.Tensor:
    raise AssertionError("it should have been refused")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout_p": 0.1}, r"dropout_p=0\.1.*model\.eval"),
        ({"attn_mask": torch.zeros(4, 4)}, "4 x 4 covers only the queries and keys of this rank"),
        ({"attn_mask": torch.zeros(3, 8)}, "has 3 rows; expected 4, the queries on this rank, or 8"),
        ({"attn_mask": torch.zeros(8, 5)}, "has 5 columns; expected 4, the keys on this rank, or 8"),
    ],
    ids=["dropout", "of one part", "rows", "columns"],
)
def test_what_is_ambiguous_is_refused(settings: dict[str, Any], message: str) -> None:
    half, one_of_two = Layout([Segment(4, Partition(8, 2))]), Group((0, 1), 0, None)
    with pytest.raises((StrategyError, ShardingError), match=message):
        compute_sharded(AttentionCall(*torch.zeros(3, 1, 2, 4, 4), **settings), half, half, one_of_two, never)
