"""The flat layout and the optimiser."""

from __future__ import annotations

import torch

from training.flat import make_layout
from training.optim import Optimiser, orthogonalise

SHAPES = {"a.bias": (5,), "a.weight": (6, 8), "b.weight": (6, 8), "c.weight": (4, 6), "emb": (7, 3)}


def layout_of_shapes():
    return make_layout(SHAPES, lambda name, shape: name.endswith(".weight"))


def test_flat_layout_round_trip_and_gradient() -> None:
    layout = layout_of_shapes()
    weights = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    flat = layout.flatten(weights).requires_grad_()
    views = layout.views(flat)
    assert all(torch.equal(views[name], weights[name]) for name in SHAPES)
    sum((views[name] * weights[name]).sum() for name in SHAPES).backward()
    assert torch.equal(flat.grad, layout.flatten(weights))
    assert [shape for *_, shape in layout.groups()] == [(1, 4, 6), (2, 6, 8)]


def test_muon_orthogonalises() -> None:
    for shape in ((3, 16, 64), (2, 64, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.3
        assert values.max() < 1.4


def test_optimiser_fits_a_line() -> None:
    torch.manual_seed(0)
    layout = layout_of_shapes()
    target, start = torch.randn(layout.total), torch.zeros(layout.total)
    optimiser = Optimiser(layout, start, weight_decay=0.0)
    for step in range(400):
        optimiser.set_numbers(step, 0.05 * (1 - step / 400), 0.3 * (1 - step / 400), 0.9)
        optimiser.update(optimiser.master - target)
    padding = torch.cat([v.reshape(-1) for v in layout.views(optimiser.ema - target).values()])
    assert padding.abs().max() < 0.2


def test_a_gradient_that_is_not_finite_changes_no_weight() -> None:
    layout = layout_of_shapes()
    optimiser = Optimiser(layout, torch.ones(layout.total), weight_decay=0.0)
    optimiser.set_numbers(0, 0.1, 0.1, 0.9)
    optimiser.update(torch.full((layout.total,), float("nan")))
    assert torch.equal(optimiser.master, torch.ones(layout.total))
