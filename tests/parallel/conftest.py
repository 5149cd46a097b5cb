"""One world of each size for all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import light
from ranks import Ranks

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def started() -> Iterator[dict[int, Ranks]]:
    worlds: dict[int, Ranks] = {}
    yield worlds
    for ranks in worlds.values():
        ranks.close()


@pytest.fixture
def on_ranks(started: dict[int, Ranks]) -> OnRanks:
    """Runs a function of a test file on a number of ranks; the result of each."""

    def run(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        if num_ranks not in started or not started[num_ranks].is_running:  # A failed test ends its ranks.
            with light.with_quantisers():
                started[num_ranks] = Ranks(num_ranks)
        return started[num_ranks].call(function, *args)

    return run


def traces(model: torch.nn.Module) -> list[tuple[type, set[str]]]:
    """What hooks would change."""
    return [(type(module), set(vars(module))) for module in model.modules()]
