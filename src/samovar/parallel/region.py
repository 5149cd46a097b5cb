"""What happens while a sharded model's forward runs?

A region is one model's: its strategy, and what is known of its tokens. Before the first forward with inputs of
some shapes it is rehearsed: this rank's part runs alone, without exchange, with its tokens marked (as not a
number) and attention leaving each token by itself. Where the marks arrive tells, for every attention and every
gather, which rows are this rank's tokens and which are on every rank. So nothing is guessed from lengths, and a
plan that does not fit the model shows before anything is exchanged.
"""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .attention import Attention, AttentionCall, Strategy, compute_sharded, share_queries
from .capture import attention_left_alone, attention_through
from .collectives import Group
from .failures import ShardingError, StrategyError
from .flex import FlexCall, share_heads
from .gather_kv import gathered_attention
from .layout import (
    Layout,
    Partition,
    Segment,
    global_length,
    is_sharded,
    own_rows,
    read_layout,
    replicated_rows,
    token_counts,
)
from .mesh import ParallelMesh, SequenceParallelConfig
from .ring import ring_attention
from .ulysses import ulysses_attention

Place = tuple[str, int]
"""An attention: the block in which it runs ("" outside of all), and its number there."""


class Phase(enum.Enum):
    OFF = enum.auto()
    REHEARSAL = enum.auto()
    ON = enum.auto()


@dataclass
class Trace:
    """What a rehearsal showed."""

    attentions: dict[Place, tuple[Layout, Layout]] = field(default_factory=dict)
    """The layouts of queries and keys."""
    gathers: dict[str, Layout] = field(default_factory=dict)
    """By gather: the layout along its dimension."""
    needs_mode: bool = False

    def num_parallel(self, size: int, *, shares_attention: bool) -> int:
        """How many attentions run on several ranks."""
        return sum(
            is_sharded(queries) or is_sharded(keys) or (shares_attention and can_share(queries, size))
            for queries, keys in self.attentions.values()
        )


def can_share(queries: Layout, size: int) -> bool:
    """Whether there are queries enough for each rank to compute some."""
    return sum(segment.rows for segment in queries) >= 2 * size


@dataclass
class _Marks:
    """Which rows were marked, in each pass of a rehearsal."""

    target: Partition | None = None
    """The sequence whose tokens are marked; None marks those of all."""
    partitions: list[Partition] = field(default_factory=list)
    seen: dict[tuple[str, Any], dict[Partition | None, torch.Tensor]] = field(default_factory=dict)
    gathered: dict[str, Layout] = field(default_factory=dict)
    needs_mode: bool = False


def share(call: AttentionCall, group: Group) -> torch.Tensor:
    """An attention of which every rank has all, computed in parts."""
    return share_heads(call, group) if isinstance(call, FlexCall) else share_queries(call, group)


def strategy_of(config: SequenceParallelConfig, mesh: ParallelMesh, *, or_gathered: bool) -> Strategy:
    """The attention that a config asks for; with `or_gathered`, gathered keys and values where it cannot."""
    gathered = partial(gathered_attention, group=mesh.sequence)

    def here(attention: Attention) -> torch.Tensor:
        return attention.attend(attention.key, attention.value, attention.mask)

    ring = partial(ring_attention, group=mesh.ring, convert_to_fp32=config.convert_to_fp32)
    inner = ring if config.ring_degree > 1 else here
    ulysses = partial(ulysses_attention, group=mesh.ulysses, inner=inner, place=mesh.ring.index)
    chosen: Strategy = {"gathered": gathered, "ring": ring, "ulysses": ulysses, "hybrid": ulysses}[config.strategy]

    def strategy(attention: Attention) -> torch.Tensor:
        if not sum(attention.key_counts):  # Keys that every rank has: nothing to exchange.
            return gathered(attention)
        try:
            return chosen(attention)
        except StrategyError:
            if not or_gathered:
                raise
        return gathered(attention)

    return strategy


class Region:
    """One model whose forward is sharded."""

    def __init__(self, mesh: ParallelMesh, strategy: Strategy, blocks: Sequence[str]) -> None:
        self.mesh = mesh
        self.group = mesh.sequence
        self.blocks = tuple(blocks)
        self.phase = Phase.OFF
        self.trace = Trace()
        self.shares_attention = False
        """Whether nothing is split but the computation of each attention."""
        self.num_blocks_run = 0
        self.num_parallel = 0
        """Attentions of the running forward that ran on several ranks."""
        self._strategy = strategy
        self._marks = _Marks()
        self._block = ""
        self._counts: dict[str, int] = {}

    # ---------------------------------------------------------------------------------------- what hooks call

    @contextlib.contextmanager
    def running(self, phase: Phase, trace: Trace | None = None) -> Iterator[None]:
        """Let the model's forward run in a phase."""
        outer = self.phase, self.trace, self._block, self._counts, self.num_blocks_run, self.num_parallel
        # What is not known yet may need the mode.
        self.phase, self.trace, self._block, self._counts = phase, trace or Trace(needs_mode=True), "", {}
        self.num_blocks_run = self.num_parallel = 0
        if phase is Phase.OFF:
            attention: contextlib.AbstractContextManager[None] = attention_left_alone()
        elif phase is Phase.REHEARSAL:
            attention = attention_through(self._attend, everywhere=True, noted=self._note_direct_call)
        else:
            attention = attention_through(self._attend, everywhere=self.trace.needs_mode)
        try:
            with attention:
                yield
        finally:
            self.phase, self.trace, self._block, self._counts, self.num_blocks_run, self.num_parallel = outer

    def use(self, trace: Trace) -> None:
        """Go on with what a rehearsal during this forward has shown."""
        self.trace = trace

    @contextlib.contextmanager
    def inside_block(self, path: str) -> Iterator[None]:
        outer, self._block = self._block, path
        self._counts[path] = 0
        self.num_blocks_run += 1
        try:
            yield
        finally:
            self._block = outer

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
        if self.phase is Phase.REHEARSAL:
            tokens = self._marked(tokens, partition)
        if not kept:
            return tokens.contiguous()
        parts = [tensor.narrow(dim, 0, before), tokens, tensor.narrow(dim, rows - after, after)]
        return torch.cat(parts, dim)

    def gather(self, tensor: torch.Tensor, dim: int, key: str) -> torch.Tensor:
        """The whole of a tensor of which each rank has a part along a dimension."""
        dim = dim % tensor.ndim
        if self.phase is Phase.REHEARSAL:
            return self._rehearse_gather(tensor, dim, key)
        layout = self.trace.gathers.get(key)
        if layout is None or sum(segment.rows for segment in layout) != tensor.shape[dim]:
            raise ShardingError(
                f"{key} got a tensor of {tensor.shape[dim]} rows, unlike in the rehearsal of this forward "
                f"({layout and sum(segment.rows for segment in layout)} rows)."
            )
        if not is_sharded(layout):
            return tensor
        return self._gathered(tensor, dim, layout)

    def _gathered(self, tensor: torch.Tensor, dim: int, layout: Layout) -> torch.Tensor:
        own = own_rows(layout, self.group.index)
        tokens = torch.cat([tensor.narrow(dim, run.start, len(run)) for run in own], dim)
        ranks = self.group.gather_rows([tokens], token_counts(layout, self.group.size), dim)[0]
        partitions = [segment.partition for segment in layout if segment.partition is not None]
        pieces = [torch.split(rank, [p.tokens[i] for p in partitions], dim) for i, rank in enumerate(ranks)]
        sharded = iter([torch.cat([piece[place] for piece in pieces], dim) for place in range(len(partitions))])
        kept = iter([tensor.narrow(dim, run.start, len(run)) for run in replicated_rows(layout)])
        return torch.cat([next(kept) if segment.partition is None else next(sharded) for segment in layout], dim)

    # ---------------------------------------------------------------------------------------- attention

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        if self.phase is Phase.OFF:
            with attention_left_alone():
                return call.run_here()
        place = (self._block, self._counts.get(self._block, 0))
        self._counts[self._block] = place[1] + 1
        if self.phase is Phase.REHEARSAL:
            return self._rehearse_attention(place, call)
        layouts = self.trace.attentions.get(place)
        rows = call.query.shape[-2], call.key.shape[-2]
        if layouts is None or tuple(sum(s.rows for s in layout) for layout in layouts) != rows:
            expected = layouts and tuple(sum(s.rows for s in layout) for layout in layouts)
            raise ShardingError(
                f"Attention {place[1]} of {place[0] or 'the model'!r} has {rows[0]} queries and {rows[1]} keys; the "
                f"rehearsal of this forward had {expected}. The model does not always do the same with such inputs."
            )
        is_split = is_sharded(layouts[0]) or is_sharded(layouts[1])
        shares = self.shares_attention and can_share(layouts[0], self.group.size) and not call.dropout_p
        self.num_parallel += is_split or shares
        with attention_left_alone():
            if is_split:
                return compute_sharded(call, *layouts, self.group, self._strategy)
            return share(call, self.group) if shares else call.run_here()

    # ---------------------------------------------------------------------------------------- rehearsal

    def rehearse(self, run: Callable[[], Any]) -> Trace:
        """Run this rank's part alone and see where its tokens go."""
        marks = self._marks = _Marks()
        with torch.no_grad(), self.running(Phase.REHEARSAL):
            run()
        if len(marks.partitions) == 1:
            for seen in marks.seen.values():
                seen[marks.partitions[0]] = seen.pop(None)
        elif marks.partitions:
            for seen in marks.seen.values():
                del seen[None]
            for partition in list(marks.partitions):
                marks.target = partition
                with torch.no_grad(), self.running(Phase.REHEARSAL):
                    run()
        return self._read(marks)

    def _read(self, marks: _Marks) -> Trace:
        trace = Trace(needs_mode=marks.needs_mode)
        rank = self.group.index
        layouts = {}
        for key, seen in marks.seen.items():
            marked = {partition: mark for partition, mark in seen.items() if partition is not None}
            rows = len(next(iter(seen.values())))
            layouts[key] = read_layout(marked, rows, rank, f"{key[0]} {key[1]}")
        for (kind, key), layout in layouts.items():
            if kind == "gather":
                trace.gathers[key] = layout
            elif kind == "queries of attention":
                trace.attentions[key] = (layout, layouts["keys of attention", key])
        return trace

    def _marked(self, tokens: torch.Tensor, partition: Partition) -> torch.Tensor:
        marks = self._marks
        if not tokens.is_floating_point() and not tokens.is_complex():
            return tokens
        if partition not in marks.partitions:
            marks.partitions.append(partition)
        return torch.full_like(tokens, math.nan) if marks.target in (None, partition) else tokens

    def _note(self, kind: str, key: Any, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        marked = tensor.isnan().movedim(dim, 0).flatten(1).any(1)
        known = self._marks.seen.setdefault((kind, key), {})
        before = known.get(self._marks.target)
        if before is not None and not torch.equal(before, marked):
            raise ShardingError(f"{kind} {key} does not get the same tokens at each call of one forward.")
        known[self._marks.target] = marked
        return marked

    def _note_direct_call(self) -> None:
        self._marks.needs_mode = True

    def _rehearse_attention(self, place: Place, call: AttentionCall) -> torch.Tensor:
        marked = self._note("queries of attention", place, call.query, -2)
        other = self._note("keys of attention", place, call.key, -2)
        if isinstance(call, FlexCall) and (marked.any() or other.any()):
            raise ShardingError(
                f"Attention {place[1]} of {place[0] or 'the model'!r} is a flex attention with a mask: its tokens "
                "cannot be split, only its heads. Leave its sequence whole in the plan."
            )
        output = call.value.new_zeros(*call.query.shape[:-1], call.value.shape[-1])
        output[..., marked, :] = math.nan
        return output

    def _rehearse_gather(self, tensor: torch.Tensor, dim: int, key: str) -> torch.Tensor:
        marks = self._marks
        marked = self._note("gather", key, tensor, dim)
        if key not in marks.gathered:
            marks.gathered[key] = self._guess_layout(marked)
        shape = list(tensor.shape)
        shape[dim] = global_length(marks.gathered[key])
        return tensor.new_zeros(shape)

    def _guess_layout(self, marked: torch.Tensor) -> Layout:
        """A layout of the right length, from marks that do not tell sequences apart."""
        rank = self.group.index
        known: dict[int, Partition] = {}
        for partition in self._marks.partitions:
            if known.setdefault(partition.rows[rank], partition) != partition:
                raise ShardingError(
                    f"Sequences of {known[partition.rows[rank]].length} and {partition.length} tokens are of the same "
                    f"length on rank {rank}, so what is gathered cannot be told apart. Leave one of them whole."
                )
        run = int(marked.sum())
        for partition in self._marks.partitions:
            if run and run % partition.rows[rank] == 0:
                return read_layout({partition: marked}, len(marked), rank, "A gather")
        return read_layout({}, len(marked), rank, "A gather") if not run else self._guess_sum(marked, run)

    def _guess_sum(self, marked: torch.Tensor, run: int) -> Layout:
        rank, partitions = self.group.index, self._marks.partitions
        if run != sum(partition.rows[rank] for partition in partitions):
            raise ShardingError(f"A gather of {run} rows is of no sequence that was split.")
        return tuple(Segment(partition.rows[rank], partition) for partition in partitions)
