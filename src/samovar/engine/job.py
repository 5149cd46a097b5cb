"""What is the worker doing, and have all its ranks come to the same end?"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import CancelledRequestError, NanLatentsError, OutOfMemoryError, SamovarError, SettingError
from .messages import Answer
from .waiting import Entry

SETTLE_S = 5.0
"""How long the other ranks have to answer when one has failed: they may be waiting for it for ever."""
_SHARED = (SettingError, CancelledRequestError, NanLatentsError, OutOfMemoryError)
"""What all ranks raise at the same place, so that they can go on."""


@dataclass
class Job:
    """Requests that are made together."""

    number: int
    entries: list[Entry]
    last_heard: float
    step: str = "before its first step"
    answers: dict[int, Answer] = field(default_factory=dict)
    """By rank."""
    must_settle_by: float | None = None

    def note(self, rank: int, answer: Answer, now: float) -> None:
        """A rank has answered."""
        self.answers[rank] = answer
        if self.must_settle_by is None and any(isinstance(outcome, SamovarError) for outcome in answer.outcomes):
            self.must_settle_by = now + SETTLE_S

    @property
    def can_go_on(self) -> bool:
        """Whether all ranks, who have answered, are at the same place."""
        if len(self.answers) == 1:
            return True
        endings = [
            [type(outcome) if isinstance(outcome, SamovarError) else None for outcome in answer.outcomes]
            for answer in self.answers.values()
        ]
        alike = all(ending == endings[0] for ending in endings)
        return alike and all(kind is None or issubclass(kind, _SHARED) for kind in endings[0])

    def errors(self) -> str:
        """What went wrong, and on which rank."""
        errors = {
            rank: outcome
            for rank, answer in sorted(self.answers.items())
            for outcome in answer.outcomes
            if isinstance(outcome, SamovarError)
        }
        return "; ".join(f"rank {rank}: {error}" for rank, error in errors.items())
