"""Tensors made of numbers are made once, and nobody else's calls are touched."""

from __future__ import annotations

import torch

from samovar.graphs.constants import Constants

CPU = torch.device("cpu")


def test_the_same_numbers_are_copied_from_the_first() -> None:
    constants = Constants(CPU)
    with constants:
        one, other = torch.tensor([1, 2]), torch.tensor([1, 2])
        assert torch.tensor([1.0, 2.0]).dtype == torch.float32
        assert torch.tensor([1, 2], dtype=torch.float64).dtype == torch.float64
        assert one.new_tensor(3).item() == torch.as_tensor(3).item() == 3
    assert len(constants) == 5
    one.fill_(7)
    assert other.tolist() == [1, 2], "each call has its own"
    with constants:
        assert torch.tensor([1, 2]).tolist() == [1, 2]


def test_other_calls_are_what_they_are() -> None:
    constants, given = Constants(CPU), torch.ones(2)
    with constants:
        assert torch.as_tensor(given) is given
        assert torch.tensor([given[0], given[1]]).tolist() == [1.0, 1.0]
        assert torch.zeros(2).tolist() == [0.0, 0.0]
        assert torch.tensor(1.0, device="meta").is_meta, "not on this device"
    assert len(constants) == 0
