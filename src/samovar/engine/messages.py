"""What do a worker's process and the one that started it say to each other?"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import SamovarError
from .events import Event
from .facts import PipelineFacts
from .request import Request
from .worker import Outcome, Usage

# ------------------------------------------------------------------------------------------------ to the worker


class Make(NamedTuple):
    """Make the pictures of these requests, together."""

    job: int
    requests: tuple[Request, ...]


class Drop(NamedTuple):
    """Nobody waits for this request any more."""

    job: int
    request: int


# ------------------------------------------------------------------------------------------------ from the worker


class Ready(NamedTuple):
    """The model is loaded."""

    facts: PipelineFacts
    load_seconds: float
    usage: Usage
    max_batch: int


class Refused(NamedTuple):
    """The model cannot be loaded, or this process can make no more pictures."""

    error: SamovarError


class Told(NamedTuple):
    """Something happened to a request; of several ranks, the first one tells."""

    job: int
    request: int
    event: Event


class Answer(NamedTuple):
    """The end of a job, from each rank. Pictures come from the first one; the others say None for what went well."""

    job: int
    outcomes: tuple[Outcome | None, ...]
    usage: Usage


FromWorker = Ready | Refused | Told | Answer
