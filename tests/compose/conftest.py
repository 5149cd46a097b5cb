"""One world of two ranks for all combinations: starting one takes longer than most of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Ranks


@pytest.fixture(autouse=True)
def _no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIFFUSION_CACHE_BACKEND", raising=False)


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started
