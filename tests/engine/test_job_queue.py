"""The queue: its bound, order and deadlines; and ranks that agree, hang or disagree."""

from __future__ import annotations

import random
from typing import Any

import pytest

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import (
    CancelledRequestError,
    EngineError,
    QueueFullError,
    SettingError,
    StepTimeoutError,
    WorkerLostError,
)
from samovar.engine import GenerationResult, Job, Request
from samovar.engine.job_queue import SETTLE_S, JobQueue, Running
from samovar.engine.messages import Finished
from samovar.engine.worker import Outcome, Usage

NOBODY: Any = None
"""A supervisor that is never asked."""


def queued(name: str = "a cat", *, priority: int = 0, deadline: float | None = None, **params: Any) -> Job:
    request = Request(name, OmniDiffusionSamplingParams(**params))
    return Job(NOBODY, request, lambda event: None, id=name, priority=priority, deadline=deadline)


def test_higher_priorities_go_first_and_among_equals_who_came_first() -> None:
    waiting = JobQueue(100)
    jobs = [queued(str(number), priority=random.Random(number).randrange(3)) for number in range(50)]
    for each in jobs:
        waiting.add(each, 0.0)
    expected = sorted(jobs, key=lambda each: -each.priority)
    assert waiting.jobs == expected
    assert [waiting.position(each) for each in expected] == list(range(1, 51))
    assert [waiting.pop() for _ in expected] == expected
    assert waiting.pop() is None
    assert waiting.position(jobs[0]) == 0


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    waiting = JobQueue(2)
    waiting.add(queued(), 4.0)
    waiting.add(queued(), 4.0)
    with pytest.raises(QueueFullError, match=r"2 requests are waiting.*in 12 s") as caught:
        waiting.add(queued(priority=9), 4.0)
    assert caught.value.retry_after_s == 12.0
    assert len(waiting.jobs) == 2
    with pytest.raises(QueueFullError) as caught:
        waiting.add(queued(), 0.0)
    assert caught.value.retry_after_s == 1.0, "nothing has been served yet"


def test_what_waits_too_long_is_taken_out() -> None:
    waiting = JobQueue(9)
    early, late, patient = queued(deadline=5.0), queued(deadline=7.0), queued()
    for each in (patient, late, early):
        waiting.add(each, 0.0)
    assert waiting.next_deadline() == 5.0
    assert waiting.pop_overdue(4.9) == []
    assert waiting.pop_overdue(5.0) == [early]
    assert waiting.next_deadline() == 7.0
    assert waiting.pop_overdue(99.0) == [late]
    assert waiting.next_deadline() is None
    waiting.remove([patient])
    assert waiting.jobs == []


GOOD = GenerationResult("a cat", (), (3,), OmniDiffusionSamplingParams(), 1.0)
USAGE = Usage(0, 0)


def ended(*outcomes: Outcome | None) -> Running:
    running = Running(1, queued(), last_heard=0.0)
    for rank, outcome in enumerate(outcomes):
        running.note(rank, Finished(1, outcome, USAGE), now=10.0)
    return running


@pytest.mark.parametrize(
    ("outcomes", "can_go_on"),
    [
        ([GOOD], True),
        ([EngineError("a bug")], True),
        ([GOOD, None], True),
        ([SettingError("no"), SettingError("no")], True),
        ([CancelledRequestError("stop"), CancelledRequestError("stop")], True),
        ([EngineError("a bug"), EngineError("a bug")], False),
        ([GOOD, SettingError("no")], False),
        ([SettingError("no"), CancelledRequestError("stop")], False),
    ],
)
def test_only_ranks_at_the_same_place_go_on(outcomes: list[Outcome | None], can_go_on: bool) -> None:
    assert ended(*outcomes).can_go_on is can_go_on


def test_one_that_fails_gives_the_others_little_time_and_is_named() -> None:
    assert ended(GOOD).must_settle_by is None
    running = ended(GOOD, EngineError("a bug"))
    assert running.must_settle_by == 10.0 + SETTLE_S
    assert running.errors() == "rank 1: a bug"


@pytest.fixture
def running() -> Running:
    return Running(1, queued(), last_heard=100.0, limit_s=7.0)


def test_a_step_has_a_time_limit(running: Running) -> None:
    assert running.next_timeout() == 107.0
    assert running.timeout_error(106.9) is None
    error = running.timeout_error(107.0)
    assert isinstance(error, StepTimeoutError)
    assert "sent nothing for 7 s, before its first step" in str(error)


def test_a_worker_may_be_silent_again_for_as_long_as_it_was(running: Running) -> None:
    """A step of 5 s says that one of 40 s is slow, not hung."""
    running.hear(105.0)
    assert running.next_timeout() == 105.0 + 50.0
    running.hear(106.0)
    assert running.timeout_error(155.9) is None
    assert isinstance(running.timeout_error(156.0), StepTimeoutError)


def test_ranks_must_follow_one_that_failed(running: Running) -> None:
    running.must_settle_by = 105.0
    assert running.next_timeout() == 105.0
    assert running.timeout_error(104.9) is None
    assert isinstance(running.timeout_error(105.0), WorkerLostError)
