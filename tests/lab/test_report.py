"""The sheet has every picture in its place, and the page needs nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from samovar.lab.compare import Comparison
from samovar.lab.metrics import Quality
from samovar.lab.report import contact_sheet, figures_of, page
from samovar.lab.session import Row, save_png
from samovar.lab.studio import Task

COLOURS = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [1.0, 1.0, 0]])


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two rows of two pictures of one colour each."""
    quality = Quality(31.5, 0.97, 0.0123)
    rows = [
        Row("exact", "exact", {}, 50, 50, 2.0, 1.0, Quality(100, 1, 0), (Quality(100, 1, 0),) * 2),
        Row("</script><b>x", "samovar", {}, 50, 20, 1.0, 2.0, quality, (quality, quality)),
    ]
    folders = [tmp_path / "exact", tmp_path / "setting-1"]
    for number, colour in enumerate(COLOURS):
        save_png(colour.view(3, 1, 1).expand(3, 80, 96), folders[number // 2] / f"{number % 2}.png")
    return Comparison([Task("a cat & <i>dog</i>", 1), Task("a very long prompt " * 9, 2)], rows, folders)


def test_the_exact_ones_are_on_top_and_tasks_across(comparison: Comparison) -> None:
    sheet = contact_sheet(comparison)
    left, top = sheet.width - 2 * 100, sheet.height - 2 * 84
    centres = [(left + 48, top + 40), (left + 148, top + 40), (left + 48, top + 124), (left + 148, top + 124)]
    found = [sheet.getpixel(centre) for centre in centres]
    assert found == [tuple(int(255 * c) for c in colour) for colour in COLOURS.tolist()]
    darkest, _ = sheet.crop((0, 0, left, sheet.height)).convert("L").getextrema()
    assert darkest < 100, "there are words beside them"


def test_the_page_is_self_contained(comparison: Comparison) -> None:
    text = page(comparison, "emoji <50 steps>")
    assert not re.search(r'(?:src|href)\s*=\s*"(?!data:)[^"]+"|https?://|@import|url\(', text)
    assert "<title>emoji &lt;50 steps&gt;</title>" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert [row["name"] for row in data["rows"]] == ["exact", "</script><b>x"]
    assert all(picture.startswith("data:image/png;base64,") for row in data["rows"] for picture in row["pictures"])
    assert data["rows"][1]["figures"] == [[31.5, 0.97, 0.0123]] * 2
    assert text.count("</script>") == 2, "a name cannot end the script that holds it"
    assert "<td>&lt;/script&gt;&lt;b&gt;x</td>" in text
    assert '<input type="range"' in text


def test_figures(comparison: Comparison) -> None:
    assert list(figures_of(comparison.rows[1]).values()) == [
        "</script><b>x",
        "20",
        "2.00x",
        "31.50",
        "0.9700",
        "0.01230",
    ]
    assert figures_of(comparison.rows[0])["PSNR dB"] == "", "the exact ones are near nothing but themselves"


def test_large_pictures_are_made_smaller_on_the_sheet(tmp_path: Path) -> None:
    quality = Quality(100, 1, 0)
    save_png(torch.zeros(3, 600, 300), tmp_path / "0.png")
    row = Row("exact", "exact", {}, 1, 1, 1.0, 1.0, quality, (quality,))
    assert contact_sheet(Comparison([Task("a", 0)], [row], [tmp_path])).height < 300
