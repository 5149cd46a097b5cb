"""What is counted."""

from __future__ import annotations

from samovar.engine import Progress
from samovar.engine.status import Counters
from samovar.engine.worker import Usage


def test_steps_are_computed_unless_they_were_skipped() -> None:
    counters = Counters()
    for is_computed in (True, False, False, None):
        counters.note_step(Progress(1, 4, 0, 1, 0.5, is_computed))
    assert (counters.steps_computed, counters.steps_skipped) == (2, 2)
    assert (counters.step_count, counters.step_seconds) == (4, 2.0)


def test_bytes_of_workers_that_ended_still_count_and_their_memory_does_not() -> None:
    counters = Counters()
    counters.note_usage(0, Usage(100, 5))
    counters.note_usage(1, Usage(100, 6))
    counters.note_usage(1, Usage(110, 7))
    assert (counters.memory_bytes, counters.bytes_moved) == (210, 12)
    counters.note_end_of_worker()
    assert (counters.memory_bytes, counters.bytes_moved) == (0, 12)
    counters.note_usage(0, Usage(90, 1))
    assert (counters.memory_bytes, counters.bytes_moved) == (90, 13)


def test_the_time_of_a_request_follows_the_recent_ones() -> None:
    counters = Counters()
    counters.note_request(10.0)
    assert counters.request_seconds == 10.0
    for _ in range(30):
        counters.note_request(1.0)
    assert 1.0 <= counters.request_seconds < 1.01
