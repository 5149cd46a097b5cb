"""How is a body taken in? Byte by byte up to a limit, and pictures by their headers before any pixel."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

import PIL.Image
from PIL.Image import Image
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from .failures import Refusal

_FORMATS = ("PNG", "JPEG", "WEBP")
_MOST_FIELDS = 40

# We have our own limit, below. For the whole process: to change it for a moment is not safe among threads.
warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)


async def read_body(request: Request, most_bytes: int) -> bytes:
    """A body that is no longer than it may be. One that says it is longer is not read at all."""
    limited = _limited(request, most_bytes)
    chunks = []
    async for chunk in limited.stream():
        chunks.append(chunk)
    return b"".join(chunks)


async def read_form(request: Request, most_bytes: int) -> tuple[dict[str, str], dict[str, UploadFile]]:
    """The texts and the files of a form. Large files wait on the disk, not in memory."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "multipart/form-data":
        raise Refusal(
            415, f"Content-Type must be multipart/form-data, not {kind[:80]!r}.", code="unsupported_media_type"
        )
    limited = _limited(request, most_bytes)
    try:
        form = await limited.form(max_files=4, max_fields=_MOST_FIELDS, max_part_size=most_bytes)
    except MultiPartException as error:
        raise Refusal(400, f"The form cannot be read: {error.message}", code="invalid_form") from error
    texts: dict[str, str] = {}
    files: dict[str, UploadFile] = {}
    for name, value in form.multi_items():
        if name in texts or name in files:
            raise Refusal(400, f"The field {name[:50]!r} is given twice.", param=name[:100], code="invalid_form")
        if isinstance(value, UploadFile):
            files[name] = value
        else:
            texts[name] = value
    return texts, files


def picture_in(files: Mapping[str, UploadFile], most_pixels: int) -> Image:
    """The one picture of a form, its size read from its header. Pixels are decoded by `decode`, later."""
    names = ("image", "image[]")
    for name in files:
        if name == "mask":
            message = "A mask of its own is not read. Make transparent in the image itself what is to be drawn anew."
            raise Refusal(400, message, param="mask", code="unsupported_value")
        if name not in names:
            raise Refusal(400, f"{name[:50]!r} is no file that is known.", param=name[:100], code="unknown_field")
    found = [files[name] for name in names if name in files]
    if len(found) != 1:
        raise Refusal(400, f"One image was expected, not {len(found)}.", param="image", code="invalid_value")
    return open_picture(found[0].file, most_pixels)


def open_picture(file: BinaryIO, most_pixels: int) -> Image:
    """A picture that is no larger than it may be, not decoded yet."""
    try:
        image = PIL.Image.open(file, formats=_FORMATS)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large("a decompression bomb", most_pixels) from error
    except (OSError, ValueError, SyntaxError) as error:  # The three ways of Pillow to say that it is no picture.
        message = "image is no PNG, JPEG or WebP that can be read. Send one of these."
        raise Refusal(400, message, param="image", code="invalid_image") from error
    if image.width * image.height > most_pixels:
        raise _too_large(f"{image.width}x{image.height}", most_pixels)
    return image


def decode(image: Image) -> Image:
    """The pixels of a picture, with its transparency if it has any: some models draw anew what is transparent. Takes a
    while: call it in a thread."""
    try:
        is_transparent = "A" in image.getbands() or "transparency" in image.info
        return image.convert("RGBA" if is_transparent else "RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise Refusal(
            400, "image is damaged: its pixels cannot be read.", param="image", code="invalid_image"
        ) from error


def _too_large(what: str, most_pixels: int) -> Refusal:
    message = f"image is {what}; at most {most_pixels:,} pixels are read. Send it smaller."
    return Refusal(400, message, param="image", code="image_above_limit")


def _limited(request: Request, most_bytes: int) -> Request:
    """The request, with an end to what it may bring."""
    said = request.headers.get("content-length", "0")
    if said.isdecimal() and int(said) > most_bytes:
        raise _too_long(most_bytes)
    seen = 0

    async def receive() -> Any:
        nonlocal seen
        message = await request.receive()
        seen += len(message.get("body", b""))
        if seen > most_bytes:
            raise _too_long(most_bytes)
        return message

    return Request(request.scope, receive)


def _too_long(most_bytes: int) -> Refusal:
    return Refusal(413, f"The body is longer than {most_bytes:,} bytes. Send less.", code="body_too_large")
