"""Which timesteps will the model be given in the rest of a run?

Pipelines hand the scheduler's timesteps to the model in some form: as they are, divided by a thousand, as 1 - t, in the
sample's dtype; with a time for each token, those of given frames are another, mostly 0. The right form gives the bits
of the current call. A wrong guess costs time, never bits: what was computed ahead is used only where the model is given
those bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ..hooks import Run

MOST_AHEAD = 128
"""Steps that are computed ahead at once, at most."""
_MOST_VALUES = 4
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

    def at(self, tensor: torch.Tensor, step: int) -> torch.Tensor:
        """The tensor at a later step, with the strides that it has now."""
        core = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
        return torch.where(core == self.now, torch.full_like(core, self.later[step]), core).expand(tensor.shape)


def coming_inputs(run: Run | None, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What the model will be given at the later steps of a run in place of these tensors; nothing if nobody knows."""
    scheduler = getattr(run.pipeline, "scheduler", None) if run is not None else None
    named = {name: getattr(scheduler, name, None) for name in ("timesteps", "sigmas")}
    if not isinstance(named["timesteps"], torch.Tensor):
        return []
    count = len(named["timesteps"])
    times = [t[:count].cpu() for t in named.values() if isinstance(t, torch.Tensor) and t.ndim == 1 and not t.is_meta]
    courses = {place: found for place, tensor in enumerate(given) if (found := list(_courses(times, tensor)))}
    if len(courses) == 1:  # Forms that agree now may differ later: all of their values are likely.
        ((place, found),) = courses.items()
        values = dict.fromkeys((course.now, value) for course in found for value in course.later)
        courses = {place: [_Course(now, (value,)) for now, value in values]}
        choices = [{place: (course, 0)} for course in courses[place]]
    else:  # A second timestep, or a noise level, goes along.
        steps = max((len(found[0].later) for found in courses.values()), default=0)
        choices = [{p: (f[0], min(s, len(f[0].later) - 1)) for p, f in courses.items()} for s in range(steps)]
    return [
        [
            choice[place][0].at(tensor, choice[place][1]) if place in choice else tensor
            for place, tensor in enumerate(given)
        ]
        for choice in choices[:MOST_AHEAD]
    ]


def _courses(times: Sequence[torch.Tensor], tensor: torch.Tensor) -> Iterator[_Course]:
    """For each value of a tensor, what follows it in each form of the scheduler's times that has it."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype is torch.bool:
        return
    distinct: torch.Tensor = torch.unique(tensor.detach().cpu())
    seen: set[_Course] = set()
    for now in distinct.tolist() if len(distinct) <= _MOST_VALUES else ():
        for scale in times:
            for early in dict.fromkeys((scale.dtype, tensor.dtype, torch.float32, torch.bfloat16, torch.float16)):
                for form in _FORMS:
                    values = form(scale.to(early)).to(tensor.dtype).tolist()
                    course = _Course(now, tuple(values[values.index(now) + 1 :]) if now in values else ())
                    if course.later and course not in seen:
                        seen.add(course)
                        yield course
