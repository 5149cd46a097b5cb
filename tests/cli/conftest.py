"""The machine that runs the tests may be slow: no lines about progress in what commands print. And a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines import tiny_flux_pipeline
from samovar.cli import terminal


@pytest.fixture(autouse=True)
def _no_progress_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "INTERVAL_S", 3600.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_flux_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    for name, words in (("mine", "a cat\na dog\na hat\n"), ("others", "a tree\na house\n")):
        (tmp_path / f"{name}.txt").write_text(words)
    return str(tmp_path / "mine.txt"), str(tmp_path / "others.txt")
