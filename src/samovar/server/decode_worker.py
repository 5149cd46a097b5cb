"""Reads one body, in a process of its own that has limits on time and memory: `python decode_worker.py MEMORY`.

A client can make any parser slow, large or crash. This one has nothing to lose. It imports nothing of Samovar, so that
it starts in a twentieth of a second. Its input is a line of JSON and the body, its output a line of JSON and pixels.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import json
import re
import resource
import signal
import struct
import sys
from typing import IO, Any, NamedTuple

import PIL.Image
import PIL.ImageOps
import PIL.WebPImagePlugin
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import create_form_parser, parse_options_header

MAX_SCANS = 100
"""Of a JPEG, as in libjpeg's own tools. Each passes over all pixels, and an empty one takes 16 bytes."""
MAX_FIELDS, MAX_PARTS = 40, 50
"""Of JSON, and of a form."""
SEVERAL = ("image", "image[]")
"""Files that may be given more than once."""
JSON, IMAGE = "application/json", "image/*"
_DATA_URL = re.compile(r"data:[^,]{0,100};base64,", flags=re.IGNORECASE)
_FORMATS = ("PNG", "JPEG", "WEBP")
_LONG = 1000
"""Characters of a text."""
_PIECE = 2**16


class Refused(Exception):
    """Why a body is not taken: for the client."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_form") -> None:
        super().__init__(message)
        self.message, self.param, self.code = message, param, code


class Task(NamedTuple):
    """What a body is, and its limits."""

    content_type: str
    max_pixels: int
    max_characters: int
    """Of one text."""
    cpu_s: float
    """Time to compute. Above it the process ends."""
    files: tuple[str, ...] = ("image", "image[]")
    """Names that files may have."""


def read_object(content: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8 whose names are unique."""
    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise Refused("The body is nested too deeply. Send a flat object.", code="invalid_json") from error
    except ValueError as error:  # Also bytes that are not UTF-8, and numbers of thousands of digits.
        raise Refused(f"The body is not valid JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused(f"The body must be a JSON object, not {type(value).__name__}.", code="invalid_json")
    if len(value) > MAX_FIELDS:
        raise Refused(f"The body has {len(value)} fields; at most {MAX_FIELDS} can be known.", code="invalid_json")
    return value


def reference_of(name: str, value: Any) -> str | None:
    """The URL by which a field names an image: a text, OpenAI's object, or the part of it in a form."""
    if isinstance(value, dict) and value.keys() == {"image_url"}:
        value = value["image_url"]
    return value if isinstance(value, str) and name.partition("[")[1:] in (("", ""), ("[", "image_url]")) else None


def take_data(values: dict[str, Any], names: tuple[str, ...]) -> list[tuple[str, bytes]]:
    """The images that are data URLs, which are taken out of the values."""
    found = []
    for name, url in [(name, reference_of(name, value) or "") for name, value in values.items()]:
        field = name.partition("[")[0]
        if field not in names or url[:5].lower() != "data:":
            continue
        del values[name]
        head, _, data = url.partition(",")
        try:
            if not _DATA_URL.fullmatch(f"{head},"):
                raise binascii.Error
            found.append((field, base64.b64decode(data, validate=True)))
        except binascii.Error as error:
            message = f"{field} is no data URL of an image. Expected data:image/png;base64, and the file in base64."
            raise Refused(message, field, "invalid_image") from error
    return found


def check_long(values: dict[str, Any], max_characters: int) -> dict[str, Any]:
    """The values of a long body, if they are two long texts and nothing else that would take long to handle."""
    num_long = 0
    for name, value in values.items():
        if isinstance(value, (dict, list)) or len(name) > _LONG:
            raise Refused("The body is long without a long prompt. Send a flat object.", name[:100], "invalid_json")
        if isinstance(value, str) and len(value) > max_characters:
            message = f"{name} has {len(value)} characters; the limit is {max_characters}. Shorten it."
            raise Refused(message, name, "string_above_max_length")
        num_long += isinstance(value, str) and len(value) > _LONG
    if num_long > 2:
        message = f"The body has {num_long} texts of more than {_LONG} characters; only prompts may be long."
        raise Refused(message, code="string_above_max_length")
    return values


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is given twice")
    return found


def read_form(task: Task, body: bytes) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """The texts and the files of a form."""
    texts, files = _parts(task, body)
    for name, content in take_data(texts, task.files):
        if any(name == other for other, _ in files):
            raise Refused(f"The field {name!r} is given twice.", name)
        files.append((name, content))
    check_long(texts, task.max_characters)
    for name, _ in files:
        if name not in task.files:
            known = ", ".join(each for each in task.files if not each.endswith("[]"))
            raise Refused(f"{name[:50]!r} is not a known file. Expected {known}.", name[:100], "unknown_field")
    return texts, files


def read_image(content: bytes, max_pixels: int, name: str = "image") -> PIL.Image.Image:
    """The pixels of an image; transparency is kept, as some models redraw what is transparent."""
    try:
        image = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        raise _bad_image(f"{name} is not a readable PNG, JPEG or WebP file.", name) from error
    if image.width * image.height > max_pixels:
        message = f"{name} is {image.width}x{image.height}; the limit is {max_pixels:,} pixels. Send a smaller one."
        raise Refused(message, name, "image_above_limit")
    # In the data of a scan no byte FF is followed by DA, so each pair begins one, but for a few within metadata.
    if image.format in ("JPEG", "MPO") and content.count(b"\xff\xda") > MAX_SCANS:
        raise _bad_image(f"{name} has more than {MAX_SCANS} scans. Save it as an ordinary JPEG.", name)
    try:
        is_transparent = "A" in image.getbands() or "transparency" in image.info
        turned = _turned(image)
        if turned.mode.startswith("I"):  # 16 bits, which would be clipped to white.
            turned = turned.convert("I").point(lambda level: level * (255 / 65535)).convert("L")
        return turned.convert("RGBA" if is_transparent else "RGB")
    except MemoryError as error:
        message = f"{name} needs more memory than is allowed. Save it without metadata, or smaller."
        raise _bad_image(message, name) from error
    except (OSError, ValueError, SyntaxError, LookupError) as error:
        raise _bad_image(f"{name} is damaged: its pixels cannot be decoded.", name) from error


def _turned(image: PIL.Image.Image) -> PIL.Image.Image:
    """As a camera noted it, if its notes can be read."""
    try:
        return PIL.ImageOps.exif_transpose(image)
    except (struct.error, TypeError, AttributeError):
        return image


def _bad_image(message: str, name: str) -> Refused:
    return Refused(message, name, "invalid_image")


def _parts(task: Task, body: bytes) -> tuple[dict[str, str], list[tuple[str, bytes]]]:
    """Everything in a form, with its name."""
    charset = parse_options_header(task.content_type)[1].get(b"charset", b"utf-8")
    if charset.lower() not in (b"utf-8", b"utf8"):
        raise Refused(f"The form is in the charset {charset[:40].decode('latin-1')!r}. Send UTF-8.")
    texts: dict[str, str] = {}
    files: list[tuple[str, bytes]] = []

    def check(name: str, *, is_file: bool = False) -> None:
        is_there = name in texts or any(name == other for other, _ in files)
        if is_there and not (is_file and name in SEVERAL and name not in texts):
            raise Refused(f"The field {name[:50]!r} is given twice.", name[:100])
        if len(texts) + len(files) == MAX_PARTS:
            raise Refused(f"The form has more than {MAX_PARTS} parts.")

    def on_text(field: Any) -> None:
        name = _text(field.field_name, "The name of a field")
        check(name)
        texts[name] = _text(field.value or b"", f"The field {name[:50]!r}")

    def on_file(file: Any) -> None:
        name = _text(file.field_name, "The name of a file")
        check(name, is_file=True)
        file.file_object.seek(0)
        files.append((name, file.file_object.read()))

    try:  # In memory, as there is a limit on that; a disk may be full.
        parser = create_form_parser(
            {"Content-Type": task.content_type.encode("latin-1")},
            on_text,
            on_file,
            {"MAX_MEMORY_FILE_SIZE": float("inf"), "UPLOAD_ERROR_ON_BAD_CTE": True},
        )
        for first in range(0, len(body), _PIECE):
            parser.write(body[first : first + _PIECE])
        parser.finalize()
    except FormParserError as error:
        raise Refused(f"The form cannot be read: {str(error)[:200] or 'it is not multipart/form-data'}") from error
    return texts, files


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{what} is not UTF-8. Send UTF-8.") from error


def read_body(task: Task, body: bytes) -> tuple[dict[str, Any], list[tuple[str, PIL.Image.Image]]]:
    """The values of a body, and its images by name."""
    values: dict[str, Any] = {}
    if task.content_type == IMAGE:
        files = [(task.files[0], body)]
    elif task.content_type == JSON:
        values = read_object(body)
        files = take_data(values, task.files)
        check_long(values, task.max_characters)
    else:
        values, files = read_form(task, body)
    images: list[tuple[str, PIL.Image.Image]] = []
    left = 2 * task.max_pixels  # Of all together: an image and its mask.
    while files:
        name, content = files.pop(0)
        images.append((name, read_image(content, task.max_pixels, name)))
        left -= images[-1][1].width * images[-1][1].height
        if left < 0:
            message = f"All images together have more than {2 * task.max_pixels:,} pixels. Send fewer or smaller ones."
            raise Refused(message, name, "image_above_limit")
    return values, images


def answer(source: IO[bytes], sink: IO[bytes]) -> None:
    """Read a task and its body, and write what it holds, or what is wrong."""
    task = Task(*json.loads(source.readline()))
    body = source.read()
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)  # SIGPROF ends the process.
    images: list[tuple[str, PIL.Image.Image]] = []
    try:
        values, images = read_body(task, body)
        found: dict[str, Any] = {"values": values, "images": [(name, each.mode, each.size) for name, each in images]}
    except Refused as error:
        found = {"message": error.message, "param": error.param, "code": error.code}
    sink.write(json.dumps(found).encode() + b"\n")
    for _, image in images:
        sink.write(image.tobytes())
    sink.flush()


def limit_memory(allowed: int) -> None:
    """Allow this process as many bytes as it has now and `allowed` more. Not every system can."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + allowed
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides.
    PIL.Image.MAX_IMAGE_PIXELS = None  # The limit is the task's.
    PIL.Image.preinit()
    limit_memory(int(sys.argv[1]))
    answer(sys.stdin.buffer, sys.stdout.buffer)
