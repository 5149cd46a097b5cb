"""An attention whose tokens are on several ranks.

An intercepted call is brought into one form for all strategies: rows that every rank has come first, then the tokens of
this rank. The mask is put into the order that rows have when all are together: the replicated ones, then those of rank
0, 1, and so on.

Shapes: B batch, H heads, Q and K rows of query and key, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ShardingError, StrategyError
from .collectives import Group
from .layout import Layout, Partition, Rows, Segment

sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
"""torch's own function, whatever replaces it later."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled dot product attention as the model made it, or of another that ranks cannot share."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    is_direct: bool = False
    """Whether the model holds torch's own function."""
    rare: str = ""
    """The kind of attention, if ranks cannot share it."""
    compute: Callable[[], Any] | None = None
    """Computes it, if it is rare."""

    def run_here(self) -> Any:
        """Compute it as it is."""
        if self.compute is not None:
            return self.compute()
        mask, gqa = self.attn_mask, self.enable_gqa
        return sdpa(
            self.query, self.key, self.value, mask, self.dropout_p, self.is_causal, scale=self.scale, enable_gqa=gqa
        )


@dataclass(frozen=True)
class Attention:
    """One attention over a group of ranks, as one of them sees it."""

    query: Tensor
    """(B, H, Q, D): rows that every rank has, then this rank's tokens."""
    key: Tensor
    value: Tensor
    queries: Rows
    keys: Rows
    mask: Tensor | None
    """(B or 1, H or 1, 1 or all queries, all keys)."""
    scale: float | None

    def mask_of(self, index: int) -> Tensor | None:
        """The mask for the queries of the rank at this position of the group."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        tokens = self.mask.narrow(2, self.queries.start(index), self.queries.counts[index])
        return torch.cat([self.mask[:, :, : self.queries.replicated], tokens], dim=2)

    def attend(self, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """The attention of this rank's queries to these keys."""
        is_grouped = self.query.shape[1] != key.shape[1]
        return sdpa(self.query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=is_grouped)


Strategy = Callable[[Attention], Tensor]
"""The output of this rank's queries, in their order."""


def compute_sharded(call: AttentionCall, queries: Layout, keys: Layout, group: Group, strategy: Strategy) -> Tensor:
    """An attention whose queries and keys have these layouts; the rows of its output are laid out as the queries."""
    if call.dropout_p:
        raise StrategyError(
            f"An attention with dropout_p={call.dropout_p} cannot be computed on several ranks. Call model.eval()."
        )
    # One batch and one head dimension; without batch, a first dimension counts as heads.
    query, key, value = (t.reshape(-1, *(1, 1, *t.shape)[-3:]) for t in (call.query, call.key, call.value))
    attention = Attention(
        queries.local(query, 2),
        keys.local(key, 2),
        keys.local(value, 2),
        queries.over(group.size),
        keys.over(group.size),
        _mask(call, queries, keys, group),
        call.scale,
    )
    output, order = strategy(attention), queries.local_order(query.device)
    output = output if order is None else output.index_select(2, order.argsort())
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def share_queries(call: AttentionCall, group: Group, strategy: Strategy) -> Tensor:
    """An attention that every rank has all of: each computes some of the queries, and they exchange the outputs."""
    partition = Partition(call.query.shape[-2], group.size)
    own = replace(call, query=call.query.split_with_sizes(partition.tokens, -2)[group.index])
    queries = Layout([Segment(own.query.shape[-2], partition)])
    output = compute_sharded(own, queries, Layout([Segment(call.key.shape[-2], None)]), group, strategy)
    return group.gather(output, partition.tokens, dim=-2).contiguous()


def of_all_ranks(tensor: Tensor, dim: int, layout: Layout, group: Group) -> Tensor:
    """The rows along a dimension that every rank has, then the tokens of rank 0, 1, and so on."""
    replicated, own = layout.local(tensor, dim).tensor_split([layout.num_replicated], dim)
    return torch.cat([replicated, group.gather(own, layout.over(group.size).counts, dim)], dim)


def _mask(call: AttentionCall, queries: Layout, keys: Layout, group: Group) -> Tensor | None:
    """The mask with a column for each key of all ranks, and one row or one for each query of all ranks."""
    mask = call.attn_mask
    if call.is_causal:
        columns, rows = (torch.arange(layout.length, device=call.query.device) for layout in (keys, queries))
        mask = columns <= rows[:, None]
    if mask is None:
        return None
    if mask.ndim > 4:
        mask = mask.expand(*call.query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if keys.is_sharded and mask.shape[2:] == (queries.rows, keys.rows):
        rows, columns = mask.bool().any(3, keepdim=True), mask.bool().any(2, keepdim=True)
        if mask.dtype != torch.bool or not torch.equal(rows & columns, mask):
            raise ShardingError(
                f"An attention mask of {mask.shape[2]} x {mask.shape[3]} covers only the queries and keys of this "
                "rank, so how its queries see the keys of other ranks is unknown. Give it all "
                f"{keys.length} keys: do not split its last dimension in the plan."
            )
        return _whole(rows, 2, queries, group) & _whole(columns, 3, keys, group)
    if keys.is_sharded and mask.shape[3] == keys.length + keys.rows:
        # diffusers' Attention pads a mask that has fewer columns than there are keys.
        mask = mask[..., : keys.length]
    mask = _whole(_whole(mask, 2, queries, group), 3, keys, group)
    return mask.expand(*mask.shape[:3], keys.length)


def _whole(mask: Tensor, dim: int, layout: Layout, group: Group) -> Tensor:
    """A mask with the rows (dimension 2) or columns (3) of all ranks, in their order; a single one stays as it is."""
    count = mask.shape[dim]
    if count == layout.length:
        order = layout.order(mask.device)
        return mask if order is None else mask.index_select(dim, order)
    if count == 1:
        return mask
    if count == layout.rows:
        return of_all_ranks(mask, dim, layout, group)
    what, of = ("rows", "queries") if dim == 2 else ("columns", "keys")
    raise ShardingError(
        f"An attention mask has {count} {what}; expected {layout.rows}, the {of} on this rank, or {layout.length}, "
        f"those on all ranks. Leave the mask out of the plan, or split it like its {of}."
    )
