"""The totals of an offload, in one line."""

from __future__ import annotations

from samovar.offload import OffloadStats


def test_late_blocks_are_named_only_if_there_are_any() -> None:
    stats = OffloadStats(sent_bytes=2**30, block_loads=9, peak_held_bytes=2**20, setup_s=1.25)
    assert str(stats) == "1.00 GiB sent in 9 block loads; at most 1.00 MiB of weights on the device; 1.2 s to set up"
    stats.late_blocks = 2
    assert "9 block loads, 2 of them late;" in str(stats)
