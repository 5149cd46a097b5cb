"""The machine that runs the tests may be slow: no lines about progress in what commands print."""

from __future__ import annotations

import pytest

from samovar.cli import terminal


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "INTERVAL_S", 3600.0)
