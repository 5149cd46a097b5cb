"""Images that stand for a video."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from samovar.media import Video, spritesheet, thumbnail, webp


def shades(count: int, width: int = 40, height: int = 20) -> Video:
    """Frame i has the level i."""
    levels = np.arange(count, dtype=np.uint8)[:, None, None, None]
    return Video(np.broadcast_to(levels, (count, height, width, 3)).copy(), 8.0)


def test_a_thumbnail_is_the_middle_and_not_large() -> None:
    assert thumbnail(shades(9)).getpixel((0, 0)) == (4, 4, 4)
    assert thumbnail(shades(1)).size == (40, 20)
    assert thumbnail(shades(3, 1024, 512)).size == (512, 256)


@pytest.mark.parametrize(
    ("count", "size", "shown"),
    [
        (1, (40, 20), [0]),
        (7, (200, 40), [0, 1, 2, 3, 4, 5, 6]),
        (49, (200, 100), list(range(0, 49, 2))),
    ],
)
def test_a_sheet_goes_from_the_first_frame_to_the_last(count: int, size: tuple[int, int], shown: list[int]) -> None:
    sheet = spritesheet(shades(count))
    assert sheet.size == size
    tiles = [sheet.getpixel((40 * (index % 5) + 20, 20 * (index // 5) + 10)) for index in range(len(shown))]
    assert tiles == [(level, level, level) for level in shown]


def test_tiles_are_small() -> None:
    assert spritesheet(shades(2, 640, 320)).size == (320, 80)


def test_a_still_is_a_webp_file() -> None:
    assert Image.open(io.BytesIO(webp(thumbnail(shades(3))))).format == "WEBP"
