"""Which rank holds which rows of a tensor? Some tokens are on every rank, others are spread over the ranks.

Where tokens are follows from the length of the whole sequence and the number of ranks, so ranks never exchange sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

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
    is_padded: bool = False
    """Whether all parts have the same number of rows; the last rows of the last parts are then not tokens."""

    def __post_init__(self) -> None:
        # The model, and we, would take a part of one row for a value that applies to all rows.
        if self.size > 1 and (min(self.rows) < 2 or not min(self.tokens)):
            raise SettingError(
                f"A sequence of {self.length} tokens cannot be split over {self.size} ranks: each needs at least two. "
                f"Use a degree of at most {max(self.length // 2, 1)}, or do not split this sequence."
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """Number of tokens on each rank."""
        if not self.is_padded:
            return spread(self.length, self.size)
        most = -(-self.length // self.size)
        return tuple(min(max(self.length - rank * most, 0), most) for rank in range(self.size))

    @property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each rank's tensor."""
        return (max(self.tokens),) * self.size if self.is_padded else self.tokens

    def start(self, rank: int) -> int:
        """Where the tokens of a rank begin."""
        return sum(self.tokens[:rank])


class Segment(NamedTuple):
    """Consecutive rows of a rank's tensor."""

    rows: int
    partition: Partition | None
    """None for rows that are the same on every rank."""

    @property
    def length(self) -> int:
        """Number of rows on one rank alone."""
        return self.rows if self.partition is None else self.partition.length


class Layout(tuple[Segment, ...]):
    """The segments of a rank's tensor, in their order."""

    @property
    def rows(self) -> int:
        """Number of rows on this rank."""
        return sum(segment.rows for segment in self)

    @property
    def length(self) -> int:
        """Number of rows of the whole tensor."""
        return sum(segment.length for segment in self)

    @property
    def is_sharded(self) -> bool:
        return any(segment.partition is not None for segment in self)

    @property
    def is_in_order(self) -> bool:
        """Whether `positions` are those of the whole tensor, one after the other."""
        return len(self) == 1

    def replicated(self) -> list[range]:
        """The runs of rows that are the same on every rank."""
        return [range(start, start + segment.rows) for segment, start, _ in self._placed() if segment.partition is None]

    def own(self, rank: int) -> list[range]:
        """The runs of rows that are this rank's tokens, without padding."""
        return [range(start, start + part.tokens[rank]) for (_, part), start, _ in self._placed() if part is not None]

    def token_counts(self, size: int) -> tuple[int, ...]:
        """Number of tokens each rank has of the sharded sequences."""
        partitions = [segment.partition for segment in self if segment.partition is not None]
        return tuple(sum(partition.tokens[rank] for partition in partitions) for rank in range(size))

    @functools.lru_cache(maxsize=64)  # noqa: B019 - the same few layouts at each block and each step.
    def positions(self, size: int, device: torch.device) -> torch.Tensor:
        """Position in the whole tensor of the replicated rows, then of the tokens of rank 0, 1, and so on."""
        runs = [(start, segment.rows) for segment, _, start in self._placed() if segment.partition is None]
        for rank in range(size):
            for (_, part), _, start in self._placed():
                if part is not None:
                    runs.append((start + part.start(rank), part.tokens[rank]))
        return torch.tensor([row for start, count in runs for row in range(start, start + count)], device=device)

    def _placed(self) -> Iterator[tuple[Segment, int, int]]:
        """Each segment, with where it begins on this rank and in the whole tensor."""
        here = everywhere = 0
        for segment in self:
            yield segment, here, everywhere
            here, everywhere = here + segment.rows, everywhere + segment.length


def read_layout(marks: Mapping[Partition, torch.Tensor], rows: int, rank: int, what: str) -> Layout:
    """The layout of a tensor, from marks that say for each partition which rows hold its tokens."""
    segments: list[Segment] = []
    marked = {partition: mark.tolist() for partition, mark in marks.items()}
    owners = [next((partition for partition, mark in marked.items() if mark[row]), None) for row in range(rows)]
    for partition, run in groupby(owners):
        count = len(list(run))
        part = count if partition is None else partition.rows[rank]
        if partition is not None and count % part:
            raise ShardingError(
                f"{what} holds only some of the {part} tokens that this rank has of a sequence of {partition.length}. "
                "The model moves or mixes tokens where the plan has them split. Split later, or gather earlier."
            )
        segments += [Segment(part, partition)] * (count // part)
    return Layout(segments)
