"""What does an attention compute when its tokens lie on several ranks?

An intercepted call is brought into one form for all strategies: rows that every rank has come first, then the
tokens of this rank. The mask is cut to the order in which keys stand when all are together: the replicated ones,
then those of rank 0, 1, and so on.

Shapes: B batch, H heads, Q and K rows of query and key, D width of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from .collectives import Group
from .failures import ShardingError, StrategyError
from .layout import (
    Layout,
    Partition,
    Segment,
    global_length,
    global_positions,
    is_sharded,
    own_rows,
    replicated_rows,
    token_counts,
)

sdpa: Callable[..., torch.Tensor] = F.scaled_dot_product_attention
"""torch's own, whatever is put in its place later."""


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
    """How many of the tokens each rank of the group has."""
    key_counts: tuple[int, ...]
    mask: torch.Tensor | None
    """(B or 1, H or 1, 1 or rows, all keys). Its rows are those of this rank, or of all ranks in their order."""
    scale: float | None

    @property
    def num_heads(self) -> int:
        return self.query.shape[1]

    @property
    def num_key_heads(self) -> int:
        return self.key.shape[1]

    @property
    def all_queries(self) -> int:
        return self.replicated_queries + sum(self.query_counts)

    def mask_of_own_rows(self, index: int) -> torch.Tensor | None:
        """The mask for the queries of the rank at a place of the group."""
        if self.mask is None or self.mask.shape[2] in (1, self.query.shape[2]):
            return self.mask
        start = self.replicated_queries + sum(self.query_counts[:index])
        tokens = self.mask.narrow(2, start, self.query_counts[index])
        return torch.cat([self.mask[:, :, : self.replicated_queries], tokens], dim=2)

    def mask_of_all_rows(self) -> torch.Tensor | None:
        """The mask for the queries of all ranks."""
        if self.mask is None or self.mask.shape[2] in (1, self.all_queries):
            return self.mask
        raise StrategyError(
            f"Ulysses needs the mask of all {self.all_queries} queries on every rank, but was given one of the "
            f"{self.mask.shape[2]} that this rank has. Use gathered keys and values (allgather_degree) or ring."
        )

    def attend(self, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The attention of this rank's queries to some keys."""
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

    def run_here(self) -> torch.Tensor:
        """Compute it as it is."""
        return sdpa(
            self.query, self.key, self.value, self.attn_mask, self.dropout_p, self.is_causal,
            scale=self.scale, enable_gqa=self.enable_gqa,
        )  # fmt: skip

    def as_four_dimensional(self) -> AttentionCall:
        """The same with exactly one batch and one head dimension."""
        if self.query.ndim == 4:
            return self
        if self.query.ndim < 4:
            missing = 4 - self.query.ndim
            mask = self.attn_mask if self.attn_mask is None or self.attn_mask.ndim < 3 else self.attn_mask.unsqueeze(-3)
            shaped = [
                t.reshape(*t.shape[:-2], *(1,) * missing, *t.shape[-2:]) for t in (self.query, self.key, self.value)
            ]
            return replace(self, query=shaped[0], key=shaped[1], value=shaped[2], attn_mask=mask)
        mask = self.attn_mask
        if mask is not None and mask.ndim > 4:
            mask = mask.expand(*self.query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        flat = [t.flatten(0, -4) for t in (self.query, self.key, self.value)]
        return replace(self, query=flat[0], key=flat[1], value=flat[2], attn_mask=mask)


def compute_sharded(
    call: AttentionCall, queries: Layout, keys: Layout, group: Group, strategy: Strategy
) -> torch.Tensor:
    """An attention whose queries and keys lie as the layouts say; the rows of its output lie as the queries do."""
    if call.dropout_p:
        raise StrategyError(
            f"An attention with dropout_p={call.dropout_p} cannot be computed on several ranks. Call model.eval()."
        )
    flat = call.as_four_dimensional()
    kept, own = replicated_rows(queries), own_rows(queries, group.index)
    attention = Attention(
        query=_rows(flat.query, [*kept, *own]),
        key=_rows(flat.key, [*replicated_rows(keys), *own_rows(keys, group.index)]),
        value=_rows(flat.value, [*replicated_rows(keys), *own_rows(keys, group.index)]),
        replicated_queries=sum(map(len, kept)),
        replicated_keys=sum(map(len, replicated_rows(keys))),
        query_counts=token_counts(queries, group.size),
        key_counts=token_counts(keys, group.size),
        mask=_mask(flat, queries, keys, group),
        scale=call.scale,
    )
    output = _put_back(strategy(attention), [*kept, *own], flat.query.shape[2])
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def share_queries(call: AttentionCall, group: Group) -> torch.Tensor:
    """An attention of which every rank has all: each computes some of the queries, and they exchange the outputs."""
    flat = call.as_four_dimensional()
    partition = Partition(flat.query.shape[2], group.size)
    start, count = partition.start(group.index), partition.tokens[group.index]
    mask = flat.attn_mask
    if call.is_causal:
        whole = tuple(Segment(tensor.shape[2], None) for tensor in (flat.query, flat.key))
        mask = _causal_mask(whole[:1], whole[1:], 1, call.query.device)
    if mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask.narrow(-2, start, count)
    own = replace(flat, query=flat.query.narrow(2, start, count), attn_mask=mask, is_causal=False).run_here()
    output = torch.cat(group.gather_rows([own], partition.tokens, dim=2)[0], dim=2)
    return output.reshape(*call.query.shape[:-1], call.value.shape[-1])


def _rows(tensor: torch.Tensor, runs: Sequence[range]) -> torch.Tensor:
    parts = [tensor.narrow(2, run.start, len(run)) for run in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _put_back(output: torch.Tensor, runs: Sequence[range], rows: int) -> torch.Tensor:
    """Rows in the order in which the model had them; those of padding are zero."""
    if [run.start for run in runs] == sorted(run.start for run in runs) and output.shape[2] == rows:
        return output
    placed = output.new_zeros(*output.shape[:2], rows, output.shape[3])
    for run, part in zip(runs, torch.split(output, [len(run) for run in runs], dim=2), strict=True):
        placed.narrow(2, run.start, len(run)).copy_(part)
    return placed


# ------------------------------------------------------------------------------------------------ masks


def _mask(call: AttentionCall, queries: Layout, keys: Layout, group: Group) -> torch.Tensor | None:
    """The mask with a column for each key of all ranks, in their order."""
    if call.is_causal:
        return _causal_mask(queries, keys, group.size, call.query.device)
    if call.attn_mask is None:
        return None
    mask = call.attn_mask.reshape((1,) * (4 - call.attn_mask.ndim) + call.attn_mask.shape)
    if is_sharded(keys) and mask.shape[2:] == (call.query.shape[2], call.key.shape[2]):
        rows, columns = _factors(mask, keys)
        all_rows = _with_all_keys(rows.transpose(2, 3), queries, group).transpose(2, 3)
        return all_rows & _with_all_keys(columns, keys, group)
    return _with_all_keys(_with_ordered_queries(mask, queries, group), keys, group)


def _causal_mask(queries: Layout, keys: Layout, size: int, device: torch.device) -> torch.Tensor:
    return (_positions(keys, size, device) <= _positions(queries, size, device)[:, None])[None, None]


@functools.lru_cache(maxsize=64)
def _positions(layout: Layout, size: int, device: torch.device) -> torch.Tensor:
    """The same at each block and each step."""
    return torch.tensor(global_positions(layout, size), device=device)


def _factors(mask: torch.Tensor, keys: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Which queries and which keys a mask lets through that has only those of this rank. If it is more than that, how
    queries see the keys of other ranks is not known."""
    rows, columns = mask.bool().any(3, keepdim=True), mask.bool().any(2, keepdim=True)
    if mask.dtype != torch.bool or not torch.equal(rows & columns, mask):
        raise ShardingError(
            f"An attention mask of {mask.shape[2]} x {mask.shape[3]} has only the queries and the keys of this rank: "
            f"how its queries see the keys of other ranks is not known. Give it all {global_length(keys)} keys, that "
            "is, leave its last dimension whole in the plan."
        )
    return rows, columns


def _with_ordered_queries(mask: torch.Tensor, queries: Layout, group: Group) -> torch.Tensor:
    """The mask's rows in the order of the queries of all ranks, or else of this one."""
    rows = mask.shape[2]
    if rows == 1:
        return mask
    if rows == global_length(queries):
        return mask.index_select(2, _positions(queries, group.size, mask.device))
    here = sum(segment.rows for segment in queries)
    if rows != here:
        raise ShardingError(
            f"An attention mask has {rows} rows; {here} queries on this rank or {global_length(queries)} on all were "
            "expected. Leave the mask out of the plan, or split it as its queries are."
        )
    return _rows(mask, [*replicated_rows(queries), *own_rows(queries, group.index)])


def _with_all_keys(mask: torch.Tensor, keys: Layout, group: Group) -> torch.Tensor:
    """The mask's columns in the order of the keys of all ranks."""
    columns, here = mask.shape[3], sum(segment.rows for segment in keys)
    if is_sharded(keys) and columns == global_length(keys) + here:
        # diffusers' Attention adds as many columns as there are keys to a mask that does not have as many.
        columns, mask = global_length(keys), mask[..., : global_length(keys)]
    if columns == 1:
        return mask.expand(*mask.shape[:3], global_length(keys))
    if columns == global_length(keys):
        return mask.index_select(3, _positions(keys, group.size, mask.device))
    if columns != here:
        raise ShardingError(
            f"An attention mask has {columns} columns; {here} keys on this rank or {global_length(keys)} on all were "
            "expected. Leave the mask out of the plan, or split it as its keys are."
        )
    turned = mask.transpose(2, 3)
    own = _rows(turned, own_rows(keys, group.index))
    gathered = group.gather_rows([own], token_counts(keys, group.size), dim=2)[0]
    kept = [turned.narrow(2, run.start, len(run)) for run in replicated_rows(keys)]
    return torch.cat([*kept, *gathered], dim=2).transpose(2, 3)
