"""Stills of a video: one frame of it, or many on one sheet."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from .values import Video

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE, _TILE, _COLUMNS = 512, 160, 5


def thumbnail(video: Video) -> Image:
    """The frame in the middle, within 512 pixels a side."""
    from PIL import Image

    return _within(Image.fromarray(video.frames[len(video) // 2]), _SIDE)


def spritesheet(video: Video, most: int = _COLUMNS * _COLUMNS) -> Image:
    """Frames from the first to the last, in rows of five, each within 160 pixels a side."""
    from PIL import Image

    count = min(most, len(video))
    chosen = [round(index * (len(video) - 1) / max(1, count - 1)) for index in range(count)]
    tiles = [_within(Image.fromarray(video.frames[index]), _TILE) for index in chosen]
    width, height = tiles[0].size
    columns = min(_COLUMNS, count)
    sheet = Image.new("RGB", (columns * width, math.ceil(count / columns) * height))
    for index, tile in enumerate(tiles):
        sheet.paste(tile, (index % columns * width, index // columns * height))
    return sheet


def webp(image: Image) -> bytes:
    """A small file of a still image."""
    content = io.BytesIO()
    image.save(content, "WEBP", quality=85)
    return content.getvalue()


def _within(image: Image, side: int) -> Image:
    image.thumbnail((side, side))
    return image
