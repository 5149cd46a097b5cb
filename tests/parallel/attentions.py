"""Attention on several ranks compared with one: every layout, mask and number of heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from samovar.parallel import SequenceParallelConfig, make_mesh
from samovar.parallel.attention import AttentionCall, compute_sharded
from samovar.parallel.layout import Layout, Partition, Segment
from samovar.parallel.strategies import strategy_of

BATCH, WIDTH = 2, 4
LAYOUTS = {
    "image": "i",
    "text, image": "ti",
    "image, text": "it",
    "text and image split": "Ti",
    "text, image, text": "tit",
}
MASKS = (
    "none",
    "keys",
    "keys of this rank",
    "all",
    "queries of this rank",
    "queries and keys of this rank",
    "heads",
    "added",
    "causal",
)


def layout(kinds: str, length: int, text: int, size: int, rank: int) -> Layout:
    """t: text on every rank; T: text split; i: image split."""
    segments = []
    for kind in kinds:
        partition = None if kind == "t" else Partition(length if kind == "i" else text, size)
        segments.append(Segment(text, None) if partition is None else Segment(partition.tokens[rank], partition))
    return Layout(segments)


def part(tensor: torch.Tensor, segments: Layout, rank: int, dim: int) -> torch.Tensor:
    """This rank's rows of a whole tensor."""
    pieces, start = [], 0
    for rows, partition in segments:
        pieces.append(tensor.narrow(dim, start + (partition.start(rank) if partition else 0), rows))
        start += partition.length if partition else rows
    return torch.cat(pieces, dim)


def masks(kind: str, heads: int, queries: Layout, keys: Layout, rank: int) -> tuple[Any, Any] | None:
    """The mask of the whole attention, and the one that this rank gets; None if the case does not exist."""
    random = torch.Generator().manual_seed(7)
    q, k = queries.length, keys.length
    if kind in ("none", "causal"):
        return None, None
    if kind.startswith("keys"):
        mask = torch.rand(BATCH, 1, 1, k, generator=random) > 0.3
        mask[..., 0] = True
        return mask, part(mask, keys, rank, 3) if kind.endswith("rank") else mask
    if kind == "queries and keys of this rank":
        rows, columns = (
            torch.rand(BATCH, 1, q, 1, generator=random) > 0.2,
            torch.rand(1, 1, 1, k, generator=random) > 0.3,
        )
        columns[..., 0] = rows[..., 0, :] = True
        return rows & columns, part(rows, queries, rank, 2) & part(columns, keys, rank, 3)
    shape = (BATCH, heads, q, k) if kind == "heads" else (q, k)
    if kind == "added":
        added = torch.randn(shape, generator=random)
        return added, added
    mask = torch.rand(shape, generator=random) > 0.3
    mask[..., 0] = True
    return mask, part(mask, queries, rank, -2) if kind.endswith("rank") else mask


def cases(size: int, lengths: tuple[int, ...], head_counts: tuple[tuple[int, int], ...]) -> Iterator[tuple[Any, ...]]:
    for names, length, heads, mask in itertools.product(LAYOUTS, lengths, head_counts, MASKS):
        yield names, "same", length, heads, mask
    for mask in ("none", "keys", "all"):
        yield "image", "text", lengths[0], head_counts[0], mask  # Cross-attention to keys that every rank has.
        yield "text alone", "image", lengths[0], head_counts[0], mask


def errors(
    settings: dict[str, int], lengths: tuple[int, ...], head_counts: tuple[tuple[int, int], ...]
) -> dict[str, Any]:
    """The greatest error of each case, or why it was refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = SequenceParallelConfig(**settings)
    mesh = make_mesh(config)
    strategy = strategy_of(config, mesh, or_gathered=False)
    found: dict[str, Any] = {}
    for names, other, length, (heads, key_heads), mask_kind in cases(size, lengths, head_counts):
        text = 2 * size + 1 if "T" in LAYOUTS.get(names, "") else 5
        queries = layout(LAYOUTS.get(names, "t"), length, text, size, rank)
        keys = queries if other == "same" else layout({"text": "t", "image": "i"}[other], length, text, size, rank)
        random = torch.Generator().manual_seed(0)
        query = torch.randn(BATCH, heads, queries.length, WIDTH, generator=random)
        key, value = (torch.randn(BATCH, key_heads, keys.length, WIDTH, generator=random) for _ in range(2))
        made = masks(mask_kind, heads, queries, keys, rank)
        assert made is not None
        causal, gqa = mask_kind == "causal", key_heads != heads
        expected = F.scaled_dot_product_attention(query, key, value, made[0], is_causal=causal, enable_gqa=gqa)
        call = AttentionCall(
            part(query, queries, rank, 2), part(key, keys, rank, 2), part(value, keys, rank, 2), made[1],
            is_causal=causal, enable_gqa=gqa,
        )  # fmt: skip
        name = f"{names} to {other}, {length} tokens, {heads}/{key_heads} heads, mask: {mask_kind}"
        try:
            output = compute_sharded(call, queries, keys, mesh.sequence, strategy)
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = float((output - part(expected, queries, rank, 2)).abs().max())
    return found
