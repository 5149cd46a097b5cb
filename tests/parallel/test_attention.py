"""The part of a sharded attention that all strategies share, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from samovar.core.errors import ShardingError, StrategyError
from samovar.parallel.attention import AttentionCall, compute_sharded
from samovar.parallel.collectives import Group, Traffic
from samovar.parallel.layout import Layout, Partition, Segment

ALONE = Group((0,), 0, None, Traffic())
ONE_OF_TWO = Group((0, 1), 0, None, Traffic())
"""For calls that are refused before anything is sent."""


def call(queries: int, keys: int, **settings: object) -> AttentionCall:
    return AttentionCall(torch.zeros(1, 2, queries, 4), *torch.zeros(2, 1, 2, keys, 4), **settings)  # type: ignore[arg-type]


def never(attention: object) -> torch.Tensor:
    raise AssertionError("it should have been refused")


def test_three_and_five_dimensions() -> None:
    for shape in ((3, 6, 4), (2, 3, 2, 6, 4)):
        tensors = [torch.randn(shape) for _ in range(3)]
        mask = torch.rand(6, 6) > 0.2
        mask[:, 0] = True
        made = AttentionCall(*tensors, mask)
        whole = Layout([Segment(6, None)])
        out = compute_sharded(made, whole, whole, ALONE, lambda a: a.attend(a.key, a.value, a.mask))
        torch.testing.assert_close(out, made.run_here())


def test_dropout_is_refused() -> None:
    half = Layout([Segment(4, Partition(8, 2))])
    with pytest.raises(StrategyError, match=r"dropout_p=0\.1.*model\.eval"):
        compute_sharded(call(4, 4, dropout_p=0.1), half, half, ONE_OF_TWO, never)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(4, 4), "4 x 4 covers only the queries and keys of this rank"),
        (torch.zeros(3, 8), "has 3 rows; expected 4, the queries on this rank, or 8"),
        (torch.zeros(8, 5), "has 5 columns; expected 4, the keys on this rank, or 8"),
    ],
)
def test_an_ambiguous_mask_is_refused(mask: torch.Tensor, message: str) -> None:
    half = Layout([Segment(4, Partition(8, 2))])
    with pytest.raises(ShardingError, match=message):
        compute_sharded(call(4, 4, attn_mask=mask), half, half, ONE_OF_TWO, never)
