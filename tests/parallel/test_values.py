"""How far two outputs are apart."""

from __future__ import annotations

import pytest
import torch

from samovar.parallel.failures import ShardingError
from samovar.parallel.values import difference, is_close, most_different


def test_differences() -> None:
    one = torch.ones(4)
    assert difference([one], [one]) == 0
    assert difference([one * 1.1], [one]) == pytest.approx(0.1)
    assert difference([one * float("nan")], [one]) == float("inf")
    with pytest.raises(ShardingError, match=r"shape \(3,\) and not \(4,\)"):
        difference([torch.ones(3)], [one])
    assert is_close([one + 1e-6], [one])
    assert not is_close([one + 1e-2], [one])
    assert not is_close([torch.ones(3)], [one])
    assert not is_close([one, one], [one])
    assert most_different([one.bfloat16()]) > most_different([one])
