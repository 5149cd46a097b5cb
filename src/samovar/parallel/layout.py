"""Which rows of a tensor are whose? Tokens that every rank has, and tokens that are spread over the ranks.

Where a tensor's tokens lie follows from the length of the whole sequence and the number of ranks, so ranks
never tell each other sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from ..errors import SettingError
from .failures import ShardingError


def spread(count: int, size: int) -> tuple[int, ...]:
    """How many of some things each rank gets, as evenly as can be, the first ranks more."""
    least, more = divmod(count, size)
    return tuple(least + (rank < more) for rank in range(size))


@dataclass(frozen=True)
class Partition:
    """How a sequence lies over ranks: contiguous parts that differ by one token at most."""

    length: int
    size: int
    is_padded: bool = False
    """All parts have the same number of rows; the last rows of the last ones are no tokens."""

    def __post_init__(self) -> None:
        # A part of one row would be taken, by the model and by us, for a value that holds for all rows.
        if self.size > 1 and (min(self.rows) < 2 or not min(self.tokens)):
            raise SettingError(
                f"A sequence of {self.length} tokens cannot be split over {self.size} ranks: each needs two at least. "
                f"Use a degree of at most {max(self.length // 2, 1)}, or leave this sequence whole."
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        if self.is_padded:
            return tuple(min(max(self.length - rank * self.padded, 0), self.padded) for rank in range(self.size))
        return spread(self.length, self.size)

    @property
    def padded(self) -> int:
        return -(-self.length // self.size)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each rank's tensor has."""
        return (self.padded,) * self.size if self.is_padded else self.tokens

    def start(self, rank: int) -> int:
        """Where the tokens of a rank begin."""
        return sum(self.tokens[:rank])


class Segment(NamedTuple):
    """A run of rows of a rank's tensor."""

    rows: int
    partition: Partition | None
    """None for rows that are the same on every rank."""


Layout = tuple[Segment, ...]


def is_sharded(layout: Layout) -> bool:
    return any(segment.partition is not None for segment in layout)


def global_length(layout: Layout) -> int:
    """How long the tensor would be on one rank."""
    return sum(segment.rows if segment.partition is None else segment.partition.length for segment in layout)


def replicated_rows(layout: Layout) -> list[range]:
    """The runs of rows that are the same on every rank."""
    return [rows for segment, rows in _placed(layout) if segment.partition is None]


def own_rows(layout: Layout, rank: int) -> list[range]:
    """The runs of rows that are this rank's tokens; rows of padding are left out."""
    return [
        range(rows.start, rows.start + segment.partition.tokens[rank])
        for segment, rows in _placed(layout)
        if segment.partition is not None
    ]


def token_counts(layout: Layout, size: int) -> tuple[int, ...]:
    """How many tokens each rank has of the sharded sequences."""
    partitions = [segment.partition for segment in layout if segment.partition is not None]
    return tuple(sum(partition.tokens[rank] for partition in partitions) for rank in range(size))


def global_positions(layout: Layout, size: int) -> list[int]:
    """Where the rows stand in the whole tensor: the replicated ones, then the tokens of rank 0, 1, and so on."""
    lengths = [segment.rows if segment.partition is None else segment.partition.length for segment in layout]
    starts = [0, *accumulate(lengths)]
    placed = list(zip(layout, starts, strict=False))
    positions = [start + row for segment, start in placed if segment.partition is None for row in range(segment.rows)]
    for rank in range(size):
        for segment, start in placed:
            if segment.partition is not None:
                first = start + segment.partition.start(rank)
                positions.extend(range(first, first + segment.partition.tokens[rank]))
    return positions


def read_layout(marks: Mapping[Partition, torch.Tensor], rows: int, rank: int, what: str) -> Layout:
    """The layout of a tensor from marks that say, for each partition, which rows hold tokens of it."""
    segments: list[Segment] = []
    marked = {partition: mark.tolist() for partition, mark in marks.items()}
    row = 0
    while row < rows:
        partition = next((p for p, mark in marked.items() if mark[row]), None)
        if partition is None:
            if segments and segments[-1].partition is None:
                segments[-1] = Segment(segments[-1].rows + 1, None)
            else:
                segments.append(Segment(1, None))
            row += 1
            continue
        count = partition.rows[rank]
        if not all(marked[partition][row : row + count]) or row + count > rows:
            raise ShardingError(
                f"{what} holds only some of the {count} tokens that this rank has of a sequence of {partition.length}. "
                "The model moves or mixes tokens where the plan has them split. Split later, or gather earlier."
            )
        segments.append(Segment(count, partition))
        row += count
    return tuple(segments)


def resolved(layout: Layout, rows: int) -> Layout | None:
    """The layout for another number of replicated rows; None where it is not clear which of them are meant."""
    if sum(segment.rows for segment in layout) == rows:
        return layout
    replicated = [place for place, segment in enumerate(layout) if segment.partition is None]
    sharded = sum(segment.rows for segment in layout if segment.partition is not None)
    if len(replicated) != 1 or rows < sharded:
        return None
    return tuple(Segment(rows - sharded, None) if place in replicated else s for place, s in enumerate(layout))


def _placed(layout: Layout) -> Iterator[tuple[Segment, range]]:
    start = 0
    for segment in layout:
        yield segment, range(start, start + segment.rows)
        start += segment.rows
