"""When a worker may be started again."""

from __future__ import annotations

from samovar.engine import Restarts


def test_the_first_is_replaced_at_once_and_the_next_ones_later_and_later() -> None:
    restarts = Restarts(max_crashes=10)
    assert restarts.next_start(5.0) == 5.0
    delays = []
    for now in (10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0):
        restarts.note_crash(now)
        delays.append(restarts.next_start(now) - now)
        assert not restarts.is_open(now)
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0]
    restarts.note_crash(17.0)
    assert restarts.next_start(17.0) == 25.0, "and no later"


def test_crashes_long_ago_do_not_count() -> None:
    restarts = Restarts()
    for number in range(40):
        now = 30.0 * number
        restarts.note_crash(now)
        assert not restarts.is_open(now)
        assert restarts.next_start(now) <= now + 0.5


def test_five_in_a_minute_open_the_circuit_until_one_succeeds() -> None:
    restarts = Restarts()
    for now in (0.0, 10.0, 20.0, 30.0):
        restarts.note_crash(now)
        restarts.note_success()
    assert not restarts.is_open(30.0)
    restarts.note_crash(59.0)
    assert restarts.is_open(59.0)
    assert restarts.next_start(59.0) == 119.0
    assert restarts.is_open(118.9)
    assert not restarts.is_open(119.0), "one is tried"
    restarts.note_crash(120.0)
    assert restarts.is_open(120.0), "and crashes too"
    assert restarts.next_start(121.0) == 180.0
    restarts.note_success()
    assert not restarts.is_open(120.0)
    assert restarts.next_start(181.0) == 181.0
