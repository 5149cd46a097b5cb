"""Foresee the timesteps that the model will be given in the rest of a run.

Pipelines hand the scheduler's timesteps to the model in some form: as they are, divided by a thousand, as 1 - t, in the
sample's dtype; with a time for each token, those of given frames are another, mostly 0. The right form gives the bits
of the current call. A wrong guess costs time, never bits: what was computed ahead is used only where the model is given
those bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..hooks import Run

MAX_AHEAD = 128
"""Steps that are computed ahead at once, at most."""
_MAX_VALUES = 4
"""Different times in one tensor."""
_FORMS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t,
    lambda t: t / 1000,
    lambda t: 1 - t,
    lambda t: 1 - t / 1000,
    lambda t: (1000 - t) / 1000,
    lambda t: t * 1000,
    lambda t: 1000 - t,
)


class _Course(NamedTuple):
    """A value in a tensor, and those that may come in its place, in order."""

    now: float
    later: tuple[float, ...]


def coming_inputs(run: Run | None, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What the model will be given at the later steps of a run in place of these tensors; nothing if nobody knows."""
    times = _times_of(getattr(run.pipeline, "scheduler", None) if run is not None else None)
    courses = [(place, course) for place, tensor in enumerate(given) for course in _courses(times, tensor)]
    # Forms that agree now may differ later, and what has the time's value now may be no time: all of it is likely. A
    # second timestep, or a noise level, goes along with the first.
    choices: dict[tuple[tuple[int, float, float], ...], None] = {}
    for step in range(max((len(course.later) for _, course in courses), default=0)):
        alone = [(place, course.now, course.later[step]) for place, course in courses if step < len(course.later)]
        together = {place: (place, now, later) for place, now, later in reversed(alone)}
        choices |= dict.fromkeys([tuple(together.values()), *((one,) for one in alone)])
    return [_replaced(given, choice) for choice in list(choices)[:MAX_AHEAD]]


def _times_of(scheduler: Any) -> list[torch.Tensor]:
    """The timesteps and noise levels of a scheduler; none if it has no list of timesteps."""
    named = [getattr(scheduler, name, None) for name in ("timesteps", "sigmas")]
    if not isinstance(named[0], torch.Tensor):
        return []
    count = len(named[0])
    return [t[:count].cpu() for t in named if isinstance(t, torch.Tensor) and t.ndim == 1 and not t.is_meta]


def _replaced(given: Sequence[torch.Tensor], choice: Iterable[tuple[int, float, float]]) -> list[torch.Tensor]:
    """Some tensors with a value replaced in each of those that a choice names."""
    made = list(given)
    for place, now, later in choice:
        made[place] = _changed(made[place], now, later)
    return made


def _changed(tensor: torch.Tensor, now: float, later: float) -> torch.Tensor:
    """A tensor at a later step, with the strides that it has now."""
    core = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
    return torch.where(core == now, torch.full_like(core, later), core).expand(tensor.shape)


def _courses(times: Sequence[torch.Tensor], tensor: torch.Tensor) -> Iterator[_Course]:
    """For each value of a tensor, what follows it in each form of the scheduler's times that has it."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype is torch.bool:
        return
    distinct: torch.Tensor = torch.unique(tensor.detach().cpu())
    seen: set[_Course] = set()
    for now in distinct.tolist() if len(distinct) <= _MAX_VALUES else ():
        for scale in times:
            for early in dict.fromkeys((scale.dtype, tensor.dtype, torch.float32)):
                # Whole numbers may be indices of a table: a time that is made of them would not be in it.
                for form in _FORMS if tensor.is_floating_point() else _FORMS[:1]:
                    values = form(scale.to(early)).to(tensor.dtype).tolist()
                    course = _Course(now, tuple(values[values.index(now) + 1 :]) if now in values else ())
                    if course.later and course not in seen:
                        seen.add(course)
                        yield course
