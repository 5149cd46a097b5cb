"""What attackers send: pictures that take long to decode, and forms."""

from __future__ import annotations

import struct
import zlib


def png_chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_of(width: int, height: int, data: bytes = b"", before: bytes = b"") -> bytes:
    """A PNG that says how large it is, with as much data as is given, and chunks before it."""
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + before + png_chunk(b"IDAT", data) + png_chunk(b"IEND")


def jpeg_of_scans(width: int, height: int, num_scans: int) -> bytes:
    """A grey progressive JPEG whose scans say nothing, but for the first: 16 bytes for a pass over all pixels."""
    num_blocks = -(-width // 8) * -(-height // 8)
    ones = [f"{0:0{num_blocks}b}"]
    runs, left = "", num_blocks
    while left:  # "End of band", for as many blocks as one code can name.
        exponent = min(14, left.bit_length() - 1)
        length = min(left, 2 ** (exponent + 1) - 1)
        code = "0" if exponent == 14 else f"{0b10000 + exponent:05b}"
        runs += code + (f"{length - 2**exponent:0{exponent}b}" if exponent else "")
        left -= length
    first = _segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + _bits(ones[0])
    empty = _segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) + _bits(runs)
    return b"".join([
        b"\xff\xd8",
        _segment(0xDB, bytes([0] + [1] * 64)),
        _segment(0xC2, struct.pack(">BHHB", 8, height, width, 1) + bytes([1, 0x11, 0])),
        _segment(0xC4, bytes([0x00, 1] + [0] * 15 + [0])),
        _segment(0xC4, bytes([0x10, 1, 0, 0, 0, 14] + [0] * 11 + [0xE0] + [n << 4 for n in range(14)])),
        first,
        empty * num_scans,
        b"\xff\xd9",
    ])  # fmt: skip


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def _bits(text: str) -> bytes:
    text += "1" * (-len(text) % 8)
    return int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\x00")


BOUNDARY = b"BOUNDARY"
FORM_TYPE = "multipart/form-data; boundary=BOUNDARY"


def form(image: bytes | None, more: dict[bytes, bytes] | None = None, name: bytes = b"image") -> bytes:
    """A form as bytes: clients would refuse to send some of what is in them."""
    parts = [b'name="%s"\r\n\r\n%s\r\n' % pair for pair in ({b"prompt": b"a cat"} | (more or {})).items()]
    parts += [] if image is None else [b'name="%s"; filename="a"\r\n\r\n%s\r\n' % (name, image)]
    beginning = b"--%s\r\nContent-Disposition: form-data; " % BOUNDARY
    return b"".join(beginning + part for part in parts) + b"--%s--\r\n" % BOUNDARY
