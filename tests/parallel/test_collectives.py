"""Exchanges arrive and are counted; ranks agree on whether outputs differ."""

from __future__ import annotations

import pytest
import torch

from samovar.parallel import SequenceParallelConfig, make_mesh
from samovar.parallel.collectives import Group, Traffic
from samovar.parallel.layout import spread

from .conftest import OnRanks


def exchanges() -> int:
    """Every kind of exchange, checked on each rank, which it returns."""
    mesh = make_mesh(SequenceParallelConfig(ulysses_degree=2))
    group, traffic = mesh.sequence, mesh.traffic
    here, other = group.index, 1 - group.index
    counts = spread(5, 2)
    whole = torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    ids = torch.arange(5)

    traffic.reset()
    own = torch.split(whole, list(counts), dim=1)[here]
    parts = group.gather_rows([own, own.transpose(0, 2)[..., :1].transpose(0, 2)], counts, dim=1)
    assert torch.equal(torch.cat(parts[0], 1), whole)
    assert torch.equal(torch.cat(parts[1], 1), whole[:1])
    assert traffic.sent_bytes == {"all-gather": 4 * 3 * (2 * 3 + 3)}, "the shorter part is padded to the longer"

    flags = torch.split(ids > 2, list(counts))[here]
    gathered = torch.cat(group.gather_rows([flags], counts, dim=0)[0])
    assert gathered.dtype == torch.bool
    assert torch.equal(gathered, ids > 2)

    traffic.reset()
    parts = [[torch.full((rank + 1,), float(here))] for rank in range(2)]
    arrived = group.all_to_all(parts, [[(here + 1,)]] * 2)
    assert [part.tolist() for (part,) in arrived] == [[0.0] * (here + 1), [1.0] * (here + 1)]
    assert traffic.sent_bytes == {"all-to-all": 4 * (other + 1)}

    wait = group.pass_on(torch.full((here + 1,), float(here)), other + 1)
    assert wait().tolist() == [float(other)] * (other + 1)

    assert group.sum(torch.tensor([1.0])).item() == 2
    assert group.max(float(here), ids) == 1
    assert group.max(float("nan") if here else 0.0, ids) == float("inf")
    assert group.broadcast(torch.tensor([here == 1]), source=1).tolist() == [True]
    assert traffic.calls == {"all-to-all": 1, "ring": 1, "all-reduce": 3} | ({"broadcast": 1} if here else {})
    return here


def test_exchanges(on_ranks: OnRanks) -> None:
    assert on_ranks(2, exchanges) == [0, 1]


def test_differences_that_rounding_does_not_explain() -> None:
    alone, one = Group((0,), 0, None, Traffic()), torch.ones(4)
    assert alone.difference([one + 1e-6], [one]) == 0
    assert alone.difference([one * 1.1], [one]) == pytest.approx(0.1)
    assert alone.difference([one.bfloat16() * 1.02], [one.bfloat16()]) == 0
    for other in ([one * float("nan")], [torch.ones(3)], [one, one]):
        assert alone.difference(other, [one]) == float("inf")
