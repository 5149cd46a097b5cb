"""What is counted."""

from __future__ import annotations

from samovar.engine import EngineStatus, Progress


def test_steps_are_computed_unless_they_were_skipped() -> None:
    status = EngineStatus("emoji")
    for is_computed in (True, False, False, None):
        status.note_step(Progress(1, 4, 0, 1, 0.5, is_computed))
    assert (status.steps_computed, status.steps_skipped) == (2, 2)
    assert (status.step_count, status.step_seconds) == (4, 2.0)


def test_the_time_of_a_request_follows_the_recent_ones() -> None:
    status = EngineStatus("emoji")
    status.note_request(10.0)
    assert status.request_seconds == 10.0
    for _ in range(30):
        status.note_request(1.0)
    assert 1.0 <= status.request_seconds < 1.01
