"""A recorder answers for a module's own forward, inside all hooks, unless somebody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samovar.hooks import HookRegistry, ModelHook, is_watched, watched


class Recorded:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function: Callable[[Any], Any], given: Any) -> Any:
        self.count += 1
        return function(given) + 1


class Doubles(ModelHook):
    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.call_original(module, *args, **kwargs)


def test_it_is_asked_inside_all_hooks() -> None:
    module = torch.nn.Identity()
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("doubles", Doubles())
    recorder = registry.recorder = Recorded()
    assert module(torch.tensor(1.0)) == 4
    assert recorder.count == 1
    with watched():
        assert is_watched()
        with watched():
            assert module(torch.tensor(1.0)) == 2
        assert module(torch.tensor(1.0)) == 2
    assert not is_watched()
    assert module(torch.tensor(1.0)) == 4
    registry.recorder = None
    assert module(torch.tensor(1.0)) == 2
