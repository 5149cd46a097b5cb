"""Reads long bodies and images in two processes of their own, with limits on time and memory.

A client can make any parser slow, large or crash. These processes have nothing to lose, and are replaced.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import io
import json
import multiprocessing
import os
import re
import resource
import signal
import struct
import threading
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import PIL.Image
import PIL.ImageOps
from PIL.Image import Image
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import create_form_parser

from .errors import ApiError

JSON, IMAGE = "application/json", "image/*"
_LARGE, _LARGE_OBJECT, _LONG_OBJECT = 2**21, 2**17, 2**15
"""Bytes of a form that can make it take seconds; of JSON that no ordinary prompt has; and of JSON that takes two
milliseconds to parse, whatever it is."""
_MAX_TASKS = 100
"""Bodies that one process reads."""
_MAX_SCANS = 100
"""Of a JPEG, as in libjpeg's own tools. Each passes over all pixels, and an empty one takes 16 bytes."""
_MAX_FIELDS, _MAX_PARTS = 40, 50
"""Of JSON, and of a form."""
_SEVERAL = ("image", "image[]")
"""Files that may be given more than once."""
_LONG = 1000
"""Characters of a text."""
_PIECE = 2**16
_DATA_URL = re.compile(r"data:[^,]{0,100};base64,", flags=re.IGNORECASE)
Found = tuple[dict[str, Any], list[tuple[str, Image]]]
"""The values of a body, and its images with their names."""


class Task(NamedTuple):
    """What a body is, and its limits."""

    content_type: str
    max_pixels: int
    max_characters: int
    """Of one text."""
    cpu_s: float
    """Time to compute. Above it the process ends."""
    files: tuple[str, ...] = _SEVERAL
    """Names that files may have."""


class DecodePool:
    """A process for large bodies, which may take long, and one for the others."""

    def __init__(self, max_memory: int) -> None:
        self._max_memory = max_memory
        self._pools = [self._new_pool(), self._new_pool()]
        self._turns = [asyncio.Lock(), asyncio.Lock()]

    def _new_pool(self) -> ProcessPoolExecutor:
        """A process, which is started when it is needed."""
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, _prepare, (self._max_memory,), max_tasks_per_child=_MAX_TASKS)

    async def read(self, task: Task, parts: list[bytes]) -> Found:
        """What a body holds; ApiError if it is not taken. Short JSON is read here: a long one would stop everybody."""
        size, is_object = sum(map(len, parts)), task.content_type == JSON
        if is_object and size <= _LONG_OBJECT and b"data:" not in (body := b"".join(parts)).lower():
            return read_object(body), []
        place = size > (_LARGE_OBJECT if is_object else _LARGE)
        async with self._turns[place]:
            for _ in range(2):  # The process may still be busy with a body whose client has left, and end over that.
                try:
                    loop = asyncio.get_running_loop()
                    return await loop.run_in_executor(self._pools[place], read_body, task, parts)
                except (BrokenProcessPool, MemoryError):
                    self._pools[place] = self._new_pool()
        message = f"The body took more than {task.cpu_s:g} s or too much memory to read, or an image in it is damaged."
        raise ApiError(f"{message} Save it again, as an ordinary PNG or JPEG.", "image", "invalid_image")

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare(max_memory: int) -> None:
    """Allow this process as many bytes as it has now and some more, if the system can; it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides.
    PIL.Image.MAX_IMAGE_PIXELS = None  # The limit is the task's.
    PIL.Image.preinit()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + max_memory
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)


def read_body(task: Task, parts: list[bytes]) -> Found:
    """The values of a body, and its images with their names, read within the time that it may take."""
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)  # SIGPROF ends the process.
    try:
        return _read_body(task, parts)
    finally:  # Also when it is refused: what is done later would be ended.
        signal.setitimer(signal.ITIMER_PROF, 0)


def _read_body(task: Task, parts: list[bytes]) -> Found:
    body, values = b"".join(parts), dict[str, Any]()
    files = [(task.files[0], body)] if task.content_type == IMAGE else list[tuple[str, bytes]]()
    if task.content_type == JSON:
        values = read_object(body)
    elif task.content_type != IMAGE:
        values, files = _read_form(task, body)
    files += _take_data(values, task.files)
    _check_values(values, task.max_characters)
    images: list[tuple[str, Image]] = []
    for name, content in files:
        if name not in task.files:
            known = ", ".join(each for each in task.files if not each.endswith("[]"))
            raise ApiError(f"{name[:50]!r} is not a known file. Expected {known}.", name[:100], "unknown_field")
        if name in dict(images) and name not in _SEVERAL:
            raise ApiError(f"The field {name!r} is given twice.", name, "invalid_form")
        image = read_image(content, task.max_pixels, name)
        images.append((name, _where_white(image) if name == "mask" else image))
        if sum(image.width * image.height for _, image in images) > 2 * task.max_pixels:  # An image and its mask.
            message = f"All images together have more than {2 * task.max_pixels:,} pixels. Send fewer or smaller ones."
            raise ApiError(message, name, "image_above_limit")
    return values, images


def read_object(content: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8 whose names are unique."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # Also bytes that are not UTF-8, and numbers of thousands of digits.
        raise ApiError(f"The body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(value, dict) or len(value) > _MAX_FIELDS:
        message = f"The body must be a JSON object of at most {_MAX_FIELDS} fields, not {type(value).__name__}."
        raise ApiError(message, code="invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def _read_form(task: Task, body: bytes) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The texts and the files of a form."""
    texts: list[tuple[str, Any]] = []
    files: list[tuple[str, bytes]] = []
    try:  # In memory, as there is a limit on that; a disk may be full.
        parser = create_form_parser(
            {"Content-Type": task.content_type.encode("latin-1")},
            lambda text: texts.append(((text.field_name or b"").decode(), (text.value or b"").decode())),
            lambda file: files.append(((file.field_name or b"").decode(), _content(file.file_object))),
            {"MAX_MEMORY_FILE_SIZE": float("inf"), "UPLOAD_ERROR_ON_BAD_CTE": True},
        )
        for first in range(0, len(body), _PIECE):
            parser.write(body[first : first + _PIECE])
            if len(texts) + len(files) > _MAX_PARTS:
                raise ApiError(f"The form has more than {_MAX_PARTS} parts.", code="invalid_form")
        parser.finalize()
        return _unique(texts), files
    except (FormParserError, ValueError) as error:  # Also of text that is not UTF-8.
        message = f"The form cannot be read: {str(error)[:200]}. Send multipart/form-data in UTF-8."
        raise ApiError(message, code="invalid_form") from error


def _content(file: Any) -> bytes:
    file.seek(0)
    content: bytes = file.read()
    return content


def reference_of(name: str, value: Any) -> str | None:
    """The URL by which a field names an image: a text, OpenAI's object, or the part of it in a form."""
    if isinstance(value, dict) and value.keys() == {"image_url"}:
        value = value["image_url"]
    return value if isinstance(value, str) and name.partition("[")[1:] in (("", ""), ("[", "image_url]")) else None


def _take_data(values: dict[str, Any], names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The images that are data URLs, which are taken out of the values."""
    found = []
    for name, url in [(name, reference_of(name, value) or "") for name, value in values.items()]:
        field, head = name.partition("[")[0], _DATA_URL.match(url)
        if field in names and url[:5].lower() == "data:":
            del values[name]
            try:
                found.append((field, base64.b64decode(url[head.end() if head else 0 :], validate=True)))
            except binascii.Error as error:
                message = f"{field} is no data URL of an image. Expected data:image/png;base64, and the file in base64."
                raise ApiError(message, field, "invalid_image") from error
    return found


def _check_values(values: dict[str, Any], max_characters: int) -> None:
    """Refuse what would take long to handle: of a long body, two texts may be long and nothing else."""
    num_long = 0
    for name, value in values.items():
        if isinstance(value, (dict, list)) or len(name) > _LONG:
            raise ApiError("The body is long without a long prompt. Send a flat object.", name[:100], "invalid_json")
        length = len(value) if isinstance(value, str) else 0
        num_long += length > _LONG
        if length > max_characters or num_long > 2:
            message = (
                f"{name} has {length} characters; the limit is {max_characters}, and {_LONG} for what is no prompt."
            )
            raise ApiError(message, name, "string_above_max_length")


def read_image(content: bytes, max_pixels: int, name: str = "image") -> Image:
    """The pixels of an image; transparency is kept, as some models redraw what is transparent."""
    try:
        image: Image = PIL.Image.open(io.BytesIO(content), formats=("PNG", "JPEG", "WEBP"))
        if image.width * image.height > max_pixels:
            message = f"{name} is {image.width}x{image.height}; the limit is {max_pixels:,} pixels. Send a smaller one."
            raise ApiError(message, name, "image_above_limit")
        # In the data of a scan no byte FF is followed by DA, so each pair begins one, but for a few within metadata.
        if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > _MAX_SCANS:
            message = f"{name} has more than {_MAX_SCANS} scans. Save it as an ordinary JPEG."
            raise ApiError(message, name, "invalid_image")
        is_transparent = "A" in image.getbands() or "transparency" in image.info
        with contextlib.suppress(struct.error, TypeError, AttributeError):  # A camera's notes that cannot be read.
            PIL.ImageOps.exif_transpose(image, in_place=True)
        if image.mode.startswith("I"):  # 16 bits, which would be clipped to white.
            image = image.convert("I").point(lambda level: level * (255 / 65535)).convert("L")
        found = image.convert("RGBA" if is_transparent else "RGB")
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        message = f"{name} is not a readable PNG, JPEG or WebP file, or it is damaged."
        raise ApiError(message, name, "invalid_image") from error
    found.info = {}  # What else is in the file stays here.
    return found


def _where_white(mask: Image) -> Image:
    """A mask in OpenAI's way, which is transparent where the image is redrawn, in ours, which is white there."""
    alpha = mask.getchannel("A") if mask.mode == "RGBA" else None
    if alpha is None or alpha.getextrema()[0] == 255:
        return mask
    return alpha.point(lambda level: 255 - level)
