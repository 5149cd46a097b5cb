"""What happens while a sharded model's forward runs.

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
from torch import Tensor

from ..core.errors import ShardingError
from ..hooks.handle import for_now
from .attention import AttentionCall, Strategy, compute_sharded, of_all_ranks, share_queries
from .capture import RareCall, attention_through, capturing
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
    num_split: int = 0
    """Tensors that were split."""
    num_parallel: int = 0
    """Attentions that ran on several ranks."""
    rare: str = ""
    """What every rank ran with all tokens, because ranks cannot share it."""
    needs_mode: bool = False

    @property
    def is_parallel(self) -> bool:
        """Whether ranks shared work, and every token saw those that it must see."""
        return bool(self.num_parallel or (self.rare and self.num_split))


@dataclass
class _Marks:
    """Which rows were marked, in each pass of a rehearsal."""

    target: Partition | None = None
    """The sequence whose tokens are marked; None marks those of all."""
    partitions: list[Partition] = field(default_factory=list)
    seen: dict[str, dict[Partition | None, Tensor]] = field(default_factory=dict)
    gathered_lengths: dict[str, int] = field(default_factory=dict)

    def note(self, key: str, tensor: Tensor, dim: int) -> Tensor:
        """The rows of a tensor that are marked."""
        marked = tensor.isnan().movedim(dim, 0).flatten(1).any(1)
        if not torch.equal(self.seen.setdefault(key, {}).setdefault(self.target, marked), marked):
            raise ShardingError(f"{key}: not the same tokens at each call of one forward.")
        return marked


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

    def split(self, tensor: Tensor, dim: int, kept: int = 0) -> Tensor:
        """This rank's part of a tensor along a dimension; the first `kept` rows stay (or the last, if negative)."""
        assert self.forward is not None
        self.forward.num_split += 1
        index, rows, before = self.group.index, tensor.shape[dim], max(kept, 0)
        partition = Partition(rows - abs(kept), self.group.size)
        tokens = tensor.narrow(dim, before + partition.start(index), partition.tokens[index])
        if self._marks is not None and (tokens.is_floating_point() or tokens.is_complex()):
            if partition not in self._marks.partitions:
                self._marks.partitions.append(partition)
            if self._marks.target in (None, partition):
                tokens = torch.full_like(tokens, math.nan)
        if not kept:
            return tokens.contiguous()
        after = rows - partition.length - before
        return torch.cat([tensor.narrow(dim, 0, before), tokens, tensor.narrow(dim, rows - after, after)], dim)

    def gather(self, tensor: Tensor, dim: int, key: str) -> Tensor:
        """The whole of a tensor of which each rank has a part along a dimension."""
        if self._marks is not None:
            marked, lengths = self._marks.note(key, tensor, dim), self._marks.gathered_lengths
            if key not in lengths:
                lengths[key] = self._gathered_length(marked, self._marks.partitions)
            shape = list(tensor.shape)
            shape[dim] = lengths[key]
            return tensor.new_zeros(shape)
        layout = self._layout(key, tensor.shape[dim])
        if not layout.is_sharded:
            return tensor
        whole, order = of_all_ranks(tensor, dim, layout, self.group), layout.order(self.group.size, tensor.device)
        return whole if order is None else whole.index_select(dim, order.argsort())

    def _layout(self, key: str, rows: int) -> Layout:
        assert self.forward is not None
        layout = self.forward.trace.layouts.get(key)
        if layout is None or layout.rows != rows:
            raise ShardingError(
                f"{key}: {rows} rows, but the rehearsal of this forward had {layout and layout.rows}. The model "
                "does not always do the same with inputs of these shapes."
            )
        return layout

    def _attend(self, call: AttentionCall | RareCall) -> Any:
        forward = self.forward
        assert forward is not None
        if isinstance(call, RareCall):
            return self._run_rare(call, forward)
        block = forward.open_blocks[-1]
        number = forward.counts[block] = forward.counts.get(block, -1) + 1
        where = f"attention {number} of {block or 'the model'!r}"
        tensors = {f"Queries of {where}": call.query, f"Keys of {where}": call.key}
        shares = self.shares_attention and call.query.shape[-2] >= 2 * self.group.size and not call.dropout_p
        forward.needs_mode |= call.is_direct
        if self._marks is not None:
            marked, marked_keys = (self._marks.note(key, tensor, -2) for key, tensor in tensors.items())
            forward.num_parallel += shares or bool(marked.any() or marked_keys.any())
            output = call.value.new_zeros(*call.query.shape[:-1], call.value.shape[-1])
            output[..., marked, :] = math.nan
            return output
        queries, keys = (self._layout(key, tensor.shape[-2]) for key, tensor in tensors.items())
        is_split = queries.is_sharded or keys.is_sharded
        forward.num_parallel += shares or is_split
        with attention_through(None):
            if is_split:
                return compute_sharded(call, queries, keys, self.group, self._strategy)
            return share_queries(call, self.group, self._strategy) if shares else call.run_here()

    def _run_rare(self, call: RareCall, forward: Forward) -> Any:
        if self._marks is not None and bool(call.query.isnan().any() or call.key.isnan().any()):
            raise ShardingError(
                f"The plan splits the tokens of {call.name}: ranks cannot share that. Do not split them, or use "
                "torch's scaled dot product attention."
            )
        forward.rare = call.name
        with attention_through(None):
            return call.run_here()

    # ---------------------------------------------------------------------------------------- rehearsal

    def rehearse(self, run: Callable[[], Any]) -> Forward:
        """Run this rank's part alone and see where its tokens go; the forward, with its trace."""
        marks, forward = _Marks(), Forward()
        with for_now(self, _marks=marks):
            with self.running(forward):
                run()
            partitions = tuple(marks.partitions)
            for marks.target in partitions if len(partitions) > 1 else ():  # To tell the sequences apart.
                with self.running(Forward()):
                    run()
        forward.trace = Trace(needs_mode=forward.needs_mode)
        for key, seen in marks.seen.items():
            marked = dict.fromkeys(partitions, seen[None]) if len(partitions) == 1 else seen
            by_partition = {partition: mark for partition, mark in marked.items() if partition is not None}
            forward.trace.layouts[key] = read_layout(by_partition, len(seen[None]), self.group.index, key)
        return forward

    def _gathered_length(self, marked: Tensor, partitions: Sequence[Partition]) -> int:
        """The length of the whole, from marks that do not tell sequences apart."""
        lengths = [partition.length for partition in partitions]
        by_rows = {partition.tokens[self.group.index]: partition for partition in partitions}
        if len(by_rows) < len(partitions):
            raise ShardingError(
                f"Sequences of {', '.join(map(str, lengths))} tokens have the same "
                f"length on rank {self.group.index}, so they cannot be told apart when gathered. Split one of them."
            )
        count = int(marked.sum())
        alone = (count // rows * partition.length for rows, partition in by_rows.items() if count % rows == 0)
        together = sum(lengths) if count == sum(by_rows) else 0
        length = next(alone, together)
        if not length:
            raise ShardingError(
                f"The plan gathers {count} split rows, but splits no sequence with that many on this rank. Correct the "
                "plan."
            )
        return len(marked) - count + length
