"""Curves are drawn from saved rows, one for each family."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samovar.errors import SettingError
from samovar.lab.plot import draw

ROWS: list[dict[str, Any]] = [
    {"method": "exact", "family": "exact", "computed": 8.0, "psnr": 100, "lpips": 0.0},
    {"method": "plain 4", "family": "plain steps", "computed": 4.0, "psnr": 30, "lpips": 0.1},
    {"method": "a", "family": "samovar schedule", "computed": 2.7, "psnr": 35, "lpips": 0.0},
    {"method": "b", "family": "samovar schedule", "computed": 4.0, "psnr": 40, "lpips": 0.01},
    {"method": "c", "family": "peer", "problem": "TypeError: no"},
]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(ROWS, tmp_path / "bench.png", "a title")
    with Image.open(tmp_path / "bench.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20, "there is something on it"


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(SettingError, match="nothing to draw"):
        draw([ROWS[0], ROWS[-1]], tmp_path / "bench.png", "a title")


def test_without_matplotlib_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r"pip install 'samovar\[lab\]'.*--plot-from"):
        draw(ROWS, tmp_path / "bench.png", "a title")
