"""Runs of a pipeline, and the step at which a run is.

A run is one call of a hooked pipeline (see `pipelines`). It is its own request, unless the caller named one: so what
hooks remember of a run is found by its calls alone, and is gone when the run ends, however it ends. Calls of a module
from elsewhere, such as a loop of one's own or a pipeline without hooks that shares the module, are part of no run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from ..core.interop import pipeline_steps, scheduler_step
from .context import call_context, current_context

HOOKS = "_samovar_pipeline_hooks"
"""Where a pipeline keeps its hooks, in its `__dict__`."""


class Position(NamedTuple):
    """How far a run is."""

    step: int
    """The index of the running step among the scheduler's. It starts above 0 if the run starts half-way."""
    total: int
    sigma: float | None
    """The noise at this step, if the scheduler says so."""
    next_sigma: float = 0.0
    """The noise that it leads to."""
    length: int | None = None
    """How many steps the run takes."""
    loop: Any = None
    """See `Run.loop`."""


class PipelineHook:
    """Code attached to a whole pipeline."""

    execution_device: torch.device | None = None
    """Where the pipeline makes its latents and runs, if not where its modules happen to be."""

    def start_run(self, run: Run) -> None:
        """Called when the pipeline is called."""

    def end_run(self, run: Run) -> None:
        """Called when the call returns or raises."""


def pipeline_hooks(pipeline: Any) -> dict[str, PipelineHook]:
    """The hooks of a pipeline by name, in the order in which they were attached."""
    hooks: dict[str, PipelineHook] = getattr(pipeline, "__dict__", {}).get(HOOKS, {})
    return hooks


class Run:
    """One call of a pipeline. It does not keep the pipeline alive."""

    def __init__(self, pipeline: Any, request: Hashable, arguments: Mapping[str, Any] | None = None) -> None:
        self._pipeline = weakref.ref(pipeline)
        self.arguments = arguments or {}
        """What the pipeline was called with, by name."""
        self.request = request
        self.failed = False
        """Whether it ends with an error."""
        self._timesteps: Any = None
        self._sigmas: list[float] = []

    @property
    def pipeline(self) -> Any:
        """The pipeline that is called."""
        return self._pipeline()

    def position(self) -> Position | None:
        """Where the run is, if its scheduler counts steps. This waits for a device once a loop."""
        pipeline = self._pipeline()
        scheduler = getattr(pipeline, "scheduler", None)
        timesteps, step = getattr(scheduler, "timesteps", None), scheduler_step(scheduler)
        if timesteps is None or step is None:
            return None
        if timesteps is not self._timesteps:  # Read once a loop: schedulers may keep sigmas on a device.
            sigmas = getattr(scheduler, "sigmas", None)
            self._timesteps, self._sigmas = timesteps, []
            if isinstance(sigmas, torch.Tensor) and not sigmas.is_meta:
                self._sigmas = sigmas.tolist()
        sigma, then, *_ = (*self._sigmas[step : step + 2], None, None)
        length = pipeline_steps(pipeline)
        length = len(timesteps) if length is None else length
        return Position(step, len(timesteps), sigma, then or 0.0, length, timesteps)

    def loop(self) -> Any:
        """The timesteps of the loop that is running: another object for each loop of a run."""
        return getattr(getattr(self._pipeline(), "scheduler", None), "timesteps", None)

    def total(self) -> int | None:
        """How many steps the run takes, if the pipeline or its scheduler says so."""
        steps, timesteps = pipeline_steps(self._pipeline()), self.loop()
        return len(timesteps) if steps is None and timesteps is not None else steps


_run: ContextVar[Run | None] = ContextVar("samovar_run", default=None)


def current_run() -> Run | None:
    """The innermost run that the running code is part of."""
    return _run.get()


def current_step() -> int | None:
    """The step of that run, if its scheduler counts."""
    run = _run.get()
    position = None if run is None else run.position()
    return None if position is None else position.step


@contextlib.contextmanager
def running(pipeline: Any, arguments: Mapping[str, Any] | None = None) -> Iterator[Run]:
    """A run of a pipeline: around each call of a hooked one, and for callers that drive a pipeline step by step. It is
    the request that the caller has named, or a new one."""
    outer, named = current_run(), current_context().request
    is_new = named is None or (outer is not None and outer.request == named)
    run = Run(pipeline, object() if is_new else named, arguments)
    with call_context(request=run.request), contextlib.ExitStack() as ends:  # One that raises stops no other.
        ends.callback(_run.reset, _run.set(run))
        for hook in pipeline_hooks(pipeline).values():
            ends.callback(hook.end_run, run)
            hook.start_run(run)
        try:
            yield run
        except BaseException:
            run.failed = True
            raise
