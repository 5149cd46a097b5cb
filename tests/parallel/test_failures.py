"""Errors are what a caller who has never heard of Samovar would catch."""

from __future__ import annotations

import pickle

import pytest

from samovar.errors import SamovarError
from samovar.parallel import RankError, ShardingError, StrategyError


def test_kinds() -> None:
    assert issubclass(ShardingError, SamovarError)
    assert issubclass(ShardingError, RuntimeError)
    assert issubclass(StrategyError, ValueError)
    with pytest.raises(RuntimeError, match="rank 3 is gone") as caught:
        raise RankError(3, "rank 3 is gone")
    assert caught.value.rank == 3


def test_it_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(RankError(3, "rank 3 is gone")))
    assert (sent.rank, str(sent)) == (3, "rank 3 is gone")
