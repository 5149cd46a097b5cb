"""A worker is waited for, and not for ever."""

from __future__ import annotations

import pytest

from samovar.engine import OmniDiffusionConfig, Request
from samovar.engine.job import Job
from samovar.engine.patience import lost_job, lost_loading, patience_with_job
from samovar.engine.waiting import Entry
from samovar.errors import StepTimeoutError, WorkerLostError

CONFIG = OmniDiffusionConfig("emoji", device="cpu", step_timeout_s=7.0, load_timeout_s=20.0)


@pytest.fixture
def job() -> Job:
    return Job(1, [Entry(Request("a cat"), lambda event: None)], last_heard=100.0)


def test_a_step_has_its_time(job: Job) -> None:
    assert patience_with_job(job, CONFIG) == 107.0
    assert lost_job(job, CONFIG, 106.9) is None
    error = lost_job(job, CONFIG, 107.0)
    assert isinstance(error, StepTimeoutError)
    assert "said nothing for 7 s, before its first step" in str(error)


def test_ranks_must_follow_one_that_failed(job: Job) -> None:
    job.must_settle_by = 105.0
    assert patience_with_job(job, CONFIG) == 105.0
    assert lost_job(job, CONFIG, 104.9) is None
    assert isinstance(lost_job(job, CONFIG, 105.0), WorkerLostError)


def test_loading_has_its_time() -> None:
    assert lost_loading(100.0, CONFIG, 119.9) is None
    error = lost_loading(100.0, CONFIG, 120.0)
    assert isinstance(error, StepTimeoutError)
    assert "did not load the model within 20 s" in str(error)
