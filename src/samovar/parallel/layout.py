"""Which rank holds which rows of a tensor: some tokens are on every rank, others are spread over the ranks.

Where tokens are follows from the length of the whole sequence and the number of ranks, so ranks never exchange sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.errors import SettingError, ShardingError


def spread(count: int, size: int) -> tuple[int, ...]:
    """How many items each rank gets, as evenly as possible, the first ranks more."""
    least, more = divmod(count, size)
    return tuple(least + (rank < more) for rank in range(size))


@dataclass(frozen=True)
class Partition:
    """How a sequence is spread over ranks: contiguous parts that differ by at most one token."""

    length: int
    size: int

    def __post_init__(self) -> None:
        # The model, and we, would take a part of one row for a value that applies to all rows.
        if self.size > 1 and self.length < 2 * self.size:
            raise SettingError(
                f"A sequence of {self.length} tokens cannot be split over {self.size} ranks: each needs at least two. "
                f"Use a degree of at most {max(self.length // 2, 1)}, or do not split this sequence."
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        return spread(self.length, self.size)

    @property
    def owners(self) -> list[int]:
        """The rank of each token."""
        return [rank for rank, count in enumerate(self.tokens) for _ in range(count)]


class Segment(NamedTuple):
    """Consecutive rows of a rank's tensor."""

    rows: int
    partition: Partition | None
    """None for rows that are the same on every rank."""


class Rows(NamedTuple):
    """How many rows of a tensor are where."""

    replicated: int
    """On every rank. They come first."""
    counts: tuple[int, ...]
    """The tokens of each rank."""

    def start(self, rank: int) -> int:
        """Where the tokens of a rank begin, when those of all are together."""
        return self.replicated + sum(self.counts[:rank])

    def merged(self, size: int) -> Rows:
        """The same for groups of this many ranks in place of single ones."""
        starts = range(0, len(self.counts), size)
        return Rows(self.replicated, tuple(sum(self.counts[start : start + size]) for start in starts))


class Layout(tuple[Segment, ...]):
    """The segments of a rank's tensor, in their order."""

    @property
    def rows(self) -> int:
        """Number of rows on this rank."""
        return sum(rows for rows, _ in self)

    @property
    def num_replicated(self) -> int:
        """Number of rows that are the same on every rank."""
        return sum(rows for rows, part in self if part is None)

    @property
    def length(self) -> int:
        """Number of rows of the whole tensor."""
        return self.num_replicated + sum(part.length for _, part in self if part is not None)

    @property
    def is_sharded(self) -> bool:
        return self.num_replicated < self.rows

    def over(self, size: int) -> Rows:
        """The rows of this many ranks."""
        counts = (sum(part.tokens[rank] for _, part in self if part is not None) for rank in range(size))
        return Rows(self.num_replicated, tuple(counts))

    def local(self, tensor: Tensor, dim: int) -> Tensor:
        """A tensor of this rank, the replicated rows first."""
        order = self.local_order(tensor.device)
        return tensor if order is None else tensor.index_select(dim, order)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the same few layouts at each block and each step.
    def local_order(self, device: torch.device) -> Tensor | None:
        """This rank's rows: the replicated ones, then its tokens. None if that is the order in which they are."""
        return _sorted([int(part is not None) for rows, part in self for _ in range(rows)], device)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def order(self, device: torch.device) -> Tensor | None:
        """The rows of the whole tensor: the replicated ones, then the tokens of rank 0, 1, and so on. None if that is
        the order in which they are."""
        owners = ([-1] * rows if part is None else part.owners for rows, part in self)
        return _sorted(list(chain.from_iterable(owners)), device)


def _sorted(owners: list[int], device: torch.device) -> Tensor | None:
    """The rows in the order of their owners; None if they are."""
    rows = sorted(range(len(owners)), key=owners.__getitem__)
    return None if rows == list(range(len(rows))) else torch.tensor(rows, device=device)


def read_layout(marks: Mapping[Partition, Tensor], rows: int, rank: int, what: str) -> Layout:
    """The layout of a tensor, from marks that say for each partition which rows hold its tokens."""
    segments: list[Segment] = []
    marked = {partition: mark.tolist() for partition, mark in marks.items()}
    owners = [next((partition for partition, mark in marked.items() if mark[row]), None) for row in range(rows)]
    for partition, run in groupby(owners):
        count = len(list(run))
        part = count if partition is None else partition.tokens[rank]
        if partition is not None and count % part:
            raise ShardingError(
                f"{what} holds only some of the {part} tokens that this rank has of a sequence of {partition.length}. "
                "The model moves or mixes tokens where the plan has them split. Split later, or gather earlier."
            )
        segments += [Segment(part, partition)] * (count // part)
    return Layout(segments)
