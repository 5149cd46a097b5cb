"""A contact sheet: many images on one page, with a caption under each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

GAP, LINE = 6, 13


def write_sheet(path: Path, images: Tensor, captions: Sequence[str], columns: int = 8, scale: int = 1) -> None:
    """Write pictures (N, 3, H, W) in 0..1 as one PNG."""
    from PIL import Image, ImageDraw

    pixels = images.mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    side = pixels.shape[1] * scale
    rows = -(-len(pixels) // columns)
    cell = (side + GAP, side + GAP + 2 * LINE)
    page = Image.new("RGB", (columns * cell[0] + GAP, rows * cell[1] + GAP), (240, 240, 240))
    draw = ImageDraw.Draw(page)
    letters = max(8, side // 6)
    for index, (picture, text) in enumerate(zip(pixels, captions, strict=True)):
        x, y = GAP + index % columns * cell[0], GAP + index // columns * cell[1]
        page.paste(Image.fromarray(picture).resize((side, side)), (x, y))
        for number, line in enumerate(textwrap.wrap(text, letters)[:2]):
            draw.text((x, y + side + number * LINE), line, fill=(0, 0, 0))
    page.save(path, optimize=True)
