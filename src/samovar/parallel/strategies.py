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
from functools import partial

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


def strategy_of(config: SequenceParallelConfig, mesh: ParallelMesh, *, or_gathered: bool = False) -> Strategy:
    """The attention that a config selects; with `or_gathered`, gathered keys and values where it cannot."""
    gathered = partial(gathered_attention, group=mesh.sequence)
    ring = partial(ring_attention, group=mesh.ring, convert_to_fp32=config.convert_to_fp32)
    inner: Strategy = ring if config.ring_degree > 1 else lambda a: a.attend(a.key, a.value, a.mask)
    ulysses = partial(ulysses_attention, group=mesh.ulysses, inner=inner, place=mesh.ring.index)
    chosen: Strategy = {"gathered": gathered, "ring": ring, "ulysses": ulysses, "hybrid": ulysses}[config.strategy]

    def strategy(attention: Attention) -> Tensor:
        if not sum(attention.keys.counts):  # Every rank has all keys: nothing to exchange.
            return attention.attend(attention.key, attention.value, attention.mask_of(mesh.sequence.index))
        try:
            return chosen(attention)
        except StrategyError:
            if not or_gathered:
                raise
        return gathered(attention)

    return strategy


def gathered_attention(attention: Attention, group: Group) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept, counts = attention.keys
    both = torch.cat([attention.key, attention.value], dim=3)
    whole = torch.cat([both[:, :, :kept], group.gather(both[:, :, kept:], counts, dim=2)], dim=2)
    key, value = whole.split_with_sizes([attention.key.shape[3], attention.value.shape[3]], dim=3)
    return attention.attend(key.contiguous(), value.contiguous(), attention.mask_of(group.index))


# ------------------------------------------------------------------------------------------------ ring


def ring_attention(attention: Attention, group: Group, convert_to_fp32: bool = True) -> Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    kept, counts = attention.keys
    mask = attention.mask_of(group.index)
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
            columns = mask.narrow(3, attention.keys.start(holder), counts[holder])
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
    before, now = (torch.exp(part_lse - total).nan_to_num(0.0).unsqueeze(-1) for part_lse in (merged[1], lse))
    return merged[0] * before.to(output.dtype) + output * now.to(output.dtype), total


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> _WithLse:
    """Attention and the log-sum-exp of its scores."""
    key, value = (_with_all_heads(tensor, query.shape[1]) for tensor in (key, value))
    if mask is None and query.shape[-1] == value.shape[-1] and query.device.type in ("cpu", "cuda"):
        return _by_kernel(query, key, value, scale)
    factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
    rows = torch.split(query, ROWS_AT_ONCE, dim=2)
    masks = [mask] * len(rows) if mask is None or mask.shape[2] == 1 else torch.split(mask, ROWS_AT_ONCE, dim=2)
    outputs, lses = zip(
        *(_by_hand(row * factor, key, value, m) for row, m in zip(rows, masks, strict=True)), strict=True
    )
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


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
    times = num_heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, dim=1)


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
    key, value = attention.key, attention.value
    if key.shape[1] < size:
        key, value = (_with_all_heads(tensor, num_heads) for tensor in (key, value))
    key_heads = spread(key.shape[1], size)
    heads = [count * num_heads // sum(key_heads) for count in key_heads]
    members, own = slice(size * place, size * (place + 1)), group.index

    parts, shapes, kept = [], [], []
    for tensor, rows, split in (
        (attention.query, attention.queries, heads),
        (key, attention.keys, key_heads),
        (value, attention.keys, key_heads),
    ):
        replicated, tokens = tensor.tensor_split([rows.replicated], dim=2)
        kept.append(replicated.split_with_sizes(split, dim=1)[own])
        parts.append(tokens.split_with_sizes(split, dim=1))
        shapes.append([(len(tensor), split[own], count, tensor.shape[3]) for count in rows.counts[members]])
    arrived = zip(kept, group.all_to_all(parts, shapes), strict=True)
    query, key, value = (torch.cat([replicated, *tokens], dim=2) for replicated, tokens in arrived)
    mask = attention.mask
    if mask is not None and mask.shape[1] > 1:
        mask = mask.split_with_sizes(heads, dim=1)[own]
    merged = attention.queries.merged(size), attention.keys.merged(size)
    output = inner(Attention(query, key, value, *merged, mask, attention.scale))

    # Back: every rank gets the rows that all have, and those of its tokens, of the heads that were computed here.
    counts = attention.queries.counts[members]
    replicated, *by_rank = output.split_with_sizes([attention.queries.replicated, *counts], dim=2)
    back = [torch.cat([replicated, tokens], dim=2) for tokens in by_rank]
    shape = back[own].shape
    (returned,) = group.all_to_all([back], [[(shape[0], count, *shape[2:]) for count in heads]])
    return torch.cat(returned, dim=1)
