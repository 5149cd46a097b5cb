"""Bodies are measured as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from samovar.server.errors import ApiError
from samovar.server.memory import Ledger
from samovar.server.request import check_type, receive_body


def request(messages: Iterable[dict[str, Any]] = (), **headers: str) -> Request:
    """A request whose body comes in these messages, and then stalls."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        for message in left:
            return message
        await asyncio.sleep(3600)
        raise AssertionError

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw}, receive)  # type: ignore[arg-type]


def part(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": content, "more_body": more}


def received(asked: Request, ledger: Ledger, max_bytes: int = 100) -> list[bytes]:
    async def run() -> list[bytes]:
        with ledger.hold() as hold:
            return await receive_body(asked, max_bytes, hold)

    try:
        return asyncio.run(run())
    finally:
        assert ledger.used == 0


def test_a_body_is_kept_in_its_pieces() -> None:
    ledger = Ledger(1000, "bodies")
    assert received(request([part(b"ab"), part(b""), part(b"c", more=False)]), ledger) == [b"ab", b"c"]


def test_too_much_is_refused_whether_announced_or_not() -> None:
    ledger = Ledger(10_000, "bodies")
    for asked in (request(content_length="101"), request([part(bytes(60)), part(bytes(41))])):
        with pytest.raises(ApiError) as refused:
            received(asked, ledger)
        assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_who_leaves_is_forgotten() -> None:
    with pytest.raises(ClientDisconnect):
        received(request([part(bytes(60)), {"type": "http.disconnect"}]), Ledger(1000, "bodies"))


def test_who_stalls_gives_way_when_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.server.request._STALL_S", 0.01)
    with pytest.raises(ApiError) as refused:
        received(request([part(bytes(60))]), Ledger(200, "bodies"))
    assert (refused.value.status, refused.value.code) == (408, "body_stalled")
    with pytest.raises(TimeoutError):  # With enough room it may take its time; the connection has a limit on that.
        received_within(request([part(bytes(60))]), Ledger(2000, "bodies"), 0.3)


def received_within(asked: Request, ledger: Ledger, seconds: float) -> None:
    async def run() -> None:
        with ledger.hold() as hold:
            await asyncio.wait_for(receive_body(asked, 100, hold), seconds)

    asyncio.run(run())


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonp", "x" * 9999]
)
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_type(request(content_type=kind), "application/json")
    assert (refused.value.status, refused.value.code) == (415, "unsupported_media_type")
    assert len(refused.value.message) < 200


def test_the_right_kind_may_have_parameters() -> None:
    check_type(request(content_type="Application/JSON; charset=utf-8"), "application/json")
