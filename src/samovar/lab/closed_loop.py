"""What should a skipped step be made of, if the model answers to the drift of those skipped before? Fitted on the way.

Weights that are fitted to exact runs (`fitting`) leave out that the model reacts to a drift. Guidance multiplies that
reaction. So here the tuning images are made with forecasts in place of the skipped steps, while every step is computed:
what the model really returns on the drifted way is known, and so is what would lead back to the exact one. The weights
are fitted to a mean of both. The next pass goes the way that these weights make; after a few passes little changes.

All of it happens where the scheduler is given a prediction: guidance has been applied, and one row of weights serves
all branches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..cache.config import EVERY_BRANCH
from .fitting import DEPTH, solve
from .methods import EXACT, Method, Notes
from .session import Session

PASSES = 3
BACK = 0.5
"""How much of the way back to the exact run the weights aim for."""
_SEARCHES = 10
"""Passes to find a schedule with a wanted number of computed steps."""
_SOUGHT_ON = 32
"""Images on which it is found, at most: weights need more of them, and cost fewer passes."""
_FIRST, _LONGEST = 3, 5
"""While a schedule is sought, the steps that are computed at the beginning, and the most that are skipped in a row."""
_LARGEST_MISS = 1e-2
"""Of the way of a sample: if a prediction times the step leaves out more, it does not tell the way back."""

Rows = dict[int, dict[int, float]]
"""By skipped step: the weight of each computed step."""


class _Sums:
    """Of all images, for the least squares of one step."""

    def __init__(self) -> None:
        self.gram: Any = 0.0
        self.aim: Any = 0.0

    def add(self, known: torch.Tensor, wanted: torch.Tensor) -> None:
        self.gram = self.gram + (known @ known.T).cpu().numpy()
        self.aim = self.aim + (known @ wanted).cpu().numpy()

    def weights(self, steps: Sequence[int]) -> dict[int, float]:
        return dict(zip(steps, solve(self.gram, self.aim).tolist(), strict=True))


class _Loop:
    """Stands in for the step of a scheduler, and notes what goes through it."""

    def __init__(self) -> None:
        self.mask: str | None = None
        """None while an exact run is watched, or a schedule is sought."""
        self.limit: float | None = None
        """Of a schedule that is sought: how far a skipped step may take the sample off its way."""
        self.found = ""
        """That schedule, as far as the run has come."""
        self.weights: Rows | None = None
        """None fits them to the running batch."""
        self.sums: dict[int, _Sums] = {}
        self._exact: list[list[torch.Tensor]] = []
        """The samples of each batch."""
        self._is_flow = True
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Begin the run of a batch."""
        self._batch, self._step, self.found = batch, 0, ""
        self._known: list[tuple[int, torch.Tensor]] = []
        self._last: tuple[torch.Tensor, torch.Tensor, float] | None = None

    @contextlib.contextmanager
    def on(self, pipeline: Any) -> Iterator[Notes]:
        scheduler = pipeline.scheduler
        own: Callable[..., Any] = scheduler.step

        @functools.wraps(own)
        def step(model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sizes = _sizes(scheduler)
            taken = self._take(model_output, sample, sizes[self._step] if self._step < len(sizes) else None)
            self._step += 1
            return own(taken, timestep, sample, *args, **kwargs)

        vars(scheduler)["step"] = step
        try:
            yield lambda: None
        finally:
            del vars(scheduler)["step"]

    def _take(self, output: torch.Tensor, sample: torch.Tensor, size: float | None) -> torch.Tensor:
        if self.mask is None and self.limit is None:
            self._watch(output, sample, size)
            return output
        mixed = None if self._must_compute() else self._forecast(output, sample, size)
        if mixed is not None and self.limit is not None:
            missed = (mixed - output.double()).pow(2).mean().sqrt() * abs(size or 1.0)
            mixed = mixed if float(missed) <= self.limit else None
        self.found += "#" if mixed is None else "."
        if mixed is None:
            self._known.append((self._step, output.detach().clone()))
            return output
        return mixed.to(output.dtype)

    def _must_compute(self) -> bool:
        if self.mask is not None:
            return self.mask[self._step] == "#"
        return self._step < _FIRST or self.found.endswith("." * _LONGEST)

    def _forecast(self, output: torch.Tensor, sample: torch.Tensor, size: float | None) -> torch.Tensor:
        step = self._step
        used = self._known[-DEPTH:]
        known = torch.stack([tensor.flatten() for _, tensor in used]).double()
        wanted = self._wanted(output, sample, size)
        self.sums.setdefault(step, _Sums()).add(known, wanted)
        if self.weights is None:
            own = _Sums()
            own.add(known, wanted)
            row = own.weights([number for number, _ in used])
        else:
            row = self.weights[step]
        mixed = sum(row[number] * tensor.double() for number, tensor in used)
        assert isinstance(mixed, torch.Tensor)
        return mixed

    def _wanted(self, output: torch.Tensor, sample: torch.Tensor, size: float | None) -> torch.Tensor:
        """What the forecast should be: between what the model returns here and what leads back to the exact run."""
        own, exact = output.double().flatten(), self._exact[self._batch]
        if size is None or not self._is_flow or self._step + 1 >= len(exact):
            return own
        aim = exact[self._step + 1][: len(sample)].to(sample.device)  # A schedule is sought on some of the batch.
        back = (aim.double() - sample.double()).flatten() / size
        return (1 - BACK) * own + BACK * back

    def _watch(self, output: torch.Tensor, sample: torch.Tensor, size: float | None) -> None:
        """Keep the samples of an exact run, and see whether a prediction times the step is their way."""
        if self._step == 0:
            self._exact.append([])
        self._exact[self._batch].append(sample.detach().float().cpu())
        if self._last is not None:
            before, prediction, length = self._last
            way = sample.double() - before.double()
            missed = (way - length * prediction.double()).norm()
            self._is_flow = self._is_flow and bool(missed <= _LARGEST_MISS * way.norm())
        self._is_flow = self._is_flow and size is not None
        self._last = None if size is None else (sample, output, size)


def _sizes(scheduler: Any) -> list[float]:
    """By how much the noise changes at each step; empty if the scheduler does not say."""
    sigmas = getattr(scheduler, "sigmas", None)
    return [b - a for a, b in itertools.pairwise(sigmas.tolist())] if isinstance(sigmas, torch.Tensor) else []


class ClosedLoop:
    """Fits weights on the tuning images of a session. The exact run is watched once."""

    def __init__(self, session: Session) -> None:
        self._session, self._loop = session, _Loop()
        self._is_watched = False

    def fit(self, mask: str) -> Rows:
        """The weights for a schedule."""
        key, journal = f"closed loop {mask} {PASSES} {BACK}", self._session.journal
        if key in journal:
            return {int(step): {int(old): w for old, w in row.items()} for step, row in journal[key].items()}
        self._watch()
        loop, weights = self._loop, None
        for number in range(PASSES):
            loop.mask, loop.limit, loop.weights, loop.sums = mask, None, weights, {}
            batches = self._run(f"closed loop {mask}, pass {number + 1} of {PASSES}")
            weights = {step: sums.weights(_before(mask, step)) for step, sums in loop.sums.items()}
            if batches == 1:  # They were fitted on the way.
                break
        assert weights is not None
        journal.record(key, {str(step): {str(old): w for old, w in row.items()} for step, row in weights.items()})
        return weights

    def seek(self, computed: int) -> str:
        """A schedule with at most this many computed steps: skipped are those that stay within a limit, the same for
        all steps, on the way that they make. It is found on some images of the first batch."""
        key, journal = f"closed loop, schedule with {computed} {BACK}", self._session.journal
        if key in journal:
            return str(journal[key])
        self._watch()
        loop, low, high = self._loop, 1e-6, 1.0
        best = even_mask(self._session.runner.steps, computed)
        for number in range(_SEARCHES):
            limit = math.sqrt(low * high)
            loop.mask, loop.limit, loop.weights, loop.sums = None, limit, None, {}
            self._run(f"closed loop, schedule with {computed} computed, {number + 1} of {_SEARCHES}", _SOUGHT_ON)
            count = loop.found.count("#")
            if count <= computed:
                best, high = loop.found, limit
            else:
                low = limit
            if count == computed:
                break
        journal.record(key, best)
        return best

    def _watch(self) -> None:
        if not self._is_watched:
            self._loop.mask = self._loop.limit = None
            self._run("exact, watched for the closed loop")
            self._is_watched = True

    def _run(self, name: str, most: int | None = None) -> int:
        """Make the images of all batches, or at most a number of those of the first. Returns the number of batches."""
        runner = self._session.runner
        batches = runner.batches(self._session.tasks)
        if most is not None:
            batches = [batches[0][:most]]
        count = sum(map(len, batches))
        with runner.under(Method(name, EXACT.family, attached=self._loop.on)) as make:
            for number, tasks in enumerate(batches):
                self._session.progress.say(f"{name}: {number * runner.batch} of {count} images")
                self._loop.begin(number)
                make(tasks)
                self._session.progress.add(len(tasks))
        return len(batches)


def _before(mask: str, step: int) -> list[int]:
    """The computed steps that a skipped one is made of."""
    return [number for number in range(step) if mask[number] == "#"][-DEPTH:]


def settings_of(mask: str, weights: Mapping[int, Mapping[int, float]]) -> dict[str, Any]:
    """A cache's settings, as plain JSON values."""
    rows = {str(s): {str(old): float(f"{w:.6g}") for old, w in row.items()} for s, row in weights.items()}
    fixed = {"forecast": "fitted", "forecast_of": "output"}
    return {**fixed, "schedule": mask, "forecast_weights": {EVERY_BRANCH: rows}}


def even_mask(steps: int, computed: int, first: int = 3) -> str:
    """The first steps and the last, and the others at even distances."""
    first = min(first, computed)
    rest = computed - first
    places = {first - 1 + int((steps - first) * (number + 1) / rest + 0.5) for number in range(rest)}
    return "".join("#" if step < first or step in places else "." for step in range(steps))
