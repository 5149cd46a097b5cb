"""One attention computed by several ranks: by gathered keys and values, a ring, Ulysses, or Ulysses in a ring.

Gathered always works: any mask, any number of heads, any kernel. It sends (P - 1) / P of the keys and values to each
rank, which holds all of them.

In a ring each rank attends to the keys it holds while it passes them on, and merges the parts by their log-sum-exp
(ring attention, arXiv 2310.01889). It never holds more than two parts of the keys. Rows that every rank has are counted
once, with its own keys. The mask does not travel: each rank has all columns of its rows.

In Ulysses each rank sends away the other ranks' heads of its tokens and gets its own heads of all tokens, and after
attention the other way around (DeepSpeed-Ulysses, arXiv 2309.14509). Heads that do not divide are spread unevenly, so
nothing is padded. Rows that every rank has need no exchange on the way in.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..core.errors import StrategyError
from .attention import Attention, Strategy
from .collectives import Group, unpacked
from .layout import spread
from .mesh import ParallelMesh, SequenceParallelConfig

ROWS_AT_ONCE = 1024
"""Queries whose scores are held at a time, where no kernel returns the log-sum-exp."""

_WithLse = tuple[Tensor, Tensor]
"""The output of an attention and the log-sum-exp of its scores, (B, H, Q)."""


def strategy_of(config: SequenceParallelConfig, mesh: ParallelMesh, *, or_gathered: bool) -> Strategy:
    """The attention that a config selects; with `or_gathered`, gathered keys and values where it cannot."""
    gathered = partial(gathered_attention, group=mesh.sequence)
    ring = partial(ring_attention, group=mesh.ring, convert_to_fp32=config.convert_to_fp32)
    inner: Strategy = ring if config.ring_degree > 1 else lambda a: a.attend(a.key, a.value, a.mask)
    ulysses = partial(ulysses_attention, group=mesh.ulysses, inner=inner, place=mesh.ring.index)
    chosen: Strategy = {"gathered": gathered, "ring": ring, "ulysses": ulysses, "hybrid": ulysses}[config.strategy]

    def strategy(attention: Attention) -> Tensor:
        if not sum(attention.key_counts):  # Every rank has all keys: nothing to exchange.
            return gathered(attention)
        try:
            return chosen(attention)
        except StrategyError:
            if not or_gathered:
                raise
        return gathered(attention)

    return strategy


def gathered_attention(attention: Attention, group: Group) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept, mask = attention.replicated_keys, attention.mask_of_own_rows(group.index)
    if not sum(attention.key_counts):
        return attention.attend(attention.key, attention.value, mask)
    own = [attention.key[:, :, kept:], attention.value[:, :, kept:]]
    keys, values = group.gather_rows(own, attention.key_counts, dim=2)
    key, value = attention.key[:, :, :kept], attention.value[:, :, :kept]
    return attention.attend(torch.cat([key, *keys], dim=2), torch.cat([value, *values], dim=2), mask)


# ------------------------------------------------------------------------------------------------ ring


def ring_attention(attention: Attention, group: Group, convert_to_fp32: bool = True) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept, counts = attention.replicated_keys, attention.key_counts
    mask = attention.mask_of_own_rows(group.index)
    starts = list(accumulate(counts, initial=kept))
    key, value = attention.key, attention.value
    flat = torch.cat([key[:, :, kept:].reshape(-1), value[:, :, kept:].reshape(-1)])
    row = flat.numel() // counts[group.index]
    merged: _WithLse | None = None
    for turn in range(group.size):
        holder = (group.index - turn) % group.size
        arriving = None
        if turn + 1 < group.size:
            arriving = group.pass_on(flat, row * counts[(holder - 1) % group.size])
        if turn:
            key, value = unpacked(flat, [(*t.shape[:2], counts[holder], t.shape[3]) for t in (key, value)])
        columns = None
        if mask is not None:
            columns = mask.narrow(3, starts[holder], counts[holder])
            columns = columns if turn else torch.cat([mask[..., :kept], columns], dim=3)
        part = attend_with_lse(attention.query, key, value, columns, attention.scale)
        merged = merge(merged, part, convert_to_fp32)
        if arriving is not None:
            flat = arriving()
    assert merged is not None
    return merged[0].to(attention.query.dtype)


def merge(merged: _WithLse | None, part: _WithLse, convert_to_fp32: bool) -> _WithLse:
    """Two attentions of the same queries to different keys, as one to all of these keys."""
    output, lse = (part[0].float(), part[1].float()) if convert_to_fp32 else part
    if merged is None:
        return output, lse
    total = torch.logaddexp(merged[1], lse)
    # A query that sees none of the keys yet has no weight anywhere: -inf less -inf must give 0.
    weights = [torch.exp(part_lse - total).nan_to_num(0.0).unsqueeze(-1) for part_lse in (merged[1], lse)]
    return merged[0] * weights[0].to(output.dtype) + output * weights[1].to(output.dtype), total


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> _WithLse:
    """Attention and the log-sum-exp of its scores."""
    if key.shape[1] != query.shape[1]:
        key, value = _with_all_heads(key, query.shape[1]), _with_all_heads(value, query.shape[1])
    if mask is None and query.shape[-1] == value.shape[-1] and query.device.type in ("cpu", "cuda"):
        return _by_kernel(query, key, value, scale)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    rows = torch.split(query, ROWS_AT_ONCE, dim=2)
    masks = [mask] * len(rows) if mask is None or mask.shape[2] == 1 else torch.split(mask, ROWS_AT_ONCE, dim=2)
    parts = [_by_hand(row * factor, key, value, part) for row, part in zip(rows, masks, strict=True)]
    return torch.cat([part[0] for part in parts], dim=2), torch.cat([part[1] for part in parts], dim=2)


def _by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> _WithLse:
    scores = query.float() @ key.float().transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return (weights @ value.float()).to(value.dtype), lse


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> _WithLse:
    aten = torch.ops.aten
    if query.device.type == "cpu":
        output, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, scale=scale)
    elif query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0:
        output, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)
    else:
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, scale=scale)
    return output, lse[..., : query.shape[2]]


def _with_all_heads(tensor: Tensor, num_heads: int) -> Tensor:
    """Grouped heads of keys or values, repeated for each query head."""
    return tensor.repeat_interleave(num_heads // tensor.shape[1], dim=1)


# ------------------------------------------------------------------------------------------------ Ulysses


def ulysses_attention(attention: Attention, group: Group, inner: Strategy, place: int = 0) -> Tensor:
    """Attention with this rank's heads and the group's tokens, computed by `inner`. Where several groups share the
    sequence, `place` is the position of this one, and `inner` attends to the tokens of the others."""
    size, num_heads = group.size, attention.query.shape[1]
    if num_heads < size:
        raise StrategyError(
            f"Ulysses over {size} ranks needs at least as many heads, but this attention has {num_heads}. Use gathered "
            "keys and values (allgather_degree) or ring, which work with any number, or a lower ulysses_degree."
        )
    if attention.key.shape[1] < size:
        key, value = (_with_all_heads(tensor, num_heads) for tensor in (attention.key, attention.value))
        attention = replace(attention, key=key, value=value)
    key_heads = spread(attention.key.shape[1], size)
    heads = [count * num_heads // sum(key_heads) for count in key_heads]
    members = slice(size * place, size * (place + 1))
    queries, keys = attention.query_counts[members], attention.key_counts[members]

    # Tensor, rows that every rank has, heads of each rank, tokens of each rank.
    parts = [
        (attention.query, attention.replicated_queries, heads, queries),
        (attention.key, attention.replicated_keys, key_heads, keys),
        (attention.value, attention.replicated_keys, key_heads, keys),
    ]
    by_rank = list(zip(*(torch.split(t[:, :, kept:], list(split), dim=1) for t, kept, split, _ in parts), strict=True))
    shapes = [
        [(t.shape[0], split[group.index], counts[rank], t.shape[3]) for t, _, split, counts in parts]
        for rank in range(size)
    ]
    exchanged = []
    for (tensor, kept, split, _), arrived in zip(
        parts, zip(*group.all_to_all(by_rank, shapes), strict=True), strict=True
    ):
        own_heads = torch.split(tensor[:, :, :kept], list(split), dim=1)[group.index]
        exchanged.append(torch.cat([own_heads, *arrived], dim=2))
    mask = attention.mask
    if mask is not None and mask.shape[1] > 1:
        mask = torch.split(mask, heads, dim=1)[group.index]
    local = replace(
        attention,
        query=exchanged[0],
        key=exchanged[1],
        value=exchanged[2],
        mask=mask,
        query_counts=_sums(attention.query_counts, size),
        key_counts=_sums(attention.key_counts, size),
    )
    return _exchange_back(inner(local), group, heads, queries, attention.replicated_queries)


def _sums(counts: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(sum(counts[start : start + size]) for start in range(0, len(counts), size))


def _exchange_back(output: Tensor, group: Group, heads: list[int], queries: tuple[int, ...], kept: int) -> Tensor:
    """This rank's rows with all heads: every rank sends the rows that all have, and those of each rank's tokens."""
    _, *rows = torch.split(output, [kept, *queries], dim=2)
    sent = [[torch.cat([output[:, :, :kept], part], dim=2)] for part in rows]
    batch, _, _, width = output.shape
    arrived = group.all_to_all(sent, [[(batch, count, kept + queries[group.index], width)] for count in heads])
    return torch.cat([part for (part,) in arrived], dim=1)
