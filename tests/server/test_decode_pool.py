"""Bodies are read in processes that can be ended, each in its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable

import psutil
import pytest

from samovar.server import Limits
from samovar.server.decode_pool import DecodePool
from samovar.server.decode_worker import JSON
from samovar.server.errors import ApiError

from .attacks import FORM_TYPE, form, jpeg_of_scans, png_chunk, png_of
from .test_decode_worker import SMALL

GOOD = form(SMALL)
SLOW = form(png_of(16, 16, before=png_chunk(b"teXt") * 2_000_000))
"""A PNG that takes many seconds until its pixels begin."""


def run(test: Callable[[DecodePool], Awaitable[None]], **limits: int) -> None:
    async def main() -> None:
        pool = DecodePool(Limits(**limits))
        try:
            await test(pool)
        finally:
            pool.close()

    asyncio.run(main())


def processes() -> set[int]:
    children = psutil.Process().children()
    return {child.pid for child in children if "decode_worker" in " ".join(child.cmdline())}


async def ask(pool: DecodePool, body: bytes) -> tuple[int, int] | ApiError:
    try:
        return (await pool.read(FORM_TYPE, [body[:1000], body[1000:]], ("image",)))[1]["image"][0].size
    except ApiError as error:
        return error


def test_forms_are_read_each_in_a_process_that_ends() -> None:
    async def test(pool: DecodePool) -> None:
        found = await asyncio.gather(*(ask(pool, GOOD) for _ in range(10)))
        assert found == [(24, 16)] * 10
        bad = await ask(pool, form(b"no picture"))
        assert isinstance(bad, ApiError)
        assert (bad.status, bad.param, bad.code) == (400, "image", "invalid_image")
        assert await ask(pool, GOOD) == (24, 16)
        assert len(processes()) <= 1, "but for one that is ready"

    run(test)
    assert not processes()


def test_a_picture_of_thousands_of_scans_holds_up_nobody() -> None:
    """Twelve at once of 2048 x 2048: each would take seconds to decode, and a small one waits behind them."""

    async def test(pool: DecodePool) -> None:
        attack = form(jpeg_of_scans(2048, 2048, 60_000))
        found = await asyncio.gather(*(ask(pool, attack) for _ in range(12)), ask(pool, GOOD))
        assert found.pop() == (24, 16)
        assert all(isinstance(each, ApiError) and "more than 100 scans" in each.message for each in found)

    run(test)


def test_what_takes_too_long_is_ended_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.server.decode_pool._WALL_S", 1e6)

    async def test(pool: DecodePool) -> None:
        slow, good = await asyncio.gather(ask(pool, SLOW), ask(pool, GOOD))
        assert good == (24, 16)
        assert isinstance(slow, ApiError)
        assert (slow.status, slow.code) == (400, "body_too_slow")
        assert "took more than 1 s to read" in slow.message
        assert [await ask(pool, GOOD) for _ in range(4)] == [(24, 16)] * 4

    run(test, max_body_s=1)


def test_megabytes_of_json_hold_up_no_form() -> None:
    """They are refused in a few milliseconds each, and a form that came after many would wait for all of them."""
    ended: list[str] = []

    async def read_object(pool: DecodePool) -> None:
        with pytest.raises(ApiError, match="quality has 1000000 characters"):
            await pool.read(JSON, [json.dumps({"prompt": "x", "quality": "auto" * 250_000}).encode()])
        ended.append("object")

    async def test(pool: DecodePool) -> None:
        reading = [asyncio.create_task(read_object(pool)) for _ in range(60)]
        await asyncio.sleep(0)
        assert await ask(pool, GOOD) == (24, 16)
        ended.append("form")
        await asyncio.gather(*reading)
        assert ended.index("form") < 40

    run(test)


def test_what_takes_too_much_memory_is_refused() -> None:
    """A JPEG whose coefficients alone are four times the limit on memory."""

    async def test(pool: DecodePool) -> None:
        huge = await ask(pool, form(jpeg_of_scans(65_000, 4_000, 1)))
        assert isinstance(huge, ApiError)
        assert (huge.status, huge.code) == (400, "image_above_limit")
        pool._limits = Limits(max_pixels=10**9)  # Behind a limit on memory that is smaller than it allows.
        huge = await ask(pool, form(jpeg_of_scans(65_000, 4_000, 1)))
        assert isinstance(huge, ApiError)
        assert (huge.status, huge.code) == (400, "invalid_image")
        pool._limits = Limits()
        assert await ask(pool, GOOD) == (24, 16)

    run(test)


def test_who_leaves_takes_the_process_along() -> None:
    async def test(pool: DecodePool) -> None:
        tasks = [asyncio.create_task(ask(pool, SLOW)) for _ in range(5)]
        await asyncio.sleep(0.3)
        assert pool.num_waiting == 4
        assert await ask(pool, GOOD) == (24, 16), "large ones have one process, and leave the other"
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert await ask(pool, GOOD) == (24, 16)
        assert pool.num_waiting == 0

    run(test, max_body_s=60)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGSEGV, 400), (signal.SIGKILL, 503)])
def test_a_crash_is_the_pictures_fault_and_the_systems_is_not(number: int, status: int) -> None:
    async def test(pool: DecodePool) -> None:
        task = asyncio.create_task(ask(pool, SLOW))
        await asyncio.sleep(0.3)
        for process in processes():
            os.kill(process, number)
        found = await task
        assert isinstance(found, ApiError)
        assert found.status == status
        assert await ask(pool, GOOD) == (24, 16)

    run(test, max_body_s=60)


def test_closing_ends_what_is_read() -> None:
    async def test(pool: DecodePool) -> None:
        tasks = [asyncio.create_task(ask(pool, SLOW)) for _ in range(3)]
        await asyncio.sleep(0.3)
        pool.close()
        for task in tasks:
            found = await task
            assert isinstance(found, ApiError)
            assert (found.status, found.code) == (503, "shutting_down")
        assert not processes()

    run(test, max_body_s=60)


LIMITS = Limits()
MEGABYTE = LIMITS.max_json_bytes


def test_the_longest_prompts_are_read_however_they_are_written() -> None:
    async def test(pool: DecodePool) -> None:
        for character in ("a", "\n", '"', "\\", "é", "猫", "😀", "\ud800"):
            values = {"prompt": character * LIMITS.max_prompt_characters, "negative_prompt": character * 31_999, "n": 2}
            body = json.dumps(values).encode()
            assert len(body) < MEGABYTE
            assert await pool.read(JSON, [body[:9], body[9:]]) == (values, {})

    run(test)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" + b"[]," * (MEGABYTE // 3) + b"0]", "invalid_json"),
        (b"[" + b"{}," * (MEGABYTE // 3) + b"0]", "invalid_json"),
        (b'{"a":[' + b"1," * (MEGABYTE // 2) + b"0]}", "invalid_json"),
        (b"{" + b",".join(b'"%x":1' % number for number in range(MEGABYTE // 9)) + b"}", "invalid_json"),
        (b'{"' + b"a" * MEGABYTE + b'":1}', "invalid_json"),
        (b'{"prompt":"' + b"a\\n" * (MEGABYTE // 3) + b'"}', "string_above_max_length"),
        (json.dumps(dict.fromkeys("abcdef", "\n" * 10000)).encode(), "string_above_max_length"),
        (b"1" * MEGABYTE, "invalid_json"),
        (b"[" * MEGABYTE, "invalid_json"),
        (b"\xff" * MEGABYTE, "invalid_json"),
    ],
    ids=range(10),
)
def test_what_takes_long_to_parse_is_parsed_elsewhere(body: bytes, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these would stop the server for 8 to 80 ms."""
    monkeypatch.setattr("samovar.server.decode_worker.read_object", lambda content: pytest.fail("it was parsed here"))

    async def test(pool: DecodePool) -> None:
        with pytest.raises(ApiError) as refused:
            await pool.read(JSON, [body])
        assert (refused.value.status, refused.value.code) == (400, code)

    run(test)
