"""Real processes over gloo, started once for all tests: starting them takes longer than most of what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from samovar.parallel import Ranks

OnRanks = Callable[..., list[Any]]
Count = Callable[[str, object], None]


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
            started[num_ranks] = Ranks(num_ranks, backend="gloo", timeout_s=300.0, num_threads=1)
        return started[num_ranks].call(function, *args, limit_s=900.0)

    return run
