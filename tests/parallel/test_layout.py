"""Where tokens are, and how layouts are read from marks."""

from __future__ import annotations

import pytest
import torch

from samovar.core.errors import SettingError, ShardingError
from samovar.parallel.layout import Layout, Partition, Segment, read_layout, spread

SPLIT = Partition(7, 3)


def test_partitions() -> None:
    assert spread(7, 3) == (3, 2, 2)
    assert (SPLIT.tokens, SPLIT.rows) == ((3, 2, 2), (3, 2, 2))
    assert [SPLIT.start(rank) for rank in range(3)] == [0, 3, 5]
    assert (Partition(7, 3, True).tokens, Partition(7, 3, True).rows) == ((3, 3, 1), (3, 3, 3))


@pytest.mark.parametrize(("length", "padded"), [(5, False), (0, False), (4, True)])
def test_a_part_of_one_row_is_refused(length: int, padded: bool) -> None:
    with pytest.raises(SettingError, match=f"{length} tokens cannot be split over 3 ranks: each needs at least two"):
        Partition(length, 3, padded)
    assert Partition(1, 1).tokens == (1,)


def test_rows_of_a_layout() -> None:
    layout = Layout([Segment(2, None), Segment(3, Partition(8, 3, True)), Segment(1, None), Segment(2, SPLIT)])
    assert layout.is_sharded
    assert not Layout(layout[:1]).is_sharded
    assert (layout.rows, layout.length) == (2 + 3 + 1 + 2, 2 + 8 + 1 + 7)
    assert layout.replicated() == [range(2), range(5, 6)]
    assert layout.own(2) == [range(2, 4), range(6, 8)]
    assert layout.token_counts(3) == (6, 5, 4)
    positions = layout.positions(3, torch.device("cpu")).tolist()
    assert sorted(positions) == list(range(18))
    assert positions[:3] == [0, 1, 10], "what every rank has comes first"
    assert positions[3:9] == [2, 3, 4, 11, 12, 13], "then the tokens of rank 0"


def test_layouts_are_read_from_marks() -> None:
    marks = {
        SPLIT: torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1]).bool(),
        Partition(9, 3): torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0]).bool(),
    }
    assert read_layout(marks, 9, 1, "a query") == (
        Segment(2, None),
        Segment(2, SPLIT),
        Segment(3, Partition(9, 3)),
        Segment(2, SPLIT),
    )
    assert read_layout({}, 4, 0, "a query") == (Segment(4, None),)


@pytest.mark.parametrize("marks", [[1, 0, 1], [0, 0, 1], [1, 1, 1]])
def test_tokens_that_were_moved_or_mixed_are_refused(marks: list[int]) -> None:
    with pytest.raises(ShardingError, match="a query holds only some of the 2 tokens"):
        read_layout({SPLIT: torch.tensor(marks).bool()}, 3, 1, "a query")
