"""May this step be skipped, as far as that can be said before looking at it?"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ..errors import SettingError
from .config import TeaCacheConfig

Mode = Literal["compute", "skip", "ask"]


class Verdict(NamedTuple):
    """What is to be done with a step, and why. `ask` leaves it to the signal."""

    action: Mode
    reason: str


class Step(NamedTuple):
    """A step of a run."""

    number: int
    """From 0."""
    total: int | None
    """Of how many, if that is known."""
    run_length: int | None
    """How many steps the run really takes: fewer than `total` if it starts half-way."""

    @property
    def first(self) -> int:
        """The number of the run's first step."""
        return 0 if self.total is None or self.run_length is None else max(0, self.total - self.run_length)


def judge(config: TeaCacheConfig, step: Step, skipped_in_a_row: int, branch: str | None = None) -> Verdict:
    """What schedule and guards say to a step of a branch."""
    mask = config.mask_for(branch)
    is_planned = mask is None or _planned(mask, step)
    if config.never_skips:
        return Verdict("compute", "settings")
    if config.schedule is not None:
        if mask is None:
            return Verdict("compute", "no schedule for this branch")
        return Verdict("compute" if is_planned else "skip", "schedule")
    if step.run_length is not None and step.run_length < config.min_steps:
        return Verdict("compute", "min_steps")
    if step.number < step.first + config.first_steps:
        return Verdict("compute", "first_steps")
    if step.total is not None and step.number >= step.total - config.last_steps:
        return Verdict("compute", "last_steps")
    if step.total is not None and not config.start * step.total <= step.number < config.end * step.total:
        return Verdict("compute", "window")
    if config.max_skips is not None and skipped_in_a_row >= config.max_skips:
        return Verdict("compute", "max_skips")
    return Verdict("ask", "")


def _planned(mask: tuple[bool, ...], step: Step) -> bool:
    """Whether a schedule has this step computed; one of another length than the run's is refused."""
    if step.number >= len(mask) or step.total not in (None, len(mask)):
        steps = f"a step number {step.number + 1}" if step.total is None else f"{step.total} steps"
        raise SettingError(
            f"The schedule is for {len(mask)} steps, and this run has {steps}. Give a schedule of the run's length, or "
            "run as many steps as it has. A loop of your own says where a run begins by refresh(model, steps)."
        )
    return mask[step.number]
