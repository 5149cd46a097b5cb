"""What do settings do to the same images? Each beside the exact ones and beside fewer plain steps, as numbers, as a
contact sheet, and as a page with a slider."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ..core.errors import SettingError
from .image_runner import Task
from .methods import QUANTISED, Method, plain
from .session import Row, Session, save_images
from .times import footnote, shown

_WIDEST_LABEL, _GAP, _HEADER, _LINE, _FONT_SIZE = 280, 4, 22, 17, 13
_INK, _PAPER, _DIM = (20, 20, 20), (255, 255, 255), (110, 110, 110)
_LARGEST = 256
"""Pixels of an image on the sheet; larger ones are made smaller."""


@dataclass(frozen=True)
class Comparison:
    """One row per method, each with a folder of its images; the exact ones come first."""

    tasks: Sequence[Task]
    rows: Sequence[Row]
    folders: Sequence[Path]
    """In it, an image is named by the number of its task."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        folders = zip(self.rows, self.folders, strict=True)
        return {
            "tasks": [task._asdict() for task in self.tasks],
            "rows": [{**row.to_dict(), "images": folder.name} for row, folder in folders],
        }

    def files(self, row: int) -> list[Path]:
        """The images of a row."""
        return [self.folders[row] / f"{number}.png" for number in range(len(self.tasks))]


def compare(session: Session, methods: Sequence[Method], folder: Path) -> Comparison:
    """Measure methods, each followed by the plain steps that take as long. Images go into folders of `folder`."""
    keys = [method.key for method in methods]
    for method in methods:
        if keys.count(method.key) > 1:
            raise SettingError(f"{method.name!r} is given twice. Give each setting once.")
    pairs = [each for method in methods for each in (method, *([method] if method.family != QUANTISED else []))]
    session.progress.expect(all=session.work([plain(session.runner.steps), plain(1), *pairs]))
    exact = session.exact()
    save_images(session.exact_images(), folder / "exact", fps=session.runner.fps)
    one = session.measure(plain(1), folder / "plain-1")
    rows, folders = [exact], [folder / "exact"]
    for number, method in enumerate(methods, start=1):
        row = session.measure(method, folder / f"setting-{number}")
        rows.append(row)
        folders.append(folder / f"setting-{number}")
        if method.family == QUANTISED:  # It is for memory: fewer steps are no other way to get it.
            continue
        steps = same_time_steps(exact, one, row)
        if folder / f"plain-{steps}" not in folders:  # Two settings may be equally fast.
            rows.append(session.measure(plain(steps), folder / f"plain-{steps}"))
            folders.append(folder / f"plain-{steps}")
    if folder / "plain-1" not in folders:
        shutil.rmtree(folder / "plain-1", ignore_errors=True)
    return Comparison(session.tasks, rows, folders)


def same_time_steps(exact: Row, one: Row, row: Row) -> int:
    """Number of plain steps that take as long as a setting. `one` is a run of one plain step, which shows the time of
    text encoders and VAE: they take the same time whatever is skipped. As many steps as it computes take no longer."""
    least = exact.steps / (row.explained or row.saving)
    steps = least
    if row.seconds is not None and exact.seconds is not None and one.seconds is not None:
        each = (exact.seconds - one.seconds) / max(1, exact.steps - 1)
        steps = 1 + (row.seconds - one.seconds) / each if each > 0 else least
    return max(1, min(exact.steps - 1, round(max(least, steps))))


def figures(row: Mapping[str, Any]) -> dict[str, str]:
    """The figures of a row, as `Row.to_dict` has them, for a table."""
    if "problem" in row:
        return {"method": row["method"], **dict.fromkeys(("computed", "speedup", "PSNR dB", "SSIM", "LPIPS"), "-")}
    is_exact = row["family"] == "exact"
    motion = {"motion dB": "" if is_exact else f"{row['motion']:.2f}"} if "motion" in row else {}
    return {
        "method": row["method"],
        "computed": f"{row['computed']:g}",
        "speedup": shown(row["speedup"], row.get("explained")),
        "PSNR dB": "" if is_exact else f"{row['psnr']:.2f}",
        "SSIM": "" if is_exact else f"{row['ssim']:.4f}",
        "LPIPS": "" if is_exact else f"{row['lpips']:.5f}",
        **motion,
    }


# ------------------------------------------------------------------------------------------------ sheet and page


def contact_sheet(comparison: Comparison) -> Image.Image:
    """All images in one: rows as in the comparison, tasks across."""
    font = ImageFont.load_default(_FONT_SIZE)
    labels = [_label(row) for row in comparison.rows]
    longest = max(font.getlength(text) for label in labels for text in label)
    left = min(_WIDEST_LABEL, 3 * _GAP + math.ceil(longest))
    rows = [[_thumbnail(file) for file in comparison.files(row)] for row in range(len(labels))]
    width = max(image.width for row in rows for image in row) + _GAP
    height = max(max(image.height for row in rows for image in row) + _GAP, 4 * _LINE + _GAP)
    sheet = Image.new("RGB", (left + width * len(rows[0]), _HEADER + height * len(rows)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.font = font
    for column, task in enumerate(comparison.tasks):
        text = _fitted(draw, f"{task.prompt} · {task.seed}", width - 2 * _GAP)
        draw.text((left + column * width, 3), text, fill=_DIM)
    for number, (label, images) in enumerate(zip(labels, rows, strict=True)):
        top = _HEADER + number * height
        for line, text in enumerate(label):
            draw.text((_GAP, top + _LINE * line), _fitted(draw, text, left - 2 * _GAP), fill=_DIM if line else _INK)
        for column, image in enumerate(images):
            sheet.paste(image, (left + column * width, top))
    return sheet


def page(comparison: Comparison, title: str) -> str:
    """One HTML page that contains all images."""
    data = {
        "tasks": [f"{task.prompt}, seed {task.seed}" for task in comparison.tasks],
        "rows": [
            {
                "name": row.method,
                # JSON knows no NaN, and one would leave the page empty.
                "figures": [
                    [round(v, 5) if math.isfinite(v) else None for v in quality if v is not None]
                    for quality in row.images
                ],
                "images": [
                    f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode('ascii')}"
                    for file in comparison.files(number)
                ],
            }
            for number, row in enumerate(comparison.rows)
        ],
    }
    lines = [figures(row.to_dict()) for row in comparison.rows]
    head = "".join(f"<th>{name}</th>" for name in lines[0])
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(v)}</td>' for v in line.values())}</tr>" for line in lines)
    marks = "<br>".join(map(html.escape, footnote([row.to_dict() for row in comparison.rows])))
    notes = f'<tfoot><tr><td colspan="{len(lines[0])}">{marks}</td></tr></tfoot>' if marks else ""
    text = (resources.files(__package__) / "data" / "compare.html").read_text(encoding="utf-8")
    filled = {
        "TITLE": html.escape(title),
        "TABLE": f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>{notes}",
        # No "<" at all: "</script>" would end the script, and "<!--<script>" would keep it from ending.
        "DATA": json.dumps(data).replace("<", "\\u003c"),
    }
    return re.sub("@(TITLE|TABLE|DATA)@", lambda place: filled[place[1]], text)


def _label(row: Row) -> list[str]:
    if row.family == "exact":
        return [f"exact, {row.steps} steps", *([] if row.seconds is None else [f"{row.seconds:.2f} s per image"])]
    moves = "" if row.quality.motion is None else f", motion {row.quality.motion:.1f} dB"
    return [
        row.method,
        f"{row.computed:g} computed, {shown(row.speedup, row.explained)}",
        f"PSNR {row.quality.psnr:.1f} dB, SSIM {row.quality.ssim:.3f}",
        f"LPIPS {row.quality.lpips:.5f}{moves}",
    ]


def _thumbnail(file: Path) -> Image.Image:
    with Image.open(file) as image:
        image.thumbnail((_LARGEST, _LARGEST))
        return image.convert("RGB")


def _fitted(draw: Any, text: str, width: int) -> str:
    """As much of a text as fits."""
    while draw.textlength(text) > width and len(text) > 1:
        text = text[:-2] + "…"
    return text
