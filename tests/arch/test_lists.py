"""Stacks in models whose layers are of kinds that torch does not know."""

from __future__ import annotations

import torch

from samovar.arch.lists import find_lists


class Packed(torch.nn.Module):
    """A linear map whose weights are packed, in a buffer."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("qweight", torch.zeros(in_features * out_features // 2, dtype=torch.uint8))


class Own(torch.nn.Module):
    """A linear map that says nothing of its widths."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.zeros(in_features, out_features))


class Scale(torch.nn.Module):
    """A norm of a library's own, of which torch knows nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1, width))


def model_of(linear: type[torch.nn.Module], widths: tuple[tuple[int, int], ...]) -> torch.nn.Module:
    def member() -> torch.nn.Module:
        return torch.nn.ModuleDict({"norm": Scale(8), **{f"map{i}": linear(*w) for i, w in enumerate(widths)}})

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = member()

    model = torch.nn.Module()
    model.members = torch.nn.ModuleList(Part() for _ in range(3))
    model.ballast = torch.nn.Linear(1000, 10)
    return model


def test_packed_layers_are_read_by_their_widths_and_unknown_ones_by_their_shapes() -> None:
    for linear in (torch.nn.Linear, Packed, Own):
        assert list(find_lists(model_of(linear, ((8, 24), (8, 8))))) == ["members"], linear
    for linear in (torch.nn.Linear, Packed):
        assert not find_lists(model_of(linear, ((8, 24), (8, 4)))), linear
