"""An attention whose tokens are on several ranks.

An intercepted call is brought into one form for all strategies: rows that every rank has come first, then the tokens of
this rank. The mask is put into the order that rows have when all are together: the replicated ones, then those of rank
0, 1, and so on.

Shapes: B batch, H heads, Q and K rows of query and key, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.errors import ShardingError, StrategyError
from .collectives import Group
from .layout import Layout, Partition, Segment

sdpa: Callable[..., Tensor] = F.scaled_dot_product_attention
"""torch's own function, whatever replaces it later."""


@dataclass(frozen=True)
class Attention:
    """One attention over a group of ranks, as one of them sees it."""

    query: Tensor
    """(B, H, Q, D): rows that every rank has, then this rank's tokens."""
    key: Tensor
    value: Tensor
    replicated_queries: int
    replicated_keys: int
    query_counts: tuple[int, ...]
    """Number of tokens on each rank of the group."""
    key_counts: tuple[int, ...]
    mask: Tensor | None
    """(B or 1, H or 1, 1 or all queries, all keys)."""
    scale: float | None

    def mask_of_own_rows(self, index: int) -> Tensor | None:
        """The mask for the queries of the rank at this position of the group."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        start = self.replicated_queries + sum(self.query_counts[:index])
        tokens = self.mask.narrow(2, start, self.query_counts[index])
        return torch.cat([self.mask[:, :, : self.replicated_queries], tokens], dim=2)

    def attend(self, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """The attention of this rank's queries to these keys."""
        is_grouped = self.query.shape[1] != key.shape[1]
        return sdpa(self.query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=is_grouped)


Strategy = Callable[[Attention], Tensor]
"""The output of this rank's queries, in their order."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled dot product attention as the model made it."""

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

    def run_here(self) -> Tensor:
        """Compute it as it is."""
        return sdpa(
            self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip


def compute_sharded(call: AttentionCall, queries: Layout, keys: Layout, group: Group, strategy: Strategy) -> Tensor:
    """An attention whose queries and keys have these layouts; the rows of its output are laid out as the queries."""
    if call.dropout_p:
        raise StrategyError(
            f"An attention with dropout_p={call.dropout_p} cannot be computed on several ranks. Call model.eval()."
        )
    # One batch and one head dimension; without batch, a first dimension counts as heads.
    query, key, value = (t.reshape(-1, *(1, 1, *t.shape)[-3:]) for t in (call.query, call.key, call.value))
    attention = Attention(
        query=_local(query, 2, queries),
        key=_local(key, 2, keys),
        value=_local(value, 2, keys),
        replicated_queries=queries.num_replicated,
        replicated_keys=keys.num_replicated,
        query_counts=queries.counts(group.size),
        key_counts=keys.counts(group.size),
        mask=_mask(call, queries, keys, group),
        scale=call.scale,
    )
    output, order = strategy(attention), queries.local_order(query.device)
    output = output if order is None else output.index_select(2, order.argsort())
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def share_queries(call: AttentionCall, group: Group, strategy: Strategy) -> Tensor:
    """An attention that every rank has all of: each computes some of the queries, and they exchange the outputs."""
    partition = Partition(call.query.shape[-2], group.size)
    count = partition.tokens[group.index]
    own = replace(call, query=call.query.narrow(-2, partition.start(group.index), count))
    keys = Layout([Segment(call.key.shape[-2], None)])
    output = compute_sharded(own, Layout([Segment(count, partition)]), keys, group, strategy)
    return torch.cat(group.gather_rows([output], partition.tokens, dim=-2)[0], dim=-2)


def of_all_ranks(tensor: Tensor, dim: int, layout: Layout, group: Group) -> Tensor:
    """The rows along a dimension that every rank has, then the tokens of rank 0, 1, and so on."""
    replicated, own = _local(tensor, dim, layout).tensor_split([layout.num_replicated], dim)
    return torch.cat([replicated, *group.gather_rows([own], layout.counts(group.size), dim)[0]], dim)


def _local(tensor: Tensor, dim: int, layout: Layout) -> Tensor:
    """A tensor of this rank, the replicated rows first."""
    order = layout.local_order(tensor.device)
    return tensor if order is None else tensor.index_select(dim, order)


# ------------------------------------------------------------------------------------------------ masks


def _mask(call: AttentionCall, queries: Layout, keys: Layout, group: Group) -> Tensor | None:
    """The mask with a column for each key of all ranks, and one row or one for each query of all ranks."""
    if call.is_causal:
        columns, rows = (torch.arange(layout.length, device=call.query.device) for layout in (keys, queries))
        return _ordered((columns <= rows[:, None])[None, None], queries, keys, group)
    mask = call.attn_mask
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
        mask = _ordered(rows, queries, None, group) & _ordered(columns, None, keys, group)
        return mask
    if keys.is_sharded and mask.shape[3] == keys.length + keys.rows:
        # diffusers' Attention pads a mask that has fewer columns than there are keys.
        mask = mask[..., : keys.length]
    mask = _ordered(mask, queries if mask.shape[2] > 1 else None, keys if mask.shape[3] > 1 else None, group)
    return mask.expand(*mask.shape[:3], keys.length)


def _ordered(mask: Tensor, queries: Layout | None, keys: Layout | None, group: Group) -> Tensor:
    """The mask's rows and columns of all ranks, in their order; those without a layout stay as they are."""
    for dim, layout, what, of in ((2, queries, "rows", "queries"), (3, keys, "columns", "keys")):
        if layout is None:
            continue
        if mask.shape[dim] == layout.length:
            order = layout.order(group.size, mask.device)
            mask = mask if order is None else mask.index_select(dim, order)
        elif mask.shape[dim] == layout.rows:
            mask = of_all_ranks(mask, dim, layout, group)
        else:
            raise ShardingError(
                f"An attention mask has {mask.shape[dim]} {what}; expected {layout.rows}, the {of} on this rank, or "
                f"{layout.length}, those on all ranks. Leave the mask out of the plan, or split it like its {of}."
            )
    return mask
