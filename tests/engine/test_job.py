"""Ranks that come to the same end, and ranks that do not."""

from __future__ import annotations

import pytest

from samovar import OmniDiffusionSamplingParams
from samovar.engine import GeneratedPictures, Request
from samovar.engine.job import SETTLE_S, Job
from samovar.engine.messages import Answer
from samovar.engine.waiting import Entry
from samovar.engine.worker import Outcome, Usage
from samovar.errors import CancelledRequestError, EngineError, SettingError

GOOD = GeneratedPictures("a cat", (), (3,), OmniDiffusionSamplingParams(), 1.0)
USAGE = Usage(0, 0)


def job_with(*outcomes: Outcome | None) -> Job:
    job = Job(1, [Entry(Request("a cat"), lambda event: None)], last_heard=0.0)
    for rank, outcome in enumerate(outcomes):
        job.note(rank, Answer(1, (outcome,), USAGE), now=10.0)
    return job


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
    assert job_with(*outcomes).can_go_on is can_go_on


def test_one_that_fails_gives_the_others_little_time_and_is_named() -> None:
    assert job_with(GOOD).must_settle_by is None
    job = job_with(GOOD, EngineError("a bug"))
    assert job.must_settle_by == 10.0 + SETTLE_S
    assert job.errors() == "rank 1: a bug"
