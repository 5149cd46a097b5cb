"""What a body holds, what is refused of it, and that reading it costs others nothing."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import PIL.Image
import psutil
import pytest

from samovar.server.decode import IMAGE, JSON, DecodePool, Task, read_body, read_image
from samovar.server.errors import ApiError
from samovar.server.settings import Limits

from .attacks import FORM_TYPE, form, jpeg_of_scans, png_chunk, png_of


def encoded(image: PIL.Image.Image, kind: str) -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


SMALL = encoded(PIL.Image.new("RGB", (24, 16), "teal"), "PNG")
SLOW = form(png_of(16, 16, before=png_chunk(b"teXt") * 2_000_000))
"""A PNG that takes many seconds until its pixels begin."""
TASK = Task(FORM_TYPE, 1_000_000, 1000, 60.0)


@pytest.fixture(autouse=True)
def _as_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", None)


def refusal(body: bytes, task: Task = TASK) -> tuple[str | None, str, str]:
    with pytest.raises(ApiError) as refused:
        read_body(task, [body[:100], body[100:]])
    return refused.value.param, refused.value.code, str(refused.value)


# ------------------------------------------------------------------------------------------------ images


@pytest.mark.parametrize("size", [(50_000, 50_000), (1001, 1000), (2**31 - 1, 2**31 - 1)])
def test_a_bomb_is_known_by_its_header(size: tuple[int, int]) -> None:
    found = refusal(form(png_of(*size, data=zlib.compress(bytes(10_000)))))
    assert found[:2] == ("image", "image_above_limit")
    assert "the limit is 1,000,000 pixels" in found[2]


@pytest.mark.parametrize(
    "content", [b"", b"GIF89a", b"<svg/>", b"\x89PNG\r\n\x1a\n", b"%PDF-1.4", bytes(1000), b"\xff\xd8\xff",
                png_of(16, 16, before=png_chunk(b"iCCP", b"A\0")), png_of(16, 16, before=png_chunk(b"iCCP")),
                png_of(16, 16, before=png_chunk(b"pHYs")), png_of(16, 16, before=png_chunk(b"tRNS")),
                *(encoded(PIL.Image.new("RGB", (4, 4)), kind) for kind in ("GIF", "BMP", "TIFF", "PDF")),
                encoded(PIL.Image.effect_noise((64, 64), 50), "PNG")[:2000]]
)  # fmt: skip
def test_what_is_not_an_image_is_refused(content: bytes) -> None:
    with pytest.raises(ApiError, match=r"not a readable PNG, JPEG or WebP|damaged") as refused:
        read_image(content, 1_000_000)
    assert refused.value.code == "invalid_image"


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
    assert upright.info == {}, "notes stay behind"
    grey = PIL.Image.frombytes("I;16", (256, 1), b"".join(n.to_bytes(2, "little") for n in range(0, 65536, 256)))
    shades = read_image(encoded(grey, "PNG"), 1000)
    assert [shades.getpixel((x, 0))[0] for x in (0, 128, 255)] == pytest.approx([0, 127, 254], abs=1)


def test_a_jpeg_may_have_many_scans_but_not_thousands() -> None:
    assert read_image(jpeg_of_scans(64, 64, 99), 1_000_000).size == (64, 64)
    with pytest.raises(ApiError, match="more than 100 scans"):
        read_image(jpeg_of_scans(64, 64, 100), 1_000_000)
    photo, file = PIL.Image.effect_noise((512, 512), 100).convert("RGB"), io.BytesIO()
    photo.save(file, "JPEG", progressive=True, quality=95, comment=b"\xff\xda" * 40)
    assert read_image(file.getvalue(), 1_000_000).size == (512, 512)


# ------------------------------------------------------------------------------------------------ forms


def test_a_form_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a disk, which may be full."""
    for name in ("TemporaryFile", "NamedTemporaryFile", "mkstemp"):
        monkeypatch.setattr(tempfile, name, lambda *_, **__: pytest.fail("a file was made"))
    large = png_of(24, 16, zlib.compress(bytes(4 * 16)), before=png_chunk(b"teXt", bytes(5_000_000)))
    values, images = read_body(TASK, [form(large, {b"user": "Zoë 😀".encode()})])
    assert values == {"prompt": "a cat", "user": "Zoë 😀"}
    assert [(name, image.size) for name, image in images] == [("image", (24, 16))]


@pytest.mark.parametrize("text", [b"\xff\xfe", b"\xed\xa0\x80", b"caf\xe9", b"\xf4\x90\x80\x80"])
def test_what_is_not_utf_8_is_refused(text: bytes) -> None:
    for body in (form(SMALL, {b"user": text}), form(SMALL, {text: b"user"}), form(SMALL, name=text)):
        assert "Send multipart/form-data in UTF-8" in refusal(body)[2]


def joined(*forms: bytes) -> bytes:
    """One form of all parts; only the first has a prompt."""
    end, prompt = b"--BOUNDARY--\r\n", form(None).removesuffix(b"--BOUNDARY--\r\n")
    parts = (each.removesuffix(end).removeprefix(prompt if number else b"") for number, each in enumerate(forms))
    return b"".join(parts) + end


TWICE = form(None).removesuffix(b"--BOUNDARY--\r\n") + form(SMALL)


@pytest.mark.parametrize(
    ("body", "param", "code", "message"),
    [
        (form(SMALL, {b"user": b"x" * 1001}), "user", "string_above_max_length", "the limit is 1000"),
        (form(SMALL, {b"field %d" % number: b"" for number in range(50)}), None, "invalid_form", "more than 50 parts"),
        (joined(*[form(SMALL)] * 51), None, "invalid_form", "more than 50 parts"),
        (TWICE, None, "invalid_form", "a name is given twice"),
        (form(SMALL, name=b"mask"), "mask", "unknown_field", "is not a known file. Expected image"),
        (joined(form(SMALL), form(SMALL), form(SMALL, {b"image": b"data:x"}, name=b"image[]")), "image",
         "invalid_image", "image is no data URL of an image"),
    ],
    ids=range(6),
)  # fmt: skip
def test_forms_have_limits(body: bytes, param: str | None, code: str, message: str) -> None:
    found = refusal(body)
    assert found[:2] == (param, code)
    assert message in found[2]


def test_an_image_may_come_more_than_once_and_a_mask_may_not() -> None:
    task = TASK._replace(files=("image", "image[]", "mask"))
    images = [form(SMALL), form(SMALL), form(SMALL, name=b"image[]"), form(SMALL, name=b"mask")]
    assert [name for name, _ in read_body(task, [joined(*images)])[1]] == ["image", "image", "image[]", "mask"]
    assert "'mask' is given twice" in refusal(joined(*images, form(SMALL, name=b"mask")), task)[2]


def test_images_have_a_limit_together() -> None:
    """Twice that of one: an image and its mask."""
    square, task = encoded(PIL.Image.new("RGB", (30, 30)), "PNG"), TASK._replace(max_pixels=900)
    assert len(read_body(task, [joined(form(square), form(square))])[1]) == 2
    found = refusal(joined(form(square), form(square), form(SMALL)), task)
    assert "All images together have more than 1,800 pixels" in found[2]


# ------------------------------------------------------------------------------------------------ processes

LIMITS = Limits()
MEGABYTE = LIMITS.max_json_bytes


def run(test: Callable[[DecodePool], Awaitable[None]], max_memory: int = 2**28) -> None:
    async def main() -> None:
        pool = DecodePool(max_memory)
        try:
            await test(pool)
        finally:
            pool.close()

    asyncio.run(main())


async def ask(pool: DecodePool, body: bytes, **more: Any) -> Any:
    task = Task(FORM_TYPE, LIMITS.max_pixels, LIMITS.max_prompt_characters, 60.0)._replace(**more)
    try:
        values, images = await pool.read(task, [body[:1000], body[1000:]])
        return [image.size for _, image in images] or values
    except ApiError as error:
        return error


GOOD, SIZES = form(SMALL), [(24, 16)]


def test_bodies_are_read_in_processes_that_stay() -> None:
    async def test(pool: DecodePool) -> None:
        before = {child.pid for child in psutil.Process().children()}
        assert await asyncio.gather(*(ask(pool, GOOD) for _ in range(10))) == [SIZES] * 10
        made = [each for each in psutil.Process().children() if each.pid not in before]
        (child,) = [each for each in made if "spawn_main" in str(each.cmdline())]
        bad = await ask(pool, form(b"no picture"))
        assert (bad.param, bad.code) == ("image", "invalid_image")
        assert await ask(pool, SMALL, content_type=IMAGE) == SIZES
        assert child.is_running()

    run(test)


def test_what_takes_too_long_is_ended_and_holds_up_nobody() -> None:
    """Ones that decode for seconds, of which some are given up; small ones do not wait for them."""

    async def test(pool: DecodePool) -> None:
        left = [asyncio.create_task(ask(pool, SLOW, cpu_s=1.0)) for _ in range(3)]
        slow = asyncio.create_task(ask(pool, SLOW, cpu_s=1.0))
        await asyncio.sleep(0.1)
        assert await ask(pool, GOOD) == SIZES
        assert not slow.done()
        for task in left:
            task.cancel()
        found = await slow
        assert (found.param, found.code) == ("image", "invalid_image")
        assert "took more than 1 s or too much memory to read" in str(found)
        large = form(png_of(24, 16, zlib.compress(bytes(4 * 16)), before=png_chunk(b"teXt", bytes(3_000_000))))
        assert await ask(pool, large) == SIZES, "it has been replaced"

    run(test)


def test_the_limit_on_time_ends_with_the_body() -> None:
    """Also of one that is refused: whatever the process did next would be ended by it."""
    read_body(TASK, [GOOD])
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    refusal(form(b"no picture"))
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_what_takes_too_much_memory_is_refused() -> None:
    """A JPEG whose coefficients alone are more than is allowed."""

    async def test(pool: DecodePool) -> None:
        huge = await ask(pool, form(jpeg_of_scans(65_000, 4_000, 1)), max_pixels=10**9)
        assert (huge.param, huge.code) == ("image", "invalid_image")
        assert await ask(pool, GOOD) == SIZES

    run(test, 2**26)


def test_the_longest_prompts_are_read_however_they_are_written() -> None:
    async def test(pool: DecodePool) -> None:
        for character in ("a", "\n", '"', "\\", "é", "猫", "😀", "\ud800"):
            values = {"prompt": character * LIMITS.max_prompt_characters, "negative_prompt": character * 31_999, "n": 2}
            body = json.dumps(values).encode()
            assert len(body) < MEGABYTE
            assert await ask(pool, body, content_type=JSON) == values

    run(test)


def test_what_takes_long_to_parse_is_parsed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would stop the server for 8 to 80 ms."""
    bodies = {
        b"[" + b"[]," * (MEGABYTE // 3) + b"0]": "invalid_json",
        b"[" + b"{}," * (MEGABYTE // 3) + b"0]": "invalid_json",
        b'{"a":[' + b"1," * (MEGABYTE // 2) + b"0]}": "invalid_json",
        b"{" + b",".join(b'"%x":1' % number for number in range(MEGABYTE // 9)) + b"}": "invalid_json",
        b'{"' + b"a" * MEGABYTE + b'":1}': "invalid_json",
        b'{"prompt":"' + b"a\\n" * (MEGABYTE // 3) + b'"}': "string_above_max_length",
        json.dumps(dict.fromkeys("abcdef", "\n" * 10000)).encode(): "string_above_max_length",
        b"1" * MEGABYTE: "invalid_json",
        b"[" * MEGABYTE: "invalid_json",
        b"\xff" * MEGABYTE: "invalid_json",
    }
    monkeypatch.setattr("samovar.server.decode.read_object", lambda content: pytest.fail("it was parsed here"))

    async def test(pool: DecodePool) -> None:
        assert [(await ask(pool, body, content_type=JSON)).code for body in bodies] == list(bodies.values())

    run(test)


ORPHAN = """
import asyncio, os, sys
from samovar.server.decode import JSON, DecodePool, Task
pool = DecodePool(2**28)
asyncio.run(pool.read(Task(JSON, 1, 10**6, 9.0), [b'{"prompt": "' + b"a" * 10**5 + b'"}']))
print(*pool._pools[0]._processes, *pool._pools[1]._processes, flush=True)
os.kill(os.getpid(), 9)
"""


def test_processes_end_with_the_server() -> None:
    ended = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=300, check=False)
    (number,) = map(int, ended.stdout.split())
    if psutil.pid_exists(number):
        psutil.Process(number).wait(60)
    assert "Traceback" not in ended.stderr
