"""The queue: its bound, order, deadlines and batches; and ranks that agree, hang or disagree."""

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
from samovar.engine.job_queue import SETTLE_S, Batch, JobQueue
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
    assert [waiting.pop_batch(1)[0] for _ in expected] == expected
    assert waiting.pop_batch(1) == []
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


def test_only_what_fits_goes_together() -> None:
    waiting = JobQueue(99)
    first = queued("first", height=64, seed=1)
    same = queued("same", height=64, seed=2)
    other = queued("other", height=32)
    two = queued("two", height=64, num_outputs_per_prompt=2)
    last = queued("last", height=64)
    for each in (first, other, same, two, last):
        waiting.add(each, 0.0)
    assert waiting.pop_batch(3) == [first, same, last], "two pictures are one too many"
    assert waiting.pop_batch(3) == [other]
    assert waiting.pop_batch(1) == [two], "more pictures than a call can make take several calls"
    assert waiting.jobs == []


def test_as_many_go_together_as_are_best_and_more_are_waited_for_only_if_that_is_better() -> None:
    sizes = {1: 1, 2: 1, 3: 1, 4: 4}
    best = lambda kind, images: sizes[images]  # noqa: E731
    waiting = JobQueue(99)
    jobs = [queued(str(number)) for number in range(7)]
    for each in jobs:
        waiting.add(each, 0.0)
    assert waiting.pop_batch(4, 0, best) == jobs[:4]
    assert waiting.pop_batch(4, 1, best) == [], "with one more they would be four"
    assert waiting.pop_batch(4, 0, best) == jobs[4:5]
    assert waiting.pop_batch(4, 1, best) == jobs[5:6], "three are no better than one"
    assert waiting.pop_batch(1, 9, best) == jobs[6:]
    assert waiting.pop_batch(4, 4, best) == []
    options = queued("options", options={"joint_attention_kwargs": {}})
    waiting.add(options, 0.0)
    assert waiting.pop_batch(4, 3, best) == [options], "none will fit with it"


def test_an_image_goes_alone() -> None:
    from PIL import Image

    plain, edit = Request("a"), Request("a", image=Image.new("RGB", (8, 8)))
    assert plain.fits_with(Request("b"))
    assert not plain.fits_with(edit)
    assert not edit.fits_with(edit)


GOOD = GenerationResult("a cat", (), (3,), OmniDiffusionSamplingParams(), 1.0)
USAGE = Usage(0, 0)


def batch_with(*outcomes: Outcome | None) -> Batch:
    batch = Batch(1, [queued()], last_heard=0.0)
    for rank, outcome in enumerate(outcomes):
        batch.note(rank, Finished(1, (outcome,), USAGE), now=10.0)
    return batch


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
    assert batch_with(*outcomes).can_go_on is can_go_on


def test_one_that_fails_gives_the_others_little_time_and_is_named() -> None:
    assert batch_with(GOOD).must_settle_by is None
    batch = batch_with(GOOD, EngineError("a bug"))
    assert batch.must_settle_by == 10.0 + SETTLE_S
    assert batch.errors() == "rank 1: a bug"


ALLOWED_S = 7.0


@pytest.fixture
def batch() -> Batch:
    return Batch(1, [queued()], last_heard=100.0)


def test_a_step_has_a_time_limit(batch: Batch) -> None:
    assert batch.next_timeout(ALLOWED_S) == 107.0
    assert batch.timeout_error(ALLOWED_S, 106.9) is None
    error = batch.timeout_error(ALLOWED_S, 107.0)
    assert isinstance(error, StepTimeoutError)
    assert "sent nothing for 7 s, before its first step" in str(error)


def test_a_worker_may_be_silent_again_for_as_long_as_it_was(batch: Batch) -> None:
    """A step of 5 s says that one of 40 s is slow, not hung."""
    batch.hear(105.0)
    assert batch.next_timeout(ALLOWED_S) == 105.0 + 50.0
    batch.hear(106.0)
    assert batch.timeout_error(ALLOWED_S, 155.9) is None
    assert isinstance(batch.timeout_error(ALLOWED_S, 156.0), StepTimeoutError)


def test_ranks_must_follow_one_that_failed(batch: Batch) -> None:
    batch.must_settle_by = 105.0
    assert batch.next_timeout(ALLOWED_S) == 105.0
    assert batch.timeout_error(ALLOWED_S, 104.9) is None
    assert isinstance(batch.timeout_error(ALLOWED_S, 105.0), WorkerLostError)
