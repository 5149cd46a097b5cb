"""What is held for clients has a limit, and is given back."""

from __future__ import annotations

import pytest

from samovar.server.errors import ApiError
from samovar.server.memory import Ledger


def test_what_is_above_the_limit_is_refused_and_changes_nothing() -> None:
    ledger = Ledger(1000, "bodies")
    first = ledger.hold()
    first.add(600)
    with ledger.hold() as second:
        second.add(400)
        with pytest.raises(ApiError, match="holds bodies of 1,000 bytes for others; its limit is 1,000") as refused:
            second.add(1)
        assert (refused.value.status, refused.value.code) == (503, "memory_full")
        assert refused.value.headers == {"Retry-After": "1"}
        assert ledger.used == 1000
    assert ledger.used == 600
    first.release()
    first.release()
    assert ledger.used == 0


def test_short_parts_cost_more_than_their_bytes() -> None:
    """A part of one byte is an object of forty."""
    ledger = Ledger(10**9, "bodies")
    hold = ledger.hold()
    for _ in range(1000):
        hold.add_part(b"x")
    assert ledger.used >= 40_000


def test_large_bodies_leave_room_for_small_ones() -> None:
    ledger = Ledger(40 * 2**20, "bodies")
    large, small = ledger.hold(), ledger.hold()
    for _ in range(479):
        large.add_part(bytes(2**16))
    with pytest.raises(ApiError):
        large.add_part(bytes(2**16))
    for _ in range(30):
        small.add_part(bytes(2**16))


def test_it_is_tight_above_a_half() -> None:
    ledger = Ledger(1000, "bodies")
    hold = ledger.hold()
    hold.add(500)
    assert not ledger.is_tight
    hold.add(1)
    assert ledger.is_tight
