"""Gathered keys and values compute every attention there is."""

from __future__ import annotations

from . import attentions
from .conftest import OnRanks


def test_every_attention(on_ranks: OnRanks) -> None:
    for found in on_ranks(2, attentions.errors, {"allgather_degree": 2}, (8, 11), ((4, 4), (3, 3), (4, 2))):
        assert len(found) > 280
        assert all(isinstance(apart, float) for apart in found.values()), "nothing is refused"
        assert max(found.values()) <= 1e-5, max(found, key=lambda name: found[name])
