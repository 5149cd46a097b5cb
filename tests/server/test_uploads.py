"""Bodies and images are measured before they are taken in."""

from __future__ import annotations

import io
import struct
import zlib

import PIL.Image
import pytest

from samovar.server.api_errors import ApiError
from samovar.server.uploads import decode, open_image


def png_of(width: int, height: int, data: bytes = b"") -> bytes:
    """A PNG that says how large it is, with as much data as is given."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def encoded(image: PIL.Image.Image, kind: str) -> io.BytesIO:
    file = io.BytesIO()
    image.save(file, kind)
    file.seek(0)
    return file


@pytest.mark.parametrize("size", [(50_000, 50_000), (1001, 1000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_known_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(ApiError, match="the limit is 1,000,000 pixels") as refused:
        open_image(io.BytesIO(png_of(*size, data=zlib.compress(bytes(10_000)))), 1_000_000)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, "image", "image_above_limit")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"<svg/>", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", bytes(1000), b"\xff\xd8\xff"]
)
def test_what_is_not_an_image_is_refused(content: bytes) -> None:
    with pytest.raises(ApiError, match="not a readable PNG, JPEG or WebP"):
        open_image(io.BytesIO(content), 1_000_000)


def test_formats_that_are_not_wanted_are_refused() -> None:
    for kind in ("GIF", "BMP", "TIFF", "PDF"):
        with pytest.raises(ApiError, match="not a readable PNG, JPEG or WebP"):
            open_image(encoded(PIL.Image.new("RGB", (4, 4)), kind), 1_000_000)


def test_pixels_that_are_missing_are_noticed() -> None:
    whole = encoded(PIL.Image.effect_noise((64, 64), 50), "PNG").getvalue()
    image = open_image(io.BytesIO(whole[: len(whole) // 2]), 1_000_000)
    with pytest.raises(ApiError, match="damaged"):
        decode(image)


def test_transparency_is_kept_and_other_modes_become_rgb() -> None:
    assert decode(open_image(encoded(PIL.Image.new("RGBA", (4, 4), (1, 2, 3, 0)), "PNG"), 100)).mode == "RGBA"
    for mode in ("L", "P", "1", "I;16"):
        assert decode(open_image(encoded(PIL.Image.new(mode, (4, 4)), "PNG"), 100)).mode == "RGB"
    assert decode(open_image(encoded(PIL.Image.new("CMYK", (4, 4)), "JPEG"), 100)).mode == "RGB"
