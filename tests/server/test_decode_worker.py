"""What a form holds, and what is refused of it."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import zlib

import PIL.Image
import pytest

from samovar.server import decode_worker
from samovar.server.decode_worker import Refused, Task, read_body, read_form, read_image

from .attacks import FORM_TYPE, form, jpeg_of_scans, png_chunk, png_of


@pytest.fixture(autouse=True)
def _as_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)


def encoded(image: PIL.Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


SMALL = encoded(PIL.Image.new("RGB", (24, 16), "teal"), "PNG")


def refusal(body: bytes, content_type: str = FORM_TYPE, max_characters: int = 1000) -> tuple[str | None, str, str]:
    with pytest.raises(Refused) as refused:
        read_form(Task(content_type, 1_000_000, max_characters, 1.0), body)
    return refused.value.param, refused.value.code, refused.value.message


@pytest.mark.parametrize("size", [(50_000, 50_000), (1001, 1000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_known_by_its_header(size: tuple[int, int]) -> None:
    with pytest.raises(Refused, match="the limit is 1,000,000 pixels") as refused:
        read_image(png_of(*size, data=zlib.compress(bytes(10_000))), 1_000_000)
    assert (refused.value.param, refused.value.code) == ("image", "image_above_limit")


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"<svg/>", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", bytes(1000), b"\xff\xd8\xff",
                png_of(16, 16, before=png_chunk(b"iCCP", b"A\0")), png_of(16, 16, before=png_chunk(b"iCCP")),
                png_of(16, 16, before=png_chunk(b"pHYs")), png_of(16, 16, before=png_chunk(b"tRNS"))]
)  # fmt: skip
def test_what_is_not_an_image_is_refused(content: bytes) -> None:
    with pytest.raises(Refused, match=r"not a readable PNG, JPEG or WebP|damaged") as refused:
        read_image(content, 1_000_000)
    assert refused.value.code == "invalid_image"


def test_formats_that_are_not_wanted_are_refused() -> None:
    for kind in ("GIF", "BMP", "TIFF", "PDF"):
        with pytest.raises(Refused, match="not a readable PNG, JPEG or WebP"):
            read_image(encoded(PIL.Image.new("RGB", (4, 4)), kind), 1_000_000)


def test_pixels_that_are_missing_are_noticed() -> None:
    whole = encoded(PIL.Image.effect_noise((64, 64), 50), "PNG")
    with pytest.raises(Refused, match="damaged"):
        read_image(whole[: len(whole) // 2], 1_000_000)


def test_transparency_is_kept_and_other_modes_become_rgb() -> None:
    assert read_image(encoded(PIL.Image.new("RGBA", (4, 4), (1, 2, 3, 0)), "PNG"), 100).mode == "RGBA"
    for mode in ("L", "P", "1", "I;16"):
        assert read_image(encoded(PIL.Image.new(mode, (4, 4)), "PNG"), 100).mode == "RGB"
    assert read_image(encoded(PIL.Image.new("CMYK", (4, 4)), "JPEG"), 100).mode == "RGB"


def test_photos_are_turned_and_sixteen_bits_are_not_white() -> None:
    photo, file = PIL.Image.new("RGB", (40, 20), "red"), io.BytesIO()
    photo.paste("blue", (0, 0, 20, 20))
    exif = photo.getexif()
    exif[0x0112] = 6
    photo.save(file, "JPEG", exif=exif)
    upright = read_image(file.getvalue(), 1000)
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5))[2] > 200, "blue is above"
    grey = PIL.Image.frombytes(
        "I;16", (256, 1), b"".join(level.to_bytes(2, "little") for level in range(0, 65536, 256))
    )
    shades = read_image(encoded(grey, "PNG"), 1000)
    assert [shades.getpixel((x, 0))[0] for x in (0, 128, 255)] == pytest.approx([0, 127, 254], abs=1)


def test_a_jpeg_may_have_many_scans_but_not_thousands() -> None:
    assert read_image(jpeg_of_scans(64, 64, 99), 1_000_000).size == (64, 64)
    with pytest.raises(Refused, match="more than 100 scans"):
        read_image(jpeg_of_scans(64, 64, 100), 1_000_000)
    photo = PIL.Image.effect_noise((512, 512), 100).convert("RGB")
    file = io.BytesIO()
    photo.save(file, "JPEG", progressive=True, quality=95, comment=b"\xff\xda" * 40)
    assert read_image(file.getvalue(), 1_000_000).size == (512, 512)


def test_a_form_is_read_as_it_was_written() -> None:
    task = Task(FORM_TYPE, 1000, 1000, 1.0)
    texts, files = read_form(task, form(SMALL, {b"user": "Zoë 😀".encode()}))
    assert (texts, files) == ({"prompt": "a cat", "user": "Zoë 😀"}, [("image", SMALL)])
    with_charset = task._replace(content_type=f"{FORM_TYPE}; charset=UTF-8")
    assert read_form(with_charset, form(SMALL, name=b"image[]"))[0] == {"prompt": "a cat"}


def test_no_disk_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be full."""
    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, lambda *_, **__: pytest.fail("a file was made"))
    large = png_of(24, 16, zlib.compress(bytes(4 * 16)), before=png_chunk(b"teXt", bytes(5_000_000)))
    assert read_form(Task(FORM_TYPE, 1000, 1000, 1.0), form(large))[1] == [("image", large)]


@pytest.mark.parametrize("charset", ["latin-1", "utf-7", "unicode_escape", "undefined", "idna", "\xff", "utf-16"])
def test_only_utf_8_is_read(charset: str) -> None:
    """Some of Python's codecs raise errors of their own, or give halves of characters."""
    assert "Send UTF-8" in refusal(form(SMALL), f"{FORM_TYPE}; charset={charset}")[2]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80", b"caf\xe9", b"\xf4\x90\x80\x80"])
def test_what_is_not_utf_8_is_refused(text: bytes) -> None:
    assert refusal(form(SMALL, {b"user": text}))[2] == "The field 'user' is not UTF-8. Send UTF-8."
    assert "is not UTF-8" in refusal(form(SMALL, {text: b"user"}))[2]
    assert "is not UTF-8" in refusal(form(SMALL, name=text))[2]


def test_forms_have_limits() -> None:
    assert refusal(form(SMALL, {b"user": b"x" * 1001}))[:2] == ("user", "string_above_max_length")
    many = {b"field %d" % number: b"" for number in range(50)}
    assert "more than 50 parts" in refusal(form(SMALL, many))[2]
    twice = form(None).removesuffix(b"--BOUNDARY--\r\n") + form(SMALL)
    assert refusal(twice)[:2] == ("prompt", "invalid_form")
    assert refusal(form(SMALL, name=b"x"))[:2] == ("x", "unknown_field")
    assert refusal(form(SMALL, name=b"mask"))[:2] == ("mask", "unknown_field"), "unless the task has it"


def joined(*forms: bytes) -> bytes:
    """One form of all parts; only the first has a prompt."""
    end, prompt = b"--BOUNDARY--\r\n", form(None).removesuffix(b"--BOUNDARY--\r\n")
    return (
        b"".join(each.removesuffix(end).removeprefix(prompt if number else b"") for number, each in enumerate(forms))
        + end
    )


def test_an_image_may_come_more_than_once_and_a_mask_may_not() -> None:
    task = Task(FORM_TYPE, 1000, 1000, 1.0, ("image", "image[]", "mask"))
    images = [form(SMALL), form(SMALL), form(SMALL, name=b"image[]"), form(SMALL, name=b"mask")]
    assert [name for name, _ in read_form(task, joined(*images))[1]] == ["image", "image", "image[]", "mask"]
    with pytest.raises(Refused, match="'mask' is given twice"):
        read_form(task, joined(*images, form(SMALL, name=b"mask")))
    with pytest.raises(Refused, match="more than 50 parts"):
        read_form(task, joined(*[form(SMALL)] * 51))


def test_images_have_a_limit_together() -> None:
    """Twice that of one: an image and its mask."""
    square = encoded(PIL.Image.new("RGB", (30, 30)), "PNG")
    task = Task(FORM_TYPE, 900, 1000, 1.0)
    values, images = read_body(task, joined(form(square), form(square)))
    assert (values, [image.size for _, image in images]) == ({"prompt": "a cat"}, [(30, 30)] * 2)
    with pytest.raises(Refused, match="All images together have more than 1,800 pixels"):
        read_body(task, joined(form(square), form(square), form(SMALL)))


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"--y\r\nnonsense", FORM_TYPE),
        (form(SMALL), "multipart/form-data"),
        (form(SMALL), "multipart/form-data; boundary="),
        (b"--BOUNDARY\r\nContent-Disposition: form-data\r\n\r\nx\r\n--BOUNDARY--\r\n", FORM_TYPE),
        (b"--BOUNDARY\r\n" + b"a: b\r\n" * 5000, FORM_TYPE),
        (b"--BOUNDARY\r\nContent-Disposition: form-data; name=a\r\nContent-Transfer-Encoding: x\r\n\r\n", FORM_TYPE),
    ],
)
def test_what_is_no_form_is_refused(body: bytes, content_type: str) -> None:
    assert refusal(body, content_type)[1] == "invalid_form"


def test_it_may_not_take_more_memory_than_allowed() -> None:
    """In a process of its own, as the limit stays."""
    code = "import decode_worker; decode_worker.limit_memory(64 * 2**20); bytes(32 * 2**20); bytes(96 * 2**20)"
    folder = str(decode_worker.__file__).rpartition("/")[0]
    ended = subprocess.run([sys.executable, "-c", f"import sys; sys.path.append({folder!r}); {code}"],
                           capture_output=True, text=True, check=False)  # fmt: skip
    assert ended.stderr.endswith("MemoryError\n"), ended.stderr
