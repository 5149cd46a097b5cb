"""How is attention computed when ranks exchange heads for tokens?

Before attention each rank gives away the other ranks' heads of its tokens and gets its own heads of all tokens;
after it the other way round (DeepSpeed-Ulysses, arXiv 2309.14509). Heads that do not divide are spread unevenly,
so nothing is padded. Rows that every rank has need no exchange on the way in.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch

from .attention import Attention, Strategy
from .collectives import Group
from .failures import StrategyError
from .layout import spread


def ulysses_attention(attention: Attention, group: Group, inner: Strategy, place: int = 0) -> torch.Tensor:
    """Attention with this rank's heads and the group's tokens, computed by `inner`. Where several groups share the
    sequence, `place` says which of them this is, and `inner` attends to the tokens of the others."""
    if attention.num_heads < group.size:
        raise StrategyError(
            f"Ulysses over {group.size} ranks needs as many heads, but this attention has {attention.num_heads}. Use "
            "gathered keys and values (allgather_degree) or ring, which do not care, or a lower ulysses_degree."
        )
    attention = _with_even_groups(attention, group.size)
    ratio = attention.num_heads // attention.num_key_heads
    key_heads = list(spread(attention.num_key_heads, group.size))
    heads = [count * ratio for count in key_heads]
    mask = attention.mask_of_all_rows()
    first = group.size * place
    queries = attention.query_counts[first : first + group.size]
    keys = attention.key_counts[first : first + group.size]

    query, key, value = _exchange(attention, group, heads, key_heads, queries, keys)
    if mask is not None and mask.shape[1] > 1:
        mask = torch.split(mask, heads, dim=1)[group.index]
    local = replace(
        attention,
        query=query,
        key=key,
        value=value,
        mask=mask,
        query_counts=_sums(attention.query_counts, group.size),
        key_counts=_sums(attention.key_counts, group.size),
    )
    return _exchange_back(inner(local), group, heads, queries, attention.replicated_queries)


def _with_even_groups(attention: Attention, size: int) -> Attention:
    """Grouped heads as they are if every rank gets at least one group, else repeated for each query head."""
    if attention.num_key_heads >= size:
        return attention
    repeats = attention.num_heads // attention.num_key_heads
    return replace(
        attention,
        key=attention.key.repeat_interleave(repeats, dim=1),
        value=attention.value.repeat_interleave(repeats, dim=1),
    )


def _sums(counts: tuple[int, ...], size: int) -> tuple[int, ...]:
    return tuple(sum(counts[start : start + size]) for start in range(0, len(counts), size))


def _exchange(
    attention: Attention,
    group: Group,
    heads: list[int],
    key_heads: list[int],
    queries: tuple[int, ...],
    keys: tuple[int, ...],
) -> list[torch.Tensor]:
    """Query, key and value with this rank's heads and the tokens of the whole group, in one exchange."""
    parts = [
        (attention.query, attention.replicated_queries, heads, queries),
        (attention.key, attention.replicated_keys, key_heads, keys),
        (attention.value, attention.replicated_keys, key_heads, keys),
    ]
    outgoing = [torch.split(t[:, :, kept:], split, dim=1) for t, kept, split, _ in parts]
    batch = attention.query.shape[0]
    sent = [torch.cat([piece[rank].reshape(-1) for piece in outgoing]) for rank in range(group.size)]
    shapes = [
        [(batch, split[group.index], counts[rank], t.shape[3]) for t, _, split, counts in parts]
        for rank in range(group.size)
    ]
    sizes = [[torch.Size(shape).numel() for shape in shape_list] for shape_list in shapes]
    arrived = group.all_to_all(sent, [(sum(size),) for size in sizes])
    pieces = [
        [flat.view(shape) for flat, shape in zip(torch.split(part, size), shape_list, strict=True)]
        for part, size, shape_list in zip(arrived, sizes, shapes, strict=True)
    ]
    exchanged = []
    for place, (tensor, kept, split, _) in enumerate(parts):
        own_heads = torch.split(tensor[:, :, :kept], split, dim=1)[group.index]
        exchanged.append(torch.cat([own_heads, *(piece[place] for piece in pieces)], dim=2))
    return exchanged


def _exchange_back(
    output: torch.Tensor, group: Group, heads: list[int], queries: tuple[int, ...], kept: int
) -> torch.Tensor:
    """This rank's rows with all heads: every rank sends the rows that all have, and those of each rank's tokens."""
    starts = accumulate(queries, initial=kept)
    rows = [output.narrow(2, start, count) for start, count in zip(starts, queries, strict=False)]
    sent = [torch.cat([output[:, :, :kept], part], dim=2) for part in rows]
    batch, _, _, width = output.shape
    arrived = group.all_to_all(sent, [(batch, count, kept + queries[group.index], width) for count in heads])
    return torch.cat(arrived, dim=1)
