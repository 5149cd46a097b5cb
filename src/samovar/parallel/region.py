"""What happens while a sharded model's forward runs?

A region belongs to one model. It knows the model's strategy, and where its tokens are. The first forward with inputs of
some shapes is rehearsed: this rank's part runs alone, without exchange, with its tokens marked (as NaN) and attention
that keeps each token to itself. Where the marks arrive shows, for every attention and every gather, which rows are this
rank's tokens and which are on every rank. So nothing is guessed from lengths, and a plan that does not fit the model
shows before anything is exchanged.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.errors import ShardingError
from ..hooks.handle import for_now
from .attention import AttentionCall, Strategy, compute_sharded, of_all_ranks, share_queries
from .capture import FlexCall, attention_through, capturing, share_heads
from .collectives import Group
from .layout import Layout, Partition, read_layout


@dataclass
class Trace:
    """What a rehearsal showed."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    """Of the queries and keys of each attention, and of the tensors to gather."""
    needs_mode: bool = True
    """Whether the model calls torch's own attention directly. Assumed as long as it is not known."""


@dataclass
class Forward:
    """A sharded forward that is running."""

    trace: Trace = field(default_factory=Trace)
    open_blocks: list[str] = field(default_factory=lambda: [""])
    """The blocks that are running, innermost last; "" is the model."""
    counts: dict[str, int] = field(default_factory=dict)
    """By block: the attentions that ran in it."""
    num_blocks_run: int = 0
    num_parallel: int = 0
    """Attentions that ran on several ranks."""
    needs_mode: bool = False


@dataclass
class _Marks:
    """Which rows were marked, in each pass of a rehearsal."""

    target: Partition | None = None
    """The sequence whose tokens are marked; None marks those of all."""
    partitions: list[Partition] = field(default_factory=list)
    seen: dict[str, dict[Partition | None, torch.Tensor]] = field(default_factory=dict)
    gathered_lengths: dict[str, int] = field(default_factory=dict)


class Region:
    """Splits, gathers and attends during the forwards of one model."""

    def __init__(self, group: Group, strategy: Strategy) -> None:
        self.group = group
        self.forward: Forward | None = None
        """None while the model does not run, or runs unsharded."""
        self.shares_attention = False
        """Whether ranks share the work of attentions whose tokens are not split."""
        self._strategy = strategy
        self._marks: _Marks | None = None
        """None except in a rehearsal."""

    @contextlib.contextmanager
    def running(self, forward: Forward | None) -> Iterator[None]:
        """Inside, the model runs this forward; with None, unsharded."""
        capture = attention_through(None)
        if forward is not None:
            capture = capturing(self._attend, everywhere=forward.trace.needs_mode)
        with for_now(self, forward=forward), capture:
            yield

    # ---------------------------------------------------------------------------------------- called by hooks

    def enter_block(self, path: str) -> None:
        if self.forward is not None:
            self.forward.open_blocks.append(path)
            self.forward.counts[path] = 0
            self.forward.num_blocks_run += 1

    def leave_block(self) -> None:
        if self.forward is not None:
            self.forward.open_blocks.pop()

    def split(self, tensor: torch.Tensor, dim: int, is_padded: bool = False, kept: int = 0) -> torch.Tensor:
        """This rank's part of a tensor along a dimension; the first `kept` rows stay (or the last, if negative)."""
        rows = tensor.shape[dim]
        before, after = max(kept, 0), max(-kept, 0)
        partition = Partition(rows - before - after, self.group.size, is_padded)
        index = self.group.index
        tokens = tensor.narrow(dim, before + partition.start(index), partition.tokens[index])
        missing = partition.rows[index] - partition.tokens[index]
        if missing:
            shape = list(tokens.shape)
            shape[dim] = missing
            tokens = torch.cat([tokens, tokens.new_zeros(shape)], dim)
        if self._marks is not None:
            tokens = self._marked(tokens, partition, self._marks)
        if not kept:
            return tokens.contiguous()
        return torch.cat([tensor.narrow(dim, 0, before), tokens, tensor.narrow(dim, rows - after, after)], dim)

    def gather(self, tensor: torch.Tensor, dim: int, key: str) -> torch.Tensor:
        """The whole of a tensor of which each rank has a part along a dimension."""
        if self._marks is not None:
            return self._rehearse_gather(tensor, dim, key, self._marks)
        layout = self._layout(key, tensor.shape[dim])
        if not layout.is_sharded:
            return tensor
        whole = of_all_ranks(tensor, dim, layout, self.group)
        if layout.is_in_order:
            return whole
        return whole.index_select(dim, layout.positions(self.group.size, tensor.device).argsort())

    def _layout(self, key: str, rows: int) -> Layout:
        assert self.forward is not None
        layout = self.forward.trace.layouts.get(key)
        if layout is None or layout.rows != rows:
            raise ShardingError(
                f"{key}: {rows} rows, but the rehearsal of this forward had {layout and layout.rows}. The model "
                "does not always do the same with inputs of these shapes."
            )
        return layout

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        forward = self.forward
        assert forward is not None
        block = forward.open_blocks[-1]
        number = forward.counts.get(block, 0)
        forward.counts[block] = number + 1
        where = f"attention {number} of {block or 'the model'!r}"
        shares = self.shares_attention and call.query.shape[-2] >= 2 * self.group.size and not call.dropout_p
        forward.num_parallel += shares
        forward.needs_mode |= call.is_direct
        if self._marks is not None:
            return self._rehearse_attention(where, call, forward, self._marks)
        queries = self._layout(f"Queries of {where}", call.query.shape[-2])
        keys = self._layout(f"Keys of {where}", call.key.shape[-2])
        is_split = queries.is_sharded or keys.is_sharded
        forward.num_parallel += is_split
        with attention_through(None):
            if is_split:
                return compute_sharded(call, queries, keys, self.group, self._strategy)
            if not shares:
                return call.run_here()
            if isinstance(call, FlexCall):
                return share_heads(call, self.group)
            return share_queries(call, self.group, self._strategy)

    # ---------------------------------------------------------------------------------------- rehearsal

    def rehearse(self, run: Callable[[], Any]) -> Forward:
        """Run this rank's part alone and see where its tokens go; the forward, with its trace."""
        marks = self._marks = _Marks()
        forward = Forward()
        try:
            with self.running(forward):
                run()
            partitions = tuple(marks.partitions)
            for marks.target in partitions if len(partitions) > 1 else ():  # To tell the sequences apart.
                with self.running(Forward()):
                    run()
        finally:
            self._marks = None
        forward.trace = Trace(needs_mode=forward.needs_mode)
        for key, seen in marks.seen.items():
            marked = dict.fromkeys(partitions, seen[None]) if len(partitions) == 1 else seen
            by_partition = {partition: mark for partition, mark in marked.items() if partition is not None}
            forward.trace.layouts[key] = read_layout(by_partition, len(seen[None]), self.group.index, key)
        return forward

    def _marked(self, tokens: torch.Tensor, partition: Partition, marks: _Marks) -> torch.Tensor:
        if not tokens.is_floating_point() and not tokens.is_complex():
            return tokens
        if partition not in marks.partitions:
            marks.partitions.append(partition)
        return torch.full_like(tokens, math.nan) if marks.target in (None, partition) else tokens

    def _note(self, key: str, tensor: torch.Tensor, dim: int, marks: _Marks) -> torch.Tensor:
        marked = tensor.isnan().movedim(dim, 0).flatten(1).any(1)
        before = marks.seen.setdefault(key, {}).setdefault(marks.target, marked)
        if not torch.equal(before, marked):
            raise ShardingError(f"{key}: not the same tokens at each call of one forward.")
        return marked

    def _rehearse_attention(self, where: str, call: AttentionCall, forward: Forward, marks: _Marks) -> torch.Tensor:
        queries = self._note(f"Queries of {where}", call.query, -2, marks)
        keys = self._note(f"Keys of {where}", call.key, -2, marks)
        is_split = bool(queries.any() or keys.any())
        forward.num_parallel += is_split
        if isinstance(call, FlexCall) and is_split:
            raise ShardingError(
                f"A{where[1:]} is a flex attention with a mask: its tokens cannot be split, only its heads. Do not "
                "split its sequence in the plan."
            )
        output = call.value.new_zeros(*call.query.shape[:-1], call.value.shape[-1])
        output[..., queries, :] = math.nan
        return output

    def _rehearse_gather(self, tensor: torch.Tensor, dim: int, key: str, marks: _Marks) -> torch.Tensor:
        marked = self._note(key, tensor, dim, marks)
        if key not in marks.gathered_lengths:
            marks.gathered_lengths[key] = self._gathered_length(marked, marks.partitions)
        shape = list(tensor.shape)
        shape[dim] = marks.gathered_lengths[key]
        return tensor.new_zeros(shape)

    def _gathered_length(self, marked: torch.Tensor, partitions: Sequence[Partition]) -> int:
        """The length of the whole, from marks that do not tell sequences apart."""
        rank = self.group.index
        by_rows: dict[int, Partition] = {}
        for partition in partitions:
            if by_rows.setdefault(partition.rows[rank], partition) != partition:
                raise ShardingError(
                    f"Sequences of {by_rows[partition.rows[rank]].length} and {partition.length} tokens have the same "
                    f"length on rank {rank}, so they cannot be told apart when gathered. Do not split one of them."
                )
        count = int(marked.sum())
        replicated = len(marked) - count
        for rows, partition in by_rows.items():
            if count % rows == 0:
                return replicated + count // rows * partition.length
        if count != sum(by_rows):
            problem = f"The plan gathers {count} split rows, but splits no sequence with that many on this rank."
            raise ShardingError(f"{problem} Correct the plan.")
        return replicated + sum(partition.length for partition in partitions)
