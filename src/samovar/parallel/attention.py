"""What does an attention compute when its tokens are on several ranks?

An intercepted call is brought into one form for all strategies: rows that every rank has come first, then the tokens of
this rank. The mask is put into the order that rows have when all are together: the replicated ones, then those of rank
0, 1, and so on.

Shapes: B batch, H heads, Q and K rows of query and key, D width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from ..core.errors import ShardingError, StrategyError
from .collectives import Group
from .layout import Layout, Partition, Segment

sdpa: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
"""torch's own function, whatever replaces it later."""


@dataclass(frozen=True)
class Attention:
    """One attention over a group of ranks, as one of them sees it."""

    query: torch.Tensor
    """(B, H, Q, D): rows that every rank has, then this rank's tokens."""
    key: torch.Tensor
    value: torch.Tensor
    replicated_queries: int
    replicated_keys: int
    query_counts: tuple[int, ...]
    """Number of tokens on each rank of the group."""
    key_counts: tuple[int, ...]
    mask: torch.Tensor | None
    """(B or 1, H or 1, 1 or all queries, all keys)."""
    scale: float | None

    def mask_of_own_rows(self, index: int) -> torch.Tensor | None:
        """The mask for the queries of the rank at this position of the group."""
        if self.mask is None or self.mask.shape[2] == 1:
            return self.mask
        start = self.replicated_queries + sum(self.query_counts[:index])
        tokens = self.mask.narrow(2, start, self.query_counts[index])
        return torch.cat([self.mask[:, :, : self.replicated_queries], tokens], dim=2)

    def attend(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The attention of this rank's queries to these keys."""
        is_grouped = self.query.shape[1] != key.shape[1]
        return sdpa(self.query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=is_grouped)


Strategy = Callable[[Attention], torch.Tensor]
"""The output of this rank's queries, in their order."""


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled dot product attention as the model made it."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    is_direct: bool = False
    """Whether the model holds torch's own function."""

    def run_here(self) -> torch.Tensor:
        """Compute it as it is."""
        return sdpa(
            self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip

    def as_four_dimensional(self) -> AttentionCall:
        """The same with exactly one batch and one head dimension; without batch, a first dimension counts as heads."""
        mask = self.attn_mask
        if mask is not None and mask.ndim > 4:
            mask = mask.expand(*self.query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        elif mask is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        query, key, value = (t.reshape(-1, *(1, 1, *t.shape)[-3:]) for t in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value, attn_mask=mask)


def compute_sharded(
    call: AttentionCall, queries: Layout, keys: Layout, group: Group, strategy: Strategy
) -> torch.Tensor:
    """An attention whose queries and keys have these layouts; the rows of its output are laid out as the queries."""
    if call.dropout_p:
        raise StrategyError(
            f"An attention with dropout_p={call.dropout_p} cannot be computed on several ranks. Call model.eval()."
        )
    flat = call.as_four_dimensional()
    query_rows = [*queries.replicated(), *queries.own(group.index)]
    key_rows = [*keys.replicated(), *keys.own(group.index)]
    attention = Attention(
        query=_rows(flat.query, query_rows),
        key=_rows(flat.key, key_rows),
        value=_rows(flat.value, key_rows),
        replicated_queries=sum(map(len, queries.replicated())),
        replicated_keys=sum(map(len, keys.replicated())),
        query_counts=queries.token_counts(group.size),
        key_counts=keys.token_counts(group.size),
        mask=_mask(flat, queries, keys, group),
        scale=call.scale,
    )
    output = _in_first_order(strategy(attention), query_rows, flat.query.shape[2])
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def share_queries(call: AttentionCall, group: Group, strategy: Strategy) -> torch.Tensor:
    """An attention that every rank has all of: each computes some of the queries, and they exchange the outputs."""
    partition = Partition(call.query.shape[-2], group.size)
    count = partition.tokens[group.index]
    own = replace(call, query=call.query.narrow(-2, partition.start(group.index), count))
    keys = Layout([Segment(call.key.shape[-2], None)])
    output = compute_sharded(own, Layout([Segment(count, partition)]), keys, group, strategy)
    return torch.cat(group.gather_rows([output], partition.tokens, dim=-2)[0], dim=-2)


def of_all_ranks(tensor: torch.Tensor, dim: int, layout: Layout, group: Group) -> torch.Tensor:
    """The rows along a dimension that every rank has, then the tokens of rank 0, 1, and so on."""
    own = _rows(tensor, layout.own(group.index), dim)
    kept = [tensor.narrow(dim, run.start, len(run)) for run in layout.replicated()]
    return torch.cat([*kept, *group.gather_rows([own], layout.token_counts(group.size), dim)[0]], dim)


def _rows(tensor: torch.Tensor, runs: Sequence[range], dim: int = 2) -> torch.Tensor:
    parts = [tensor.narrow(dim, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _in_first_order(output: torch.Tensor, runs: Sequence[range], rows: int) -> torch.Tensor:
    """Rows in the order in which the model had them; those of padding are zero."""
    if [run.start for run in runs] == sorted(run.start for run in runs) and output.shape[2] == rows:
        return output
    placed = output.new_zeros(*output.shape[:2], rows, output.shape[3])
    for run, part in zip(runs, torch.split(output, [len(run) for run in runs], dim=2), strict=True):
        placed.narrow(2, run.start, len(run)).copy_(part)
    return placed


# ------------------------------------------------------------------------------------------------ masks


def _mask(call: AttentionCall, queries: Layout, keys: Layout, group: Group) -> torch.Tensor | None:
    """The mask with a column for each key of all ranks, and one row or one for each query of all ranks."""
    if call.is_causal:
        device = call.query.device
        return (keys.positions(group.size, device) <= queries.positions(group.size, device)[:, None])[None, None]
    mask = call.attn_mask
    if mask is None:
        return None
    if keys.is_sharded and mask.shape[2:] == (call.query.shape[2], call.key.shape[2]):
        rows, columns = mask.bool().any(3, keepdim=True), mask.bool().any(2, keepdim=True)
        if mask.dtype != torch.bool or not torch.equal(rows & columns, mask):
            raise ShardingError(
                f"An attention mask of {mask.shape[2]} x {mask.shape[3]} covers only the queries and keys of this "
                "rank, so how its queries see the keys of other ranks is unknown. Give it all "
                f"{keys.length} keys: do not split its last dimension in the plan."
            )
        return _ordered(rows, 2, queries, group) & _ordered(columns, 3, keys, group)
    if keys.is_sharded and mask.shape[3] == keys.length + keys.rows:
        # diffusers' Attention pads a mask that has fewer columns than there are keys.
        mask = mask[..., : keys.length]
    if mask.shape[2] > 1:
        mask = _ordered(mask, 2, queries, group)
    if mask.shape[3] == 1:
        return mask.expand(*mask.shape[:3], keys.length)
    return _ordered(mask, 3, keys, group)


def _ordered(mask: torch.Tensor, dim: int, layout: Layout, group: Group) -> torch.Tensor:
    """The mask's rows (dim 2) or columns (dim 3) of all ranks, in their order."""
    if mask.shape[dim] == layout.length:
        return mask if layout.is_in_order else mask.index_select(dim, layout.positions(group.size, mask.device))
    if mask.shape[dim] == layout.rows:
        return of_all_ranks(mask, dim, layout, group)
    what, of = (("rows", "queries"), ("columns", "keys"))[dim - 2]
    raise ShardingError(
        f"An attention mask has {mask.shape[dim]} {what}; expected {layout.rows}, the {of} on this rank, or "
        f"{layout.length}, those on all ranks. Leave the mask out of the plan, or split it like its {of}."
    )
