"""How is a comparison looked at? A contact sheet, and a page with a slider that needs nothing else.

The exact pictures are on top, each setting below, tasks across.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from .compare import Comparison
from .session import Row

if TYPE_CHECKING:
    from PIL.Image import Image

_WIDEST_LABEL, _GAP, _HEADER, _LINE, _FONT_SIZE = 280, 4, 22, 17, 13
_INK, _PAPER, _DIM = (20, 20, 20), (255, 255, 255), (110, 110, 110)
_WIDEST = 256
"""Pixels of a picture on the sheet; larger ones are made smaller."""


def contact_sheet(comparison: Comparison) -> Image:
    """All pictures, as one."""
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT_SIZE)
    words = [text for row in comparison.rows for text in _label(row)]
    label = min(_WIDEST_LABEL, 3 * _GAP + math.ceil(max(font.getlength(text) for text in words)))
    rows = [_pictures(comparison, number) for number in range(len(comparison.rows))]
    width = max(picture.width for row in rows for picture in row) + _GAP
    height = max(max(picture.height for row in rows for picture in row) + _GAP, 4 * _LINE + _GAP)
    size = (label + width * len(rows[0]), _HEADER + height * len(rows))
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.font = font
    for column, task in enumerate(comparison.tasks):
        text = _fitted(draw, f"{task.prompt} · {task.seed}", width - 2 * _GAP)
        draw.text((label + column * width, 3), text, fill=_DIM)
    for number, (row, pictures) in enumerate(zip(comparison.rows, rows, strict=True)):
        top = _HEADER + number * height
        for line, text in enumerate(_label(row)):
            draw.text((_GAP, top + _LINE * line), _fitted(draw, text, label - 2 * _GAP), fill=_DIM if line else _INK)
        for column, picture in enumerate(pictures):
            sheet.paste(picture, (label + column * width, top))
    return sheet


def page(comparison: Comparison, title: str) -> str:
    """One HTML page with all pictures in it."""
    data = {
        "tasks": [f"{task.prompt}, seed {task.seed}" for task in comparison.tasks],
        "rows": [
            {
                "name": row.method,
                "figures": [[round(value, 5) for value in quality] for quality in row.pictures],
                "pictures": [_embedded(picture) for picture in _pictures(comparison, number, shrink=False)],
            }
            for number, row in enumerate(comparison.rows)
        ],
    }
    template = (resources.files(__package__) / "data" / "compare.html").read_text(encoding="utf-8")
    # "</" in a name must not end the script that holds it.
    filled = {
        "TITLE": html.escape(title),
        "TABLE": _table(comparison.rows),
        "DATA": json.dumps(data).replace("</", "<\\/"),
    }
    for name, text in filled.items():
        template = template.replace(f"@{name}@", text)
    return template


def figures_of(row: Row) -> dict[str, str]:
    """A row's figures as words, by column."""
    is_exact = row.family == "exact"
    return {
        "setting": row.method,
        "computed": f"{row.computed:g}",
        "speed-up": f"{row.speedup:.2f}x",
        "PSNR dB": "" if is_exact else f"{row.quality.psnr:.2f}",
        "SSIM": "" if is_exact else f"{row.quality.ssim:.4f}",
        "LPIPS": "" if is_exact else f"{row.quality.lpips:.5f}",
    }


BENCH_COLUMNS = ("method", "computed", "speed-up", "PSNR dB", "SSIM", "LPIPS", "best by")


def bench_line(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of a bench as words."""
    if "problem" in row:
        return (row["method"], *["-"] * 5, row["problem"][:60])
    best = [name for name in ("psnr", "lpips") if row.get(f"is_best_by_{name}")]
    figures = (
        f"{row['computed']:g}",
        f"{row['speedup']:.2f}x",
        f"{row['psnr']:.2f}",
        f"{row['ssim']:.4f}",
        f"{row['lpips']:.5f}",
    )
    return row["method"], *figures, ", ".join(best)


def _table(rows: Sequence[Row]) -> str:
    lines = [figures_of(row) for row in rows]
    head = "".join(f"<th>{name}</th>" for name in lines[0])
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(v)}</td>' for v in line.values())}</tr>" for line in lines)
    return f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"


def _label(row: Row) -> list[str]:
    if row.family == "exact":
        return [f"exact, {row.steps} steps", f"{row.seconds / len(row.pictures):.2f} s a picture"]
    quality = row.quality
    return [
        row.method,
        f"{row.computed:g} computed, {row.speedup:.2f}x",
        f"PSNR {quality.psnr:.1f} dB, SSIM {quality.ssim:.3f}",
        f"LPIPS {quality.lpips:.5f}",
    ]


def _pictures(comparison: Comparison, row: int, shrink: bool = True) -> list[Image]:
    from PIL import Image

    pictures = []
    for number in range(len(comparison.tasks)):
        with Image.open(comparison.folders[row] / f"{number}.png") as file:
            picture = file.convert("RGB")
        if shrink and max(picture.size) > _WIDEST:
            picture.thumbnail((_WIDEST, _WIDEST))
        pictures.append(picture)
    return pictures


def _fitted(draw: Any, text: str, width: int) -> str:
    """As much of a text as there is room for."""
    while draw.textlength(text) > width and len(text) > 1:
        text = text[:-2] + "…"
    return text


def _embedded(picture: Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
