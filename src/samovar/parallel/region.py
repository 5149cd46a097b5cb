"""What happens while a sharded model's forward runs?

A region belongs to one model. It knows the model's strategy, and where its tokens are. The first forward with inputs of
some shapes is rehearsed: this rank's part runs alone, without exchange, with its tokens marked (as NaN) and attention
that keeps each token to itself. Where the marks arrive shows, for every attention and every gather, which rows are this
rank's tokens and which are on every rank. So nothing is guessed from lengths, and a plan that does not fit the model
shows before anything is exchanged.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import ShardingError
from .attention import AttentionCall, Strategy, compute_sharded, positions, share_queries
from .capture import FlexCall, attention_through, capturing, share_heads
from .layout import (
    Layout,
    Partition,
    is_sharded,
    num_rows,
    own_rows,
    read_layout,
    replicated_rows,
    token_counts,
)
from .mesh import ParallelMesh


class Phase(enum.Enum):
    OFF = enum.auto()
    REHEARSAL = enum.auto()
    ON = enum.auto()


@dataclass
class Trace:
    """What a rehearsal showed."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    """Of the queries and keys of each attention, and of the tensors to gather."""
    needs_mode: bool = True
    """Whether the model calls torch's own attention directly. Assumed as long as it is not known."""


@dataclass
class Forward:
    """A forward that is running."""

    phase: Phase = Phase.OFF
    trace: Trace = field(default_factory=Trace)
    open_blocks: list[str] = field(default_factory=lambda: [""])
    """The blocks that are running, innermost last; "" is the model."""
    counts: dict[str, int] = field(default_factory=dict)
    """By block: the attentions that ran in it."""
    num_blocks_run: int = 0
    num_parallel: int = 0
    """Attentions that ran on several ranks."""


@dataclass
class _Marks:
    """Which rows were marked, in each pass of a rehearsal."""

    target: Partition | None = None
    """The sequence whose tokens are marked; None marks those of all."""
    partitions: list[Partition] = field(default_factory=list)
    seen: dict[str, dict[Partition | None, torch.Tensor]] = field(default_factory=dict)
    gathered_lengths: dict[str, int] = field(default_factory=dict)
    needs_mode: bool = False

    def note_direct_call(self) -> None:
        self.needs_mode = True


class Region:
    """Splits, gathers and attends during the forwards of one model."""

    def __init__(self, mesh: ParallelMesh, strategy: Strategy, blocks: Sequence[str]) -> None:
        self.mesh = mesh
        self.group = mesh.sequence
        self.blocks = tuple(blocks)
        self.forward = Forward()
        self.shares_attention = False
        """Whether ranks share the work of attentions whose tokens are not split."""
        self._strategy = strategy
        self._marks = _Marks()

    @contextlib.contextmanager
    def running(self, phase: Phase, trace: Trace | None = None) -> Iterator[Forward]:
        """Inside, the model's forward runs in this phase."""
        outer, self.forward = self.forward, Forward(phase, trace or Trace())
        capture: contextlib.AbstractContextManager[None] = attention_through(None)
        if phase is not Phase.OFF:
            capture = capturing(
                self._attend, everywhere=self.forward.trace.needs_mode, on_direct_call=self._marks.note_direct_call
            )
        try:
            with capture:
                yield self.forward
        finally:
            self.forward = outer

    # ---------------------------------------------------------------------------------------- called by hooks

    def enter_block(self, path: str) -> None:
        self.forward.open_blocks.append(path)
        self.forward.counts[path] = 0
        self.forward.num_blocks_run += 1

    def leave_block(self) -> None:
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
        if self.forward.phase is Phase.REHEARSAL:
            tokens = self._marked(tokens, partition)
        if not kept:
            return tokens.contiguous()
        return torch.cat([tensor.narrow(dim, 0, before), tokens, tensor.narrow(dim, rows - after, after)], dim)

    def gather(self, tensor: torch.Tensor, dim: int, key: str) -> torch.Tensor:
        """The whole of a tensor of which each rank has a part along a dimension."""
        if self.forward.phase is Phase.REHEARSAL:
            return self._rehearse_gather(tensor, dim, key)
        layout = self._layout(key, tensor.shape[dim])
        if not is_sharded(layout):
            return tensor
        own = torch.cat([tensor.narrow(dim, run.start, len(run)) for run in own_rows(layout, self.group.index)], dim)
        ranks = self.group.gather_rows([own], token_counts(layout, self.group.size), dim)[0]
        kept = [tensor.narrow(dim, run.start, len(run)) for run in replicated_rows(layout)]
        order = positions(layout, self.group.size, tensor.device).argsort()
        return torch.cat([*kept, *ranks], dim).index_select(dim, order)

    def _layout(self, key: str, rows: int) -> Layout:
        layout = self.forward.trace.layouts.get(key)
        if layout is None or num_rows(layout) != rows:
            raise ShardingError(
                f"{key}: {rows} rows, but the rehearsal of this forward had {layout and num_rows(layout)}. The model "
                "does not always do the same with inputs of these shapes."
            )
        return layout

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        forward, block = self.forward, self.forward.open_blocks[-1]
        number = forward.counts.get(block, 0)
        forward.counts[block] = number + 1
        where = f"attention {number} of {block or 'the model'!r}"
        shares = self.shares_attention and call.query.shape[-2] >= 2 * self.group.size and not call.dropout_p
        if forward.phase is Phase.REHEARSAL:
            return self._rehearse_attention(where, call, shares)
        queries = self._layout(f"Queries of {where}", call.query.shape[-2])
        keys = self._layout(f"Keys of {where}", call.key.shape[-2])
        is_split = is_sharded(queries) or is_sharded(keys)
        forward.num_parallel += is_split or shares
        with attention_through(None):
            if is_split:
                return compute_sharded(call, queries, keys, self.group, self._strategy)
            if not shares:
                return call.run_here()
            if isinstance(call, FlexCall):
                return share_heads(call, self.group)
            return share_queries(call, self.group, self._strategy)

    # ---------------------------------------------------------------------------------------- rehearsal

    def rehearse(self, run: Callable[[], Any]) -> tuple[Trace, Forward]:
        """Run this rank's part alone and see where its tokens go."""
        marks = self._marks = _Marks()
        with self.running(Phase.REHEARSAL) as forward:
            run()
        partitions = tuple(marks.partitions)
        for marks.target in partitions if len(partitions) > 1 else ():  # To tell the sequences apart.
            with self.running(Phase.REHEARSAL):
                run()
        trace = Trace(needs_mode=marks.needs_mode)
        for key, seen in marks.seen.items():
            marked = dict.fromkeys(partitions, seen[None]) if len(partitions) == 1 else seen
            by_partition = {partition: mark for partition, mark in marked.items() if partition is not None}
            trace.layouts[key] = read_layout(by_partition, len(seen[None]), self.group.index, key)
        return trace, forward

    def _marked(self, tokens: torch.Tensor, partition: Partition) -> torch.Tensor:
        marks = self._marks
        if not tokens.is_floating_point() and not tokens.is_complex():
            return tokens
        if partition not in marks.partitions:
            marks.partitions.append(partition)
        return torch.full_like(tokens, math.nan) if marks.target in (None, partition) else tokens

    def _note(self, key: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        marked = tensor.isnan().movedim(dim, 0).flatten(1).any(1)
        before = self._marks.seen.setdefault(key, {}).setdefault(self._marks.target, marked)
        if not torch.equal(before, marked):
            raise ShardingError(f"{key}: not the same tokens at each call of one forward.")
        return marked

    def _rehearse_attention(self, where: str, call: AttentionCall, shares: bool) -> torch.Tensor:
        queries = self._note(f"Queries of {where}", call.query, -2)
        keys = self._note(f"Keys of {where}", call.key, -2)
        is_split = bool(queries.any() or keys.any())
        self.forward.num_parallel += is_split or shares
        if isinstance(call, FlexCall) and is_split:
            raise ShardingError(
                f"A{where[1:]} is a flex attention with a mask: its tokens cannot be split, only its heads. Do not "
                "split its sequence in the plan."
            )
        output = call.value.new_zeros(*call.query.shape[:-1], call.value.shape[-1])
        output[..., queries, :] = math.nan
        return output

    def _rehearse_gather(self, tensor: torch.Tensor, dim: int, key: str) -> torch.Tensor:
        marked = self._note(key, tensor, dim)
        shape = list(tensor.shape)
        if key not in self._marks.gathered_lengths:
            self._marks.gathered_lengths[key] = self._gathered_length(marked)
        shape[dim] = self._marks.gathered_lengths[key]
        return tensor.new_zeros(shape)

    def _gathered_length(self, marked: torch.Tensor) -> int:
        """The length of the whole, from marks that do not tell sequences apart."""
        rank, partitions = self.group.index, self._marks.partitions
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
            raise ShardingError(f"A gather of {count} rows is not of any sequence that was split.")
        return replicated + sum(partition.length for partition in partitions)
