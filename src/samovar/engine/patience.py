"""How long is a worker waited for? For a step, for the model to be loaded, and for ranks to follow one that failed."""

from __future__ import annotations

from ..errors import EngineError, StepTimeoutError, WorkerLostError
from .job import Job
from .settings import OmniDiffusionConfig


def patience_with_job(job: Job, config: OmniDiffusionConfig) -> float:
    """Until when the next word about a job must have come."""
    ends = job.last_heard + config.step_timeout_s
    return ends if job.must_settle_by is None else min(ends, job.must_settle_by)


def lost_job(job: Job, config: OmniDiffusionConfig, now: float) -> EngineError | None:
    """What is told to those who wait for a job if its worker has hung, else None."""
    if job.must_settle_by is not None and now >= job.must_settle_by:
        return WorkerLostError(f"The others did not follow {job.errors()}. All were ended: ask again.")
    if now - job.last_heard < config.step_timeout_s:
        return None
    return StepTimeoutError(
        f"The worker said nothing for {config.step_timeout_s:g} s, {job.step}, and was ended. Ask again; if steps do "
        "take that long, set step_timeout_s higher."
    )


def lost_loading(since: float, config: OmniDiffusionConfig, now: float) -> EngineError | None:
    """What is told if a worker that loads the model since then has hung, else None."""
    if now - since < config.load_timeout_s:
        return None
    return StepTimeoutError(
        f"The worker did not load the model within {config.load_timeout_s:g} s, and was ended. Is the disk or the "
        "network very slow? If it does take that long, set load_timeout_s higher."
    )
