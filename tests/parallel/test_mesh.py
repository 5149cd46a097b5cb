"""Degrees, groups, and one decision for all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from samovar.core.errors import SettingError
from samovar.parallel import SequenceParallelConfig, agreement, make_mesh

from .conftest import OnRanks


def test_sizes_and_strategies() -> None:
    def of(**degrees: int) -> tuple[int, str]:
        config = SequenceParallelConfig(**degrees)
        return config.sequence_parallel_size, config.strategy

    assert SequenceParallelConfig().sequence_parallel_size == 1
    assert SequenceParallelConfig().convert_to_fp32
    assert of(ulysses_degree=2) == (2, "ulysses")
    assert of(ring_degree=3) == (3, "ring")
    assert of(ulysses_degree=2, ring_degree=3) == (6, "hybrid")
    assert of(allgather_degree=4) == (4, "gathered")
    assert SequenceParallelConfig(ulysses_degree=2, ring_degree=3, cfg_parallel_size=2).num_ranks == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ulysses_degree": 0}, "ulysses_degree=0; expected a number of ranks, 1 or more"),
        ({"allgather_degree": 2, "ulysses_degree": 2}, "allgather_degree=2 cannot be combined with ulysses_degree=2"),
    ],
)
def test_invalid_degrees(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        SequenceParallelConfig(**settings)
    assert caught.value.param == next(iter(settings))


def test_degrees_of_a_strategy() -> None:
    of = SequenceParallelConfig.of_strategy
    assert of("auto", 4, num_heads=5) == SequenceParallelConfig(ulysses_degree=4)
    assert of("auto", 4, num_heads=3) == SequenceParallelConfig(allgather_degree=4)
    assert of("hybrid", 4) == SequenceParallelConfig(ulysses_degree=2, ring_degree=2)
    assert of("ring", 3) == SequenceParallelConfig(ring_degree=3)
    with pytest.raises(SettingError, match="Did you mean 'ulysses'"):
        of("ulises", 2)
    with pytest.raises(SettingError, match="even number of ranks, 4 or more; not 3"):
        of("hybrid", 3)


def test_one_rank_needs_no_world() -> None:
    mesh = make_mesh(SequenceParallelConfig())
    assert mesh.size == 1
    figures = torch.tensor([1.0, 2.0])
    assert agreement(mesh)(figures) is figures


def test_degrees_that_do_not_fit_the_world() -> None:
    with pytest.raises(
        SettingError, match=r"need 4 ranks \(cfg 2 x ring 1 x ulysses 2.*but 1 is running. Start.*torchrun"
    ):
        make_mesh(SequenceParallelConfig(ulysses_degree=2, cfg_parallel_size=2))


def groups(settings: dict[str, int]) -> dict[str, Any]:
    mesh = make_mesh(SequenceParallelConfig(**settings))
    assert make_mesh(SequenceParallelConfig(**settings)) is mesh, "groups are made once"
    figures = torch.tensor([float(dist.get_rank()), 1.0])
    return {
        **{name: getattr(mesh, name).ranks for name in ("cfg", "sequence", "ring", "ulysses")},
        "agreed": agreement(mesh)(figures).tolist(),
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
