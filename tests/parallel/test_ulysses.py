"""Ulysses: every attention but one, by name; the bytes of the textbook."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.parallel import SequenceParallelConfig, make_mesh
from samovar.parallel.attention import AttentionCall, compute_sharded
from samovar.parallel.layout import Partition, Segment
from samovar.parallel.region import strategy_of

from . import attentions
from .conftest import OnRanks


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"ulysses_degree": 2}, ((4, 4), (3, 3), (4, 2), (5, 1))),
        ({"ulysses_degree": 2, "ring_degree": 2}, ((3, 3), (4, 2))),
        ({"ulysses_degree": 4}, ((5, 5), (8, 2), (3, 3))),
    ],
    ids=["2", "2 x ring 2", "4"],
)
def test_every_attention(settings: dict[str, int], heads: Any, on_ranks: OnRanks) -> None:
    size = settings["ulysses_degree"] * settings.get("ring_degree", 1)
    for found in on_ranks(size, attentions.errors, settings, (8 * size // 2, 6 * size - 1)[-1:], heads):
        for name, apart in found.items():
            if "3/3 heads" in name and settings["ulysses_degree"] == 4 and "to text" not in name:
                assert "needs as many heads, but this attention has 3. Use gathered" in apart, name
            elif "mask: queries of this rank" in name:
                assert "Ulysses needs the mask of all" in apart, name
                assert "Use gathered keys and values" in apart, name
            else:
                assert not isinstance(apart, str), f"{name}: {apart}"
                assert apart <= 1e-5, name


def sent_bytes(
    settings: dict[str, int], length: int, heads: int, width: int, text: int = 0
) -> tuple[int, int, dict[str, int]]:
    """What one attention of float32 sent from this rank, how many tokens it has, and the number of exchanges."""
    config = SequenceParallelConfig(**settings)
    mesh = make_mesh(config)
    partition = Partition(length, mesh.sequence.size)
    rows = partition.rows[mesh.sequence.index]
    layout = ((Segment(text, None),) if text else ()) + (Segment(rows, partition),)
    call = AttentionCall(*torch.randn(3, 1, heads, text + rows, width))
    mesh.traffic.reset()
    compute_sharded(call, layout, layout, mesh.sequence, strategy_of(config, mesh, or_gathered=False))
    return mesh.traffic.total_bytes, rows, dict(mesh.traffic.calls)


def test_bytes_are_those_of_the_textbook(on_ranks: OnRanks) -> None:
    """Of query, key and value a rank sends all but its own heads, of the output all but its own tokens; where all
    divides, that is 4 n/P h d (P - 1)/P numbers."""
    for length in (16, 18):
        for total, rows, calls in on_ranks(4, sent_bytes, {"ulysses_degree": 4}, length, 8, 4):
            assert total == 4 * (3 * rows * 6 * 4 + 2 * (length - rows) * 4)
            assert length == 18 or total == 4 * (4 * 4 * 8 * 4 * 3 // 4)
            assert calls == {"all-to-all": 2}, "no sizes are exchanged"


def test_replicated_rows_cost_their_output_alone(on_ranks: OnRanks) -> None:
    """Every rank has the text, so only its output is sent: this rank's heads of it, to each of the others."""
    for total, rows, calls in on_ranks(2, sent_bytes, {"ulysses_degree": 2}, 16, 4, 4, 5):
        assert total == 4 * (4 * rows * 4 * 4 // 2) + 4 * (5 * 4 * 4 // 2)
        assert calls == {"all-to-all": 2}
