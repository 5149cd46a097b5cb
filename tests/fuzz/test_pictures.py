"""Images that are damaged, in every format that a client may send, through HTTP."""

from __future__ import annotations

import io
import zlib
from random import Random

from PIL import Image

from server.running import RunningServer

from .asking import Watched
from .cases import Fuzz, fuzzed
from .changes import changed_bytes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "PPM")


def picture(random: Random) -> tuple[str, bytes]:
    """A valid image of a few pixels, of any kind."""
    kind = random.choice(FORMATS)
    modes = {"JPEG": ["RGB", "L", "CMYK"], "PNG": ["RGB", "RGBA", "P", "L", "LA", "1", "I;16"], "GIF": ["P", "L"],
             "TIFF": ["RGB", "RGBA", "L", "P", "F", "I", "CMYK"], "PPM": ["RGB", "L", "1"]}  # fmt: skip
    mode = random.choice(modes.get(kind, ["RGB", "RGBA"] if kind != "BMP" else ["RGB", "L"]))
    image = Image.new(mode, (random.randrange(1, 40), random.randrange(1, 40)))
    if mode in ("RGB", "RGBA", "L"):
        image = Image.frombytes(mode, image.size, random.randbytes(len(image.tobytes())))
    more: dict[str, object] = {}
    if kind == "JPEG":
        more = {"progressive": random.random() < 0.5, "quality": random.randrange(1, 100), "comment": b"x" * 9,
                "exif": Image.Exif().tobytes(), "icc_profile": random.randbytes(200)}  # fmt: skip
    elif kind == "PNG":
        more = {"icc_profile": random.randbytes(100), "optimize": random.random() < 0.3}
    elif kind == "TIFF":
        more = {"compression": random.choice([None, "tiff_lzw", "tiff_adobe_deflate", "packbits"])}
    elif kind in ("WEBP", "GIF"):
        more = {"save_all": random.random() < 0.5, "append_images": [image.copy() for _ in range(random.randrange(3))]}
        if kind == "WEBP":
            more |= {"lossless": random.random() < 0.5}
    buffer = io.BytesIO()
    image.save(buffer, kind, **more)
    return kind, buffer.getvalue()


def damaged(random: Random) -> bytes:
    kind, data = picture(random)
    if random.random() < 0.05:
        return data
    if kind == "PNG" and random.random() < 0.7:
        return _with_checksums(random, data)
    return changed_bytes(random, data, most=2)


def _with_checksums(random: Random, data: bytes) -> bytes:
    """A PNG whose chunks are changed, doubled or moved, and have right checksums: the decoder looks further."""
    chunks, at = [], 8
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + length]))
        at += 12 + length
    for _ in range(random.randrange(1, 4)):
        number = random.randrange(len(chunks))
        name, content = chunks[number]
        kind = random.randrange(5)
        if kind == 0:
            chunks[number] = (name, changed_bytes(random, content))
        elif kind == 1:
            chunks.insert(random.randrange(len(chunks)), (name, content))
        elif kind == 2 and len(chunks) > 1:
            chunks.pop(number)
        elif kind == 3:
            names = [b"iCCP", b"tEXt", b"zTXt", b"iTXt", b"tRNS", b"PLTE", b"eXIf", b"acTL", b"fcTL", b"fdAT", b"gAMA"]
            content = random.choice(
                [b"", b"x\0\0", b"x\0\0" + zlib.compress(bytes(9)), random.randbytes(20), b"x" * 5000]
            )
            chunks.insert(random.randrange(len(chunks)), (random.choice(names), content))
        else:
            chunks[number] = (bytes(random.randbytes(4)), content)
    body = [len(c).to_bytes(4, "big") + n + c + zlib.crc32(n + c).to_bytes(4, "big") for n, c in chunks]
    return data[:8] + b"".join(body)


@fuzzed("pictures", 60)
def test_no_image_is_a_fault_of_the_server(fuzz: Fuzz, editing: RunningServer) -> None:
    watched = Watched(editing)
    with editing.client() as client:
        for random in fuzz.cases():
            data = damaged(random)
            with fuzz.trying(data, "image"):
                files = {"image": ("a", data, "application/octet-stream")}
                form = {"prompt": "a cat", "size": "16x16", "num_inference_steps": "2"}
                fuzz.ends[watched.answered(client.post("/v1/images/edits", data=form, files=files))] += 1
