"""What is asked for becomes a request for the engine, with all that it needs, and within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import starlette.requests

from samovar.engine import OmniDiffusionSamplingParams, OutputKind, PipelineFacts
from samovar.engine.inputs import Inputs
from samovar.omni import AsyncOmni
from samovar.server.errors import ApiError
from samovar.server.memory import Ledger
from samovar.server.request import ClientRequest, check_type, client_request, receive_body
from samovar.server.schemas import AudioBody, GenerationBody, VideoBody
from samovar.server.settings import Limits, ServerConfig
from samovar.server.state import AppState

TAKES = frozenset({"prompt", "height", "width", "num_frames", "image", "mask_image"})
FILM = OutputKind("video", fps=16.0, frames_argument="num_frames", frames=81, frame_group=4)
SOUND = OutputKind("audio", rate=100, duration_argument="seconds")
MUSIC = OutputKind("audio", rate=44_100, duration_argument="seconds", seconds=60.0)
IMAGE = OutputKind()
KINDS: Any = {"image": GenerationBody, "video": VideoBody, "audio": AudioBody}


def wanted(
    output: OutputKind,
    usual: tuple[int, int] | None = None,
    images: Any = None,
    config: Any = None,
    takes: tuple[str, ...] = ("image",),
    **values: Any,
) -> ClientRequest[Any]:
    """A request to a model that makes this; nothing is loaded."""
    facts = PipelineFacts("Pipe", TAKES, 8, output=output, size=usual, inputs=Inputs(takes))
    omni: Any = SimpleNamespace(
        config=AsyncOmni("emoji", device="cpu").config, facts=facts, output=output, can_edit=True,
        defaults=OmniDiffusionSamplingParams(),
    )  # fmt: skip
    state = AppState(omni, ServerConfig(**(config or {})), "serving", is_loaded=True)
    prompt = {"input" if output.kind == "audio" else "prompt": "a"}
    return client_request(state, KINDS[output.kind], prompt | values, images or {})


@pytest.mark.parametrize(
    ("output", "values", "limits", "param", "message"),
    [
        (FILM, {}, {"max_frames": 80}, "num_frames", "The video has 81 frames; the limit is 80 (--max-frames)"),
        (FILM, {}, {"max_seconds": 5}, "seconds", "The video has 5.0625 seconds; the limit is 5 (--max-seconds)"),
        (FILM, {}, {"max_video_pixels": 10**7}, "size", "81 frames of 832x480 are 32,348,160 pixels; the limit is"),
        (FILM, {}, {"max_pixels": 10**5}, "size", "size 832x480 is 399,360 pixels; the limit is 100,000 (--max-p"),
        (FILM, {"num_frames": 200, "size": None}, {}, "size", "200 frames of the model's size, taken as 1,048,576"),
        (MUSIC, {}, {"max_seconds": 30}, "audio_length", "The audio has 60 seconds; the limit is 30 (--max-seconds)"),
        (SOUND, {"audio_length": 301.0}, {}, "audio_length", "The audio has 301 seconds; the limit is 300"),
        (IMAGE, {"size": "3000x3000"}, {}, "size", "size 3000x3000 is 9,000,000 pixels; the limit is 4,194,304"),
        (IMAGE, {"size": "8x17000"}, {}, "size", "size 8x17000 has a side above 16,383 pixels"),
    ],
)  # fmt: skip
def test_it_has_limits(output: OutputKind, values: Any, limits: Any, param: str, message: str) -> None:
    size = None if "num_frames" in values else (480, 832)
    with pytest.raises(ApiError) as refused:
        wanted(output, size, config={"limits": Limits(**limits)}, **values)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert message in refused.value.message
    wanted(IMAGE, config={"limits": Limits(max_video_pixels=1)}, size="2048x2048") if output is IMAGE else None


def test_all_that_is_held_counts() -> None:
    """Eight bytes a pixel: of what is sent, of every frame, and of previews."""
    film, image = OutputKind("video", fps=10.0, frames_argument="num_frames", frames=11), PIL.Image.new("RGB", (64, 32))
    found = wanted(film, (16, 32), {"image": [image]}, partial_images=2, width=32, height=16)
    assert found.size.num_bytes == 8 * (64 * 32 + (11 + 2) * 32 * 16)
    assert wanted(MUSIC, audio_length=10).size.num_bytes == 441_000 * 16
    many = {"max_memory": 2**30, "limits": Limits(max_frames=10**6, max_seconds=10**6, max_video_pixels=2**40)}
    with pytest.raises(ApiError, match=r"the limit is 805,306,368 .--max-memory"):
        wanted(film, (16, 32), config=many, num_frames=400_000)
    assert wanted(film, (16, 32)).state.images.most == 8 * Limits().max_video_pixels, "for its largest video"
    assert wanted(film, (16, 32), config={"max_memory": "1GiB"}).state.images.most == 3 * 2**28


# ------------------------------------------------------------------------------------------------ what arrives


def request(messages: Iterable[dict[str, Any]] = (), **headers: str) -> starlette.requests.Request:
    """A request whose body comes in these messages, and then stalls."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return starlette.requests.Request({"type": "http", "headers": raw}, receive)  # type: ignore[arg-type]


def part(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": more}


def received(asked: starlette.requests.Request, ledger: Ledger, seconds: float = 600) -> list[bytes]:
    async def run() -> list[bytes]:
        with ledger.hold() as hold:
            return await asyncio.wait_for(receive_body(asked, 100, hold), seconds)

    try:
        return asyncio.run(run())
    finally:
        assert ledger.used == 0


def test_who_stalls_gives_way_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.server.request._STALL_S", 0.01)
    with pytest.raises(ApiError) as refused:
        received(request([part(bytes(60))]), Ledger(200, "bodies"))
    assert (refused.value.status, refused.value.code) == (408, "body_stalled")
    with pytest.raises(TimeoutError):  # With enough room it may take its time; the connection has a limit on that.
        received(request([part(bytes(60))]), Ledger(2000, "bodies"), 0.3)


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "x" * 9999,
             *(f"application/json; charset={name}" for name in ("latin-1", "utf-7", '"unicode_escape"', "undefined"))]
)  # fmt: skip
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_type(request(content_type=kind), "application/json")
    assert (refused.value.status, refused.value.code) == (415, "unsupported_media_type")
    assert len(refused.value.message) < 250


# ------------------------------------------------------------------------------------------------ what is held


def test_short_parts_cost_more_than_their_bytes_and_large_bodies_leave_room_for_small_ones() -> None:
    """A part of one byte is an object of forty."""
    ledger = Ledger(40 * 2**20, "bodies")
    short, large, small = ledger.hold(), ledger.hold(), ledger.hold()
    for _ in range(1000):
        short.add_part(b"x")
    assert ledger.used >= 40_000
    short.release()
    for _ in range(479):
        large.add_part(bytes(2**16))
    with pytest.raises(ApiError):
        large.add_part(bytes(2**16))
    for _ in range(30):
        small.add_part(bytes(2**16))
