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
from .capture import attention_through, capturing
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

    def next_attention(self) -> str:
        """The attention that runs now, in words that name no other of this forward."""
        block = self.open_blocks[-1]
        number = self.counts[block] = self.counts.get(block, -1) + 1
        return f"attention {number} of {block or 'the model'!r}"


@dataclass
class Rehearsal(Forward):
    """One pass of a rehearsal."""

    target: Partition | None = None
    """The sequence whose tokens are marked; None marks those of all."""
    partitions: list[Partition] = field(default_factory=list)
    """The sequences that were split."""
    marked: dict[str, Tensor] = field(default_factory=dict)
    """The marked rows of queries, keys, and what was gathered."""
    gathered_lengths: dict[str, int] = field(default_factory=dict)

    def note(self, key: str, tensor: Tensor, dim: int) -> Tensor:
        """The rows of a tensor that are marked."""
        rows = tensor.isnan().movedim(dim, 0).flatten(1).any(1)
        if not torch.equal(self.marked.setdefault(key, rows), rows):
            raise ShardingError(f"{key}: not the same tokens at each call of one forward.")
        return rows


class Region:
    """Splits, gathers and attends during the forwards of one model."""

    def __init__(self, group: Group, strategy: Strategy) -> None:
        self.group = group
        self.forward: Forward | None = None
        """None while the model does not run, or runs unsharded."""
        self.shares_attention = False
        """Whether ranks share the work of attentions whose tokens are not split."""
        self._strategy = strategy

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
        forward, length = self.forward, tensor.shape[dim] - abs(kept)
        assert forward is not None
        forward.num_split += 1
        partition = Partition(length, self.group.size)
        before, whole, after = tensor.split_with_sizes([max(kept, 0), length, max(-kept, 0)], dim)
        tokens = whole.split_with_sizes(partition.tokens, dim)[self.group.index]
        if isinstance(forward, Rehearsal) and (tokens.is_floating_point() or tokens.is_complex()):
            if partition not in forward.partitions:
                forward.partitions.append(partition)
            if forward.target in (None, partition):
                tokens = torch.full_like(tokens, math.nan)
        return torch.cat([before, tokens, after], dim) if kept else tokens.contiguous()

    def gather(self, tensor: Tensor, dim: int, key: str) -> Tensor:
        """The whole of a tensor of which each rank has a part along a dimension."""
        if isinstance(self.forward, Rehearsal):
            marked, lengths = self.forward.note(key, tensor, dim), self.forward.gathered_lengths
            if key not in lengths:
                lengths[key] = self._gathered_length(marked, self.forward.partitions)
            shape = list(tensor.shape)
            shape[dim] = lengths[key]
            return tensor.new_zeros(shape)
        layout = self._layout(key, tensor.shape[dim])
        if not layout.is_sharded:
            return tensor
        whole, order = of_all_ranks(tensor, dim, layout, self.group), layout.order(tensor.device)
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

    def _attend(self, call: AttentionCall) -> Any:
        forward = self.forward
        assert forward is not None
        if call.rare:
            if isinstance(forward, Rehearsal) and bool(call.query.isnan().any() or call.key.isnan().any()):
                raise ShardingError(
                    f"The plan splits the tokens of {call.rare}: ranks cannot share that. Do not split them, or use "
                    "torch's scaled dot product attention."
                )
            forward.rare = call.rare
            with attention_through(None):
                return call.run_here()
        where = forward.next_attention()
        tensors = {f"Queries of {where}": call.query, f"Keys of {where}": call.key}
        shares = self.shares_attention and call.query.shape[-2] >= 2 * self.group.size and not call.dropout_p
        forward.needs_mode |= call.is_direct
        if isinstance(forward, Rehearsal):
            marked, marked_keys = (forward.note(key, tensor, -2) for key, tensor in tensors.items())
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

    # ---------------------------------------------------------------------------------------- rehearsal

    def rehearse(self, run: Callable[[], Any]) -> Forward:
        """Run this rank's part alone and see where its tokens go; the forward, with its trace."""

        def passed(rehearsal: Rehearsal) -> Rehearsal:
            with self.running(rehearsal):
                run()
            return rehearsal

        first = passed(Rehearsal())
        marked = dict.fromkeys(first.partitions, first.marked)
        if len(marked) > 1:  # To tell the sequences apart.
            lengths = first.gathered_lengths
            marked = {each: passed(Rehearsal(target=each, gathered_lengths=lengths)).marked for each in marked}
        first.trace = Trace(needs_mode=first.needs_mode)
        for key, rows in first.marked.items():
            marks = {partition: by_key[key] for partition, by_key in marked.items()}
            first.trace.layouts[key] = read_layout(marks, len(rows), self.group.index, key)
        return first

    def _gathered_length(self, marked: Tensor, partitions: Sequence[Partition]) -> int:
        """The length of the whole, from marks that do not tell sequences apart."""
        by_rows = {partition.tokens[self.group.index]: partition.length for partition in partitions}
        count, are_alike = int(marked.sum()), len(by_rows) < len(partitions)
        by_rows[sum(by_rows)] = sum(by_rows.values())
        length = next((count // rows * length for rows, length in by_rows.items() if rows and count % rows == 0), 0)
        if not length or are_alike:
            raise ShardingError(
                f"The plan gathers {count} split rows of rank {self.group.index}, and splits sequences of "
                f"{', '.join(str(partition.length) for partition in partitions)} tokens, which is no sequence with "
                "that many there, or several. Correct the plan."
            )
        return len(marked) - count + length
