"""What is said about a request while it is served?

First `Started`, then `Progress` for each step, with a `Preview` now and then if it was asked for, and at the end
one `Done` or `Failed`. A request that is refused or taken back while it waits has only `Failed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..errors import SamovarError
from .request import GeneratedPictures

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Started:
    """A worker has begun."""

    seconds_queued: float


@dataclass(frozen=True)
class Progress:
    """A step has ended."""

    step: int
    """Counted from 1."""
    num_steps: int
    picture: int
    """Which picture of the request, counted from 0; the first one where several are made at once."""
    num_pictures: int
    seconds: float
    """How long the step took."""
    is_computed: bool | None
    """False if the cache skipped it; None without a cache."""


@dataclass(frozen=True)
class Preview:
    """What the picture looks like after a step."""

    step: int
    num_steps: int
    picture: int
    image: Image


@dataclass(frozen=True)
class Done:
    """The pictures are there."""

    result: GeneratedPictures


@dataclass(frozen=True)
class Failed:
    """There will be none."""

    error: SamovarError


Event = Started | Progress | Preview | Done | Failed


class Listener(NamedTuple):
    """Who is told, and who may stop it. Requests are known by their index among those that are made together."""

    tell: Callable[[int, Event], None]
    is_cancelled: Callable[[int], bool]


SILENT = Listener(lambda request, event: None, lambda request: False)
