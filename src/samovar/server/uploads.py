"""How is a body received? Up to a size limit, and images by their headers before any pixel is decoded."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, BinaryIO

import PIL.Image
from PIL.Image import Image
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from .api_errors import ApiError

_FORMATS = ("PNG", "JPEG", "WEBP")

# Our own limit is below. This one is per process, and changing it for a moment is not thread-safe.
warnings.filterwarnings("ignore", category=PIL.Image.DecompressionBombWarning)


async def receive_json(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request."""
    # A page of another site could send other types without a preflight.
    _check_type(request, "application/json")
    return await _limited(request, max_bytes).body()


async def receive_form(request: Request, max_bytes: int) -> tuple[dict[str, str], dict[str, UploadFile]]:
    """The texts and files of a form. Large files are kept on disk."""
    _check_type(request, "multipart/form-data")
    try:
        form = await _limited(request, max_bytes).form(max_files=4, max_fields=40, max_part_size=max_bytes)
    except MultiPartException as error:
        raise ApiError(400, f"The form cannot be read: {error.message}", code="invalid_form") from error
    texts: dict[str, str] = {}
    files: dict[str, UploadFile] = {}
    for name, value in form.multi_items():
        if name in texts or name in files:
            raise ApiError(400, f"The field {name[:50]!r} is given twice.", param=name[:100], code="invalid_form")
        if isinstance(value, UploadFile):
            files[name] = value
        else:
            texts[name] = value
    return texts, files


def find_image(files: Mapping[str, UploadFile], max_pixels: int) -> Image:
    """The one image of a form, with its size but not decoded."""
    for name in files:
        if name == "mask":
            message = "A separate mask is not supported. Instead, make the area to redraw transparent in the image."
            raise ApiError(400, message, param="mask", code="unsupported_value")
        if name not in ("image", "image[]"):
            raise ApiError(400, f"{name[:50]!r} is not a known file.", param=name[:100], code="unknown_field")
    if len(files) != 1:
        raise ApiError(400, f"{len(files)} images were sent; expected one.", param="image", code="invalid_value")
    (file,) = files.values()
    return open_image(file.file, max_pixels)


def open_image(file: BinaryIO, max_pixels: int) -> Image:
    """An image that is not too large, not decoded yet."""
    try:
        image = PIL.Image.open(file, formats=_FORMATS)
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large("a decompression bomb", max_pixels) from error
    except (OSError, ValueError, SyntaxError) as error:  # Which one depends on the format.
        message = "image is not a readable PNG, JPEG or WebP file."
        raise ApiError(400, message, param="image", code="invalid_image") from error
    if image.width * image.height > max_pixels:
        raise _too_large(f"{image.width}x{image.height}", max_pixels)
    return image


def decode(image: Image) -> Image:
    """The pixels of an image; transparency is kept, as some models redraw what is transparent. Slow: use a thread."""
    is_transparent = "A" in image.getbands() or "transparency" in image.info
    try:
        return image.convert("RGBA" if is_transparent else "RGB")
    except (OSError, ValueError, SyntaxError) as error:
        message = "image is damaged: its pixels cannot be decoded."
        raise ApiError(400, message, param="image", code="invalid_image") from error


def _too_large(what: str, max_pixels: int) -> ApiError:
    message = f"image is {what}; the limit is {max_pixels:,} pixels. Send a smaller one."
    return ApiError(400, message, param="image", code="image_above_limit")


def _check_type(request: Request, expected: str) -> None:
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != expected:
        message = f"Content-Type must be {expected}, not {kind[:80]!r}."
        raise ApiError(415, message, code="unsupported_media_type")


def _limited(request: Request, max_bytes: int) -> Request:
    """The request, which may not send more than this."""
    error = ApiError(413, f"The body is longer than {max_bytes:,} bytes.", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise error
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise error
        return message

    return Request(request.scope, receive)
