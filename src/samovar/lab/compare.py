"""Settings beside the exact images and beside as many plain steps: as numbers, as a contact sheet, and as a page with a
slider."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..core.errors import SettingError
from .methods import EXACT, PLAIN, QUANTISED, Method, plain
from .session import Row, Session
from .tasks import Task
from .verdict import sentences, shown_speedup, worst

_LABEL, _GAP, _HEADER, _LINE, _FONT_SIZE = 280, 4, 22, 17, 13
_INK, _PAPER, _DIM = (20, 20, 20), (255, 255, 255), (110, 110, 110)
_LARGEST = 256
"""Pixels of an image on the sheet; larger ones are made smaller."""


@dataclass(frozen=True)
class Comparison:
    """One row per method; the exact images come first."""

    tasks: Sequence[Task]
    rows: Sequence[Row]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [{**row.to_dict(), "images": row.folder and row.folder.name} for row in self.rows]
        return {"tasks": [task._asdict() for task in self.tasks], "rows": rows, "verdict": self.verdict()}

    def verdict(self) -> list[str]:
        """What to expect of each setting."""
        return [line for row in self.judged() for line in sentences(row, self.tasks)]

    def judged(self) -> list[Row]:
        """The settings that were asked for."""
        return [row for row in self.rows if row.method.family not in (EXACT.family, PLAIN)]


def compare(session: Session, methods: Sequence[Method], folder: Path) -> Comparison:
    """Measure methods, each followed by as many plain steps as it computes. Images go into folders of `folder`."""
    keys = [method.key for method in methods]
    for method in methods:
        if keys.count(method.key) > 1:
            raise SettingError(f"{method.name!r} is given twice. Give each setting once.")
    session.progress.expect(session.work([EXACT, *(m for m in methods for _ in range(1 + (m.family != QUANTISED)))]))
    rows = [session.exact(folder / "exact")]
    for number, method in enumerate(methods, start=1):
        rows.append(session.measure(method, folder / f"setting-{number}"))
        # As many as it computes: times drift, and counts do not. Quantised weights are for memory, not for steps.
        steps = max(1, min(session.runner.steps - 1, round(rows[-1].computed)))
        beside = folder / f"plain-{steps}"
        if method.family != QUANTISED and beside not in [row.folder for row in rows]:
            rows.append(session.measure(plain(steps), beside))
    return Comparison(session.tasks, rows)


def table(rows: Sequence[Row]) -> list[list[str]]:
    """The figures of rows, with a heading."""
    moves = [f"{row.quality.motion:.2f}" for row in rows if row.quality.motion is not None]
    heading = ["method", "computed", "speedup", "PSNR dB", "SSIM", "LPIPS", *["motion dB"] * bool(moves)]
    return [heading, *(_figures(row) for row in rows)]


def _figures(row: Row) -> list[str]:
    formats = zip(row.quality, (".2f", ".4f", ".5f", ".2f"), strict=True)
    quality = ["" if row.method is EXACT else format(value, how) for value, how in formats if value is not None]
    return [row.method.name, f"{row.computed:g}", shown_speedup(row), *quality]


# ------------------------------------------------------------------------------------------------ sheets and page


def contact_sheet(tasks: Sequence[Task], rows: Sequence[Row], *, worst_only: bool = False) -> Image.Image:
    """All images in one, with a label for each row and the tasks across; or only the tasks whose images in the last row
    are furthest from the exact ones."""
    numbers = worst(rows[-1]) if worst_only else range(len(tasks))
    images = [[_thumbnail(_file(row, number)) for number in numbers] for row in rows]
    return _drawn([tasks[number] for number in numbers], rows, images)


def _drawn(tasks: Sequence[Task], rows: Sequence[Row], images: Sequence[Sequence[Image.Image]]) -> Image.Image:
    width = max(image.width for row in images for image in row) + _GAP
    height = max(max(image.height for row in images for image in row) + _GAP, 4 * _LINE + _GAP)
    sheet = Image.new("RGB", (_LABEL + width * len(tasks), _HEADER + height * len(rows)), _PAPER)

    def write(text: str, x: int, y: int, width: int, ink: tuple[int, int, int]) -> None:
        part = Image.new("RGB", (width, _LINE), _PAPER)  # What is too long is cut off.
        ImageDraw.Draw(part).text((0, 0), text, fill=ink, font=ImageFont.load_default(_FONT_SIZE))
        sheet.paste(part, (x, y))

    for column, task in enumerate(tasks):
        write(f"{task.prompt} · {task.seed}", _LABEL + column * width, 3, width - _GAP, _DIM)
    for number, (row, of) in enumerate(zip(rows, images, strict=True)):
        top = _HEADER + number * height
        for line, text in enumerate(_label(row)):
            write(text, _GAP, top + _LINE * line, _LABEL - 2 * _GAP, _DIM if line else _INK)
        for column, image in enumerate(of):
            sheet.paste(image, (_LABEL + column * width, top))
    return sheet


def page(comparison: Comparison, title: str) -> str:
    """One HTML page that contains all images."""
    numbers = range(len(comparison.tasks))
    data = {
        "title": title,
        "table": table(comparison.rows),
        "verdict": comparison.verdict(),
        "tasks": [f"{task.prompt}, seed {task.seed}" for task in comparison.tasks],
        "rows": [
            {
                "name": row.method.name,
                # JSON knows no NaN, and one would leave the page empty.
                "figures": [
                    [round(v, 5) if math.isfinite(v) else None for v in quality if v is not None]
                    for quality in row.images
                ],
                "images": [
                    f"data:image/png;base64,{base64.b64encode(_file(row, number).read_bytes()).decode('ascii')}"
                    for number in numbers
                ],
            }
            for row in comparison.rows
        ],
    }
    text = (resources.files(__package__) / "data" / "compare.html").read_text(encoding="utf-8")
    # No "<" at all: "</script>" would end the script, and "<!--<script>" would keep it from ending.
    return text.replace("@DATA@", json.dumps(data).replace("<", "\\u003c"))


def _label(row: Row) -> list[str]:
    if row.method is EXACT:
        return [f"exact, {row.steps} steps", *([] if row.seconds is None else [f"{row.seconds:.2f} s per image"])]
    moves = "" if row.quality.motion is None else f", motion {row.quality.motion:.1f} dB"
    return [
        row.method.name,
        f"{row.computed:g} computed, {shown_speedup(row)}",
        f"PSNR {row.quality.psnr:.1f} dB, SSIM {row.quality.ssim:.3f}",
        f"LPIPS {row.quality.lpips:.5f}{moves}",
    ]


def _file(row: Row, number: int) -> Path:
    assert row.folder is not None
    return row.folder / f"{number}.png"


def _thumbnail(file: Path) -> Image.Image:
    with Image.open(file) as image:
        image.thumbnail((_LARGEST, _LARGEST))
        return image.convert("RGB")
