"""Degrees, groups, exchanges, and one decision for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from samovar.core.errors import SettingError
from samovar.parallel import Agreement, SequenceParallelConfig, join_world, make_mesh
from samovar.parallel.collectives import Group

from .conftest import OnRanks


def test_degrees() -> None:
    for degrees, size, strategy in (
        ({}, 1, "ulysses"),
        ({"ring_degree": 3}, 3, "ring"),
        ({"ulysses_degree": 2, "ring_degree": 3}, 6, "hybrid"),
        ({"allgather_degree": 4}, 4, "gathered"),
    ):
        config = SequenceParallelConfig(**degrees, cfg_parallel_size=2)
        assert (config.sequence_parallel_size, config.num_ranks, config.strategy) == (size, 2 * size, strategy)
    with pytest.raises(SettingError, match="ulysses_degree=0; expected a number of ranks, 1 or more"):
        SequenceParallelConfig(ulysses_degree=0)
    with pytest.raises(SettingError, match="allgather_degree=2 cannot be combined with ulysses_degree=2"):
        SequenceParallelConfig(allgather_degree=2, ulysses_degree=2)


def test_degrees_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SequenceParallelConfig.from_name
    assert of("hybrid", 4) == SequenceParallelConfig(ulysses_degree=2, ring_degree=2)
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert of("ring") == SequenceParallelConfig(ring_degree=3)
    with pytest.raises(SettingError, match="Did you mean 'ulysses'"):
        of("ulises", 2)
    with pytest.raises(SettingError, match="there are 3; expected an even number of ranks, 4 or more"):
        of("hybrid")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match="of which there are 0; expected at least one"):
        of("ring")


def test_one_rank_needs_no_world() -> None:
    mesh = make_mesh(SequenceParallelConfig())
    figures = torch.tensor([1.0, 2.0])
    assert Agreement(mesh)(figures) is figures
    with pytest.raises(SettingError, match=r"need 4 ranks \(cfg 2 x ring 1 x ulysses 2.*but 1 is running. Start.*tor"):
        make_mesh(SequenceParallelConfig(ulysses_degree=2, cfg_parallel_size=2))
    with pytest.raises(SettingError, match="not started by torchrun"):
        join_world()


def groups(settings: dict[str, int]) -> dict[str, Any]:
    mesh = make_mesh(SequenceParallelConfig(**settings))
    assert make_mesh(SequenceParallelConfig(**settings)) is mesh, "groups are made once"
    figures = torch.tensor([float(dist.get_rank()), 1.0])
    return {
        **{name: getattr(mesh, name).ranks for name in ("cfg", "sequence", "ring", "ulysses")},
        "agreed": Agreement(mesh)(figures).tolist(),
    }


def test_groups_and_agreement(on_ranks: OnRanks) -> None:
    """Tokens are summed up; the branches follow the first one."""
    by_rank = on_ranks(4, groups, {"ulysses_degree": 2, "cfg_parallel_size": 2})
    assert [found["ulysses"] for found in by_rank] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [found["cfg"] for found in by_rank] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [found["agreed"] for found in by_rank] == [[1.0, 2.0]] * 4
    by_rank = on_ranks(4, groups, {"ulysses_degree": 2, "ring_degree": 2})
    assert [found["ring"] for found in by_rank] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [found["sequence"] for found in by_rank] == [(0, 1, 2, 3)] * 4
    assert [found["agreed"] for found in by_rank] == [[6.0, 4.0]] * 4


def exchanges() -> int:
    """Uneven parts, booleans, and figures of which some are no numbers."""
    group = make_mesh(SequenceParallelConfig(ulysses_degree=2)).sequence
    here, whole = group.index, torch.arange(2 * 5 * 3.0).reshape(2, 5, 3)
    for tensor in (whole, whole > 7):
        gathered = group.gather(tensor.split([3, 2], dim=1)[here], (3, 2), dim=1)
        assert torch.equal(gathered, tensor)
    assert group.broadcast(torch.tensor([here == 1]), source=1).tolist() == [True]
    assert group.max(float(here), whole) == 1
    assert group.max(float("nan") if here else 0.0, whole) == float("inf")
    assert group.difference([whole * (1 + 0.1 * here)], [whole]) == pytest.approx(0.1)
    return here


def test_exchanges(on_ranks: OnRanks) -> None:
    assert on_ranks(2, exchanges) == [0, 1]


def test_differences_that_rounding_does_not_explain() -> None:
    alone, one = Group((0,), 0, None), torch.ones(4)
    assert alone.difference([one + 1e-6], [one]) == 0
    assert alone.difference([one.bfloat16() * 1.02], [one.bfloat16()]) == 0
    for other in ([one * float("nan")], [torch.ones(3)], [one, one]):
        assert alone.difference(other, [one]) == float("inf")
