"""Where tokens are, and how layouts are read from marks."""

from __future__ import annotations

import pytest
import torch

from samovar.core.errors import SettingError, ShardingError
from samovar.parallel.layout import Layout, Partition, Segment, read_layout, spread

SPLIT = Partition(7, 3)


def test_partitions() -> None:
    assert spread(7, 3) == (3, 2, 2)
    assert SPLIT.tokens == (3, 2, 2)
    assert [SPLIT.start(rank) for rank in range(3)] == [0, 3, 5]


@pytest.mark.parametrize("length", [5, 0])
def test_a_part_of_one_row_is_refused(length: int) -> None:
    with pytest.raises(SettingError, match=f"{length} tokens cannot be split over 3 ranks: each needs at least two"):
        Partition(length, 3)
    assert Partition(1, 1).tokens == (1,)


def test_rows_of_a_layout() -> None:
    layout = Layout([Segment(2, None), Segment(2, Partition(8, 3)), Segment(1, None), Segment(2, SPLIT)])
    cpu = torch.device("cpu")
    assert layout.is_sharded
    assert not Layout(layout[:1]).is_sharded
    assert (layout.rows, layout.length, layout.num_replicated) == (2 + 2 + 1 + 2, 2 + 8 + 1 + 7, 3)
    assert layout.counts(3) == (6, 5, 4)
    local, order = layout.local_order(cpu), layout.order(3, cpu)
    assert local is not None
    assert local.tolist() == [0, 1, 4, 2, 3, 5, 6]
    assert order is not None
    assert sorted(order.tolist()) == list(range(18))
    assert order[:3].tolist() == [0, 1, 10], "what every rank has comes first"
    assert order[3:9].tolist() == [2, 3, 4, 11, 12, 13], "then the tokens of rank 0"
    in_order = Layout([Segment(2, None), Segment(2, Partition(8, 3))])
    assert in_order.local_order(cpu) is in_order.order(3, cpu) is None


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
