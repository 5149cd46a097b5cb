"""A schedule for a number of computed steps, and weights for the forecasts that take the place of the others.

Images are made with forecasts at the skipped steps while every step is computed. So it is known what the model answers
to the drift of the cached run, and what would lead back to the exact one. Skipped are the steps whose forecasts stay
within a limit, the same for all steps, on the way that they make themselves. The weights of a forecast are fitted to a
mean of the model's answer and the way back, in passes that each go the way of the weights before.

All of it happens where the scheduler is given a prediction: guidance has been applied, and one row of weights serves
all branches.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..cache.config import EVERY_BRANCH
from ..core.errors import ModelError
from .methods import EXACT, Method, Report, cached
from .session import Session
from .tasks import Task

FEWEST = 2
"""Computed steps of a schedule, at least."""
PASSES = 3
"""By which weights are fitted, where images are made in several calls."""
DEPTH = 4
"""Computed outputs per forecast. A fifth gains little."""
BACK = 0.5
"""How much of the way back to the exact run the weights aim for."""
_SEARCHES = 10
"""Passes to find a schedule with a wanted number of computed steps."""
_MAX_SOUGHT = 32
"""Images on which it is found: weights need more of them, and cost fewer passes."""
_FIRST, _LONGEST = 3, 5
"""While a schedule is sought, the steps that are computed at the beginning, and the most that are skipped in a row."""
_RIDGE = 1e-6
"""Keeps weights small where nearly equal outputs leave them open, relative to the size of the outputs."""
_LARGEST_MISS = 1e-2
"""Of the way of a sample: if a prediction times the step leaves out more, it does not say the way back."""

Rows = dict[int, dict[int, float]]
"""By skipped step: the weight of each computed step."""


class _Watching:
    """Keeps the samples of exact runs, and sees whether a prediction times the size of a step is their way."""

    def __init__(self) -> None:
        self.samples: list[list[torch.Tensor]] = []
        """By call and step."""
        self.is_flow = True

    def begin(self) -> None:
        """Begin the run of the next call of the pipeline."""
        self.samples.append([])
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def take(self, output: torch.Tensor, sample: torch.Tensor, sizes: Sequence[float]) -> torch.Tensor:
        """What the scheduler is given for a prediction. `sizes`: how much the noise changes at each step, if known."""
        if self._last is not None:
            before, way = self._last
            moved = sample.double() - before
            self.is_flow = self.is_flow and bool((moved - way).norm() <= _LARGEST_MISS * moved.norm())
        step = len(self.samples[-1])
        self.samples[-1].append(sample.detach().float().cpu())
        self.is_flow = self.is_flow and step < len(sizes)
        self._last = (sample.double(), sizes[step] * output.double()) if self.is_flow else None
        return output


class _Forecasting:
    """Gives the scheduler forecasts at the steps that a mask skips or, without one, that stay within a limit."""

    def __init__(
        self, exact: _Watching, mask: str | None = None, limit: float = math.inf, rows: Rows | None = None
    ) -> None:
        self._exact, self._given, self._limit, self._rows = exact, mask, limit, rows
        self._runs = iter(exact.samples)
        self._sums: dict[int, tuple[list[int], torch.Tensor, torch.Tensor]] = {}
        """By skipped step, the steps that it is made of, and for the least squares the products of their outputs."""

    def begin(self) -> None:
        self.mask = ""
        """The schedule, as far as the run has come."""
        self._way = next(self._runs)
        self._known: dict[int, torch.Tensor] = {}

    def take(self, output: torch.Tensor, sample: torch.Tensor, sizes: Sequence[float]) -> torch.Tensor:
        step, size = len(self.mask), sizes[len(self.mask)] if self._exact.is_flow else None
        forecast = None if self._must_compute(step) else self._forecast(step, output, sample, size)
        if forecast is not None and self._given is None:
            missed = (forecast - output.double()).pow(2).mean().sqrt() * abs(size or 1.0)
            forecast = forecast if float(missed) <= self._limit else None
        if forecast is None:
            self._known[step] = output.detach().flatten().double()
        self.mask += "#" if forecast is None else "."
        return output if forecast is None else forecast.to(output.dtype)

    def _must_compute(self, step: int) -> bool:
        if self._given is not None:
            return self._given[step] == "#"
        return step < _FIRST or self.mask.endswith("." * _LONGEST)

    def _forecast(self, step: int, output: torch.Tensor, sample: torch.Tensor, size: float | None) -> torch.Tensor:
        """By the weights of the pass before; in the first, by those that fit this call."""
        used = list(self._known)[-DEPTH:]
        known = torch.stack([self._known[old] for old in used])
        wanted = output.double().flatten()
        if size is not None and step + 1 < len(self._way):
            aim = self._way[step + 1][: len(sample)].to(sample.device)  # A mask is sought on some of a call's images.
            wanted = (1 - BACK) * wanted + BACK * (aim.double() - sample.double()).flatten() / size
        gram, goal = (known @ known.T).cpu(), (known @ wanted).cpu()
        _, *sums = self._sums.get(step, (used, 0.0, 0.0))
        self._sums[step] = used, sums[0] + gram, sums[1] + goal
        row = _solve(gram, goal) if self._rows is None else [self._rows[step][old] for old in used]
        return (torch.tensor(row, dtype=torch.float64, device=known.device) @ known).view(output.shape)

    def fitted(self) -> Rows:
        """The weights that fit all images so far."""
        return {step: dict(zip(used, _solve(*sums), strict=True)) for step, (used, *sums) in self._sums.items()}


def _solve(gram: torch.Tensor, goal: torch.Tensor) -> list[float]:
    """Least squares with a small ridge."""
    ridge = _RIDGE * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
    found: list[float] = torch.linalg.solve(gram + ridge * torch.eye(len(gram)), goal).tolist()
    return found


@contextlib.contextmanager
def _stepping(running: _Watching | _Forecasting, pipeline: Any) -> Iterator[Report]:
    """A pass stands between the denoiser and the step of the scheduler."""
    scheduler = pipeline.scheduler
    own: Callable[..., Any] = scheduler.step

    @functools.wraps(own)
    def step(model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sigmas = getattr(scheduler, "sigmas", None)
        sizes = [b - a for a, b in itertools.pairwise(sigmas.tolist())] if isinstance(sigmas, torch.Tensor) else []
        return own(running.take(model_output, sample, sizes), timestep, sample, *args, **kwargs)

    vars(scheduler)["step"] = step
    try:
        yield dict
    finally:
        del vars(scheduler)["step"]


class Planner:
    """Plans schedules on the images of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._exact: _Watching | None = None
        tasks, size = session.tasks, session.runner.batch
        self._calls = [tasks[i : i + size] for i in range(0, len(tasks), size)]

    def method(self, computed: int) -> Method:
        """A schedule with at most this many computed steps."""
        journal, key = self._session.journal, f"schedule of {computed}"
        if key not in journal:
            mask = self._mask(computed)
            journal.record(key, {"mask": mask, "rows": self._rows(mask)})
        mask, rows = journal[key]["mask"], journal[key]["rows"]
        weights = {step: {old: float(f"{w:.6g}") for old, w in row.items()} for step, row in rows.items()}
        settings = {"forecast": "fitted", "forecast_of": "output", "schedule": mask}
        return cached("tea_cache", {**settings, "forecast_weights": {EVERY_BRANCH: weights}}, f"schedule {mask}")

    def _mask(self, computed: int) -> str:
        """Found by halving the range of limits."""
        low, high = 1e-6, 1.0
        best = even_mask(self._session.runner.steps, computed)
        for number in range(_SEARCHES):
            limit = math.sqrt(low * high)
            seeking = _Forecasting(self._watched(), limit=limit)
            name = f"schedule of {computed}, search {number + 1} of {_SEARCHES}"
            self._run(seeking, name, [self._calls[0][:_MAX_SOUGHT]])
            count = seeking.mask.count("#")
            if count <= computed:
                best, high = seeking.mask, limit
            else:
                low = limit
            if count == computed:
                break
        return best

    def _rows(self, mask: str) -> Rows:
        count = PASSES if len(self._calls) > 1 else 1  # Those of a single call are fitted on the way.
        rows: Rows | None = None
        for number in range(count):
            fitting = _Forecasting(self._watched(), mask, rows=rows)
            self._run(fitting, f"schedule {mask}, pass {number + 1} of {count}", self._calls)
            rows = fitting.fitted()
        return rows or {}

    def _watched(self) -> _Watching:
        if self._exact is None:
            exact, steps = _Watching(), self._session.runner.steps
            self._run(exact, "exact, watched", self._calls)
            if {len(samples) for samples in exact.samples} != {steps}:
                raise ModelError(
                    f"The scheduler's step was called {len(exact.samples[0])} times in {steps} steps, so no schedule "
                    "can be planned: the pipeline uses a copy of its scheduler, or calls it several times a step. Use "
                    "cache='auto', which needs no planning."
                )
            self._exact = exact
        return self._exact

    def _run(self, running: _Watching | _Forecasting, name: str, calls: Sequence[Sequence[Task]]) -> None:
        """Make the images of some calls."""
        method = Method(name, EXACT.family, attached=functools.partial(_stepping, running))
        with self._session.runner.under(method) as make:
            for tasks in calls:
                self._session.progress.say(name)
                running.begin()
                make(tasks)
                self._session.progress.add(len(tasks))


def even_mask(steps: int, computed: int, first: int = _FIRST) -> str:
    """The first steps and the last, and the others at even distances."""
    first = min(first, computed)
    rest = computed - first
    places = {first - 1 + int((steps - first) * (number + 1) / rest + 0.5) for number in range(rest)}
    return "".join("#" if step < first or step in places else "." for step in range(steps))
