"""Foresee the timesteps that the model will be given in the rest of a run.

Pipelines hand the scheduler's timesteps to the model in some form: as they are, divided by a thousand, as 1 - t, in the
sample's dtype; with a time for each token, those of given frames are another, mostly 0. The right form gives the bits
of the current call. A wrong guess costs time, never bits: what was computed ahead is used only where the model is given
those bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

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


Change = tuple[int, float, float]
"""The place of a tensor among those that the model is given, a value in it, and the one that comes in its place."""


def coming_inputs(run: Run | None, given: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What the model will be given at the later steps of a run in place of these tensors; nothing if nobody knows."""
    scheduler = None if run is None else getattr(run.pipeline, "scheduler", None)
    times = getattr(scheduler, "timesteps", None)
    if not isinstance(times, torch.Tensor) or times.ndim != 1 or times.is_meta:
        return []
    courses = [(place, *course) for place, tensor in enumerate(given) for course in _courses(times.cpu(), tensor)]
    # Forms that agree now may differ later, and what has the time's value now may be no time: all of it is likely. A
    # second timestep goes along with the first.
    choices: dict[tuple[Change, ...], None] = {}
    for step in range(len(times)):
        alone = [(place, now, later[step]) for place, now, later in courses if step < len(later)]
        together = {change[0]: change for change in reversed(alone)}
        choices |= dict.fromkeys([tuple(together.values()), *((change,) for change in alone)])
    return [_changed(given, choice) for choice in itertools.islice(filter(None, choices), MAX_AHEAD)]


def _changed(given: Sequence[torch.Tensor], choice: Iterable[Change]) -> list[torch.Tensor]:
    """Some tensors with values replaced, with the strides that they have now."""
    made = list(given)
    for place, now, later in choice:
        tensor = made[place]
        core = tensor[tuple(slice(None if stride else 1) for stride in tensor.stride())]
        made[place] = torch.where(core == now, torch.full_like(core, later), core).expand(tensor.shape)
    return made


def _courses(times: torch.Tensor, tensor: torch.Tensor) -> Iterator[tuple[float, tuple[float, ...]]]:
    """For each value of a tensor, what follows it in each form of the scheduler's times that has it."""
    if tensor.is_meta or not tensor.numel() or tensor.dtype is torch.bool:
        return
    distinct: torch.Tensor = torch.unique(tensor.detach().cpu())
    # Whole numbers may be indices of a table: a time that is made of them would not be in it.
    forms = _FORMS if tensor.is_floating_point() else _FORMS[:1]
    early = dict.fromkeys((times.dtype, tensor.dtype, torch.float32))
    scales = dict.fromkeys(tuple(form(times.to(d)).to(tensor.dtype).tolist()) for d in early for form in forms)
    for now in distinct.tolist() if len(distinct) <= _MAX_VALUES else ():
        for values in scales:
            if now in values[:-1]:
                yield now, values[values.index(now) + 1 :]
