"""What was done is told in a line."""

from __future__ import annotations

from samovar.offload import OffloadStats
from samovar.offload.stats import TimeStats


def test_layers_that_are_computed_ahead_are_told_of_where_there_are_any() -> None:
    stats = OffloadStats(sent_bytes=2**30)
    assert "time alone" not in str(stats)
    stats.ahead["transformer"] = TimeStats(
        layers=76, num_bytes=6 * 2**30, computed_steps=28, found_forwards=27, live_calls=3
    )
    assert str(stats).endswith(
        "; transformer: 76 layers (6.00 GiB) that see time alone: 28 steps computed ahead, 27 forwards found theirs, 3 "
        "calls computed on the spot"
    )
