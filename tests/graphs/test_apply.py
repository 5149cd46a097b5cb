"""Graphs on a module, and off again."""

from __future__ import annotations

import torch

from samovar.graphs import apply_graphs
from samovar.hooks import HookRegistry


@torch.no_grad()
def test_off_again_it_is_what_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    before = [(type(module), set(vars(module))) for module in model.modules()]
    given = torch.ones(2, 4)
    expected = model(given)
    hook = apply_graphs(model)
    assert all(torch.equal(model(given), expected) for _ in range(4))
    assert (hook.stats().replayed, hook.stats().run) == (2, 2)
    hook.reset_state(model)
    assert hook.stats().recorded == 0
    assert all(torch.equal(model(given), expected) for _ in range(4))
    hook.detach()
    assert hook.stats().replayed == 4
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    assert HookRegistry.get_or_create(model).recorder is None
