"""May this step be skipped? First by schedule and guards, then by how much the signal has changed.

A decision by the signal waits for the device once: it reads the relative change of the signal together with those of
whatever else changed.
"""

from __future__ import annotations

import functools
import json
import math
import weakref
from collections.abc import Callable, Hashable, Sequence
from importlib import resources
from typing import NamedTuple, Protocol

import torch

from ..core.errors import SettingError
from ..trace.passes import Mode
from .config import TeaCacheConfig
from .inputs import Pair, size

Rescale = Callable[[float], float]


# ------------------------------------------------------------------------------------------------ schedule and guards


class Verdict(NamedTuple):
    """What to do with a step, and why. `ask` leaves it to the signal."""

    action: Mode
    reason: str


class Step(NamedTuple):
    """A step of a run."""

    number: int
    """From 0."""
    total: int | None
    """Number of the scheduler's steps, if known."""
    run_length: int | None
    """Number of steps the run takes: fewer than `total` if it starts half-way."""

    @property
    def first(self) -> int:
        """Number of the run's first step."""
        return 0 if self.total is None or self.run_length is None else max(0, self.total - self.run_length)


def judge(config: TeaCacheConfig, step: Step, skipped_in_a_row: int, branch: str | None = None) -> Verdict:
    """What schedule and guards say about a step of a branch."""
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
    """Whether a schedule computes this step; a schedule of another length than the run's is refused."""
    if step.number >= len(mask) or step.total not in (None, len(mask)):
        steps = f"a step number {step.number + 1}" if step.total is None else f"{step.total} steps"
        raise SettingError(
            f"The schedule is for {len(mask)} steps, and this run has {steps}. Give a schedule of the run's length, or "
            "run as many steps as it has. In your own loop, call refresh(model, steps) where a run begins.",
            param="schedule",
        )
    return mask[step.number]


# ------------------------------------------------------------------------------------------------ coefficients


class Coefficients(NamedTuple):
    """The polynomial that turns a change of a model's signal into one of its output, highest power first."""

    values: tuple[float, ...]
    origin: str


@functools.cache
def known_coefficients() -> dict[str, Coefficients]:
    """Those of coefficients.json, by the class name of the model."""
    text = resources.files(__package__).joinpath("coefficients.json").read_text(encoding="utf-8")
    return {name: Coefficients(tuple(of["coefficients"]), of["origin"]) for name, of in json.loads(text).items()}


def coefficients_for(model: torch.nn.Module, given: Sequence[float] | None) -> Coefficients | None:
    """The given ones, else those of the model's own class, else none: no model borrows another's."""
    if given is not None:
        return Coefficients(tuple(given), "the settings")
    return known_coefficients().get(type(model).__name__)


def rescaling(coefficients: Coefficients | None) -> Rescale:
    """The polynomial as a function; without coefficients a change is taken as it is.

    Outside the range it was fitted for, a polynomial may fall below zero. There, too, a change is taken as it is, so
    that the largest changes never count as none.
    """
    if coefficients is None:
        return lambda distance: distance

    def rescale(distance: float) -> float:
        total = 0.0
        for value in coefficients.values:
            total = total * distance + value
        return total if total > 0 else distance

    return rescale


# ------------------------------------------------------------------------------------------------ the signal


class Agree(Protocol):
    """Sums this rank's pairs of change and size over the group, so that all ranks decide alike. Every rank calls it
    once in a step that is left to the signal, with equally many numbers."""

    def __call__(self, figures: torch.Tensor) -> torch.Tensor: ...

    def within_branch(self, figures: torch.Tensor) -> torch.Tensor:
        """The same for a decision that each branch makes alone."""


class Signal:
    """The value that decides at one step of a branch."""

    def __init__(self, value: torch.Tensor, source: Hashable = None, since: tuple[Signal, Pair] | None = None) -> None:
        """`since`: an earlier one, and how much it differs from that, if that was found out on the way."""
        self.value = value.detach()
        self.source = source
        """Where it was read; signals of two sources cannot be compared."""
        self._since = None if since is None else (weakref.ref(since[0]), since[1])  # Else a run would keep them all.

    @functools.cached_property
    def size(self) -> torch.Tensor:
        return size(self.value)

    def change(self, now: Signal) -> Pair | None:
        """How much a later one differs, and how large this one is; None if they cannot be compared."""
        if now._since is not None and now._since[0]() is self and self.source == now.source:
            return now._since[1]
        if (self.source, self.value.shape, self.value.device) != (now.source, now.value.shape, now.value.device):
            return None
        return [size(now.value - self.value), self.size]


class Measured(NamedTuple):
    """Numbers read from the device."""

    signal: float
    """Relative change of the signal."""
    others: float
    """Largest relative change of anything else; infinite if conditioning changed."""
    times: tuple[float, ...]


def measure(
    signal: Pair | None,
    others: Sequence[Pair],
    times: Sequence[torch.Tensor],
    agree: Agree | None,
    device: torch.device | None = None,
    *,
    within_branch: bool = False,
) -> Measured:
    """Relative changes from pairs of change and size, and the largest number of each time, in one wait for the device.
    No signal is an infinite change."""
    if signal is None:
        signal = torch.tensor([torch.inf, 1.0], device=device).unbind()
    if isinstance(signal, torch.Tensor) and not others:
        pairs = signal
    else:
        pairs = torch.stack([part.to(signal[0].device, torch.float32) for pair in (signal, *others) for part in pair])
    if agree is not None:
        pairs = (agree.within_branch if within_branch else agree)(_signal_and_worst_other(pairs))
    count = len(pairs)
    largest = [(time if time.numel() == 1 else time.max()).reshape(1).to(pairs) for time in times]
    numbers = (torch.cat([pairs, *largest]) if largest else pairs).tolist()
    distances = [_relative(*pair) for pair in zip(numbers[:count:2], numbers[1:count:2], strict=True)]
    return Measured(distances[0], max(distances[1:], default=0.0), tuple(numbers[count:]))


_LARGEST = 1e30
"""Stands for an infinite change between ranks: sums of infinities would be NaN."""
_HUGE = 1e20
"""The least that is left of it when it is averaged over ranks."""


def _relative(changed: float, size: float) -> float:
    """A change in proportion to what changed. NaN is never small."""
    relative = 0.0 if changed == 0 else changed / size if size > 0 else math.inf
    return math.inf if math.isnan(relative) or relative >= _HUGE else relative


def _signal_and_worst_other(pairs: torch.Tensor) -> torch.Tensor:
    """The signal's pair, and one for the largest of the others: ranks exchange equally many numbers."""
    change_of_others, size_of_others = pairs[2::2], pairs[3::2]
    largest = pairs.new_zeros(1)
    if len(change_of_others):
        largest = (change_of_others / size_of_others.clamp_min(1 / _LARGEST)).amax().clamp_max(_LARGEST).reshape(1)
    return torch.cat([pairs[:2], largest, pairs.new_ones(1)])
