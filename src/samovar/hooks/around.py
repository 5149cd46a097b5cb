"""Which run of a pipeline is a module's call part of, even if that pipeline is not hooked?

A pipeline that shares a hooked module is often not hooked itself: `FluxImg2ImgPipeline.from_pipe(pipe)` makes such a
one. Its calls are found on the call stack. It can then be adopted: hooked like the first one, so that its later runs
begin and end exactly. The run in which it is found begins with the first call of the module, and ends when a later
call comes from elsewhere: only then can it be seen that its frame is gone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import SettingError
from .pipelines import PipelineHook, Run, current_run, holds, own_request, pipeline_hooks, run_watches

Adopt = Callable[[Any], None]
"""Hooks a pipeline, and keeps it in mind to unhook it later."""


def run_around(module: torch.nn.Module, adopt: Adopt | None = None) -> Run | None:
    """The innermost run of a pipeline that holds the module; else the innermost run there is, or None.

    A pipeline that is not hooked is handed to `adopt` when it is first seen; the hooks that it has then are called at
    the start and the end of this run too.
    """
    run = current_run()
    while run is not None:
        if run.holds(module):
            if adopt is not None and not pipeline_hooks(run.pipeline):  # Made of a hooked one's class, but bare.
                _adopt(run, adopt)
            return run
        run = run.outer
    return _found.run_around(module, adopt) or current_run()


def _adopt(run: Run, adopt: Adopt) -> list[PipelineHook]:
    """Have a pipeline hooked whose run has begun; its hooks, which were called."""
    with contextlib.suppress(SettingError):  # One that cannot be hooked is found again each time.
        adopt(run.pipeline)
    hooks = list(pipeline_hooks(run.pipeline).values())
    for hook in hooks:
        hook.start_run(run)
    return hooks


class FoundRun(Run):
    """A call of a pipeline that was found on the stack. It does not keep the pipeline alive."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(weakref.ref(pipeline), own_request(None))
        self._begun = self.loop()
        self._step = 0

    @property
    def pipeline(self) -> Any:
        return self._pipeline()

    def goes_on(self) -> bool:
        """Whether the scheduler is still in the loop that this run began with."""
        position = self.position()
        before, self._step = self._step, 0 if position is None else position.step
        return self.loop() is self._begun and self._step >= before


@dataclass
class _Entry:
    """A run with its place on the stack. A frame itself is not held, for it holds all that is in it."""

    run: FoundRun
    frame: int
    hooks: list[PipelineHook] = field(default_factory=list)

    def end(self) -> None:
        for hook in reversed(self.hooks):
            hook.end_run(self.run)
        self.hooks.clear()


class _Found(threading.local):
    """The runs of this thread that were found on the stack, outermost first."""

    def __init__(self) -> None:
        self.entries: list[_Entry] = []

    def run_around(self, module: torch.nn.Module, adopt: Adopt | None) -> Run | None:
        frames = list(_calls())
        self._end_those_without(frames)
        known = {entry.frame: entry for entry in self.entries}
        for frame in frames:
            pipeline, entry = _caller(frame), known.get(id(frame))
            if entry is not None and not (entry.run.pipeline is pipeline and entry.run.goes_on()):
                self._end(entry)  # Another call, whose frame has the same place in memory.
                entry = None
            if pipeline is not None and entry is None and holds(pipeline, module):
                return self._begin(pipeline, id(frame), adopt)
            if entry is not None and entry.run.holds(module):
                return entry.run
        return None

    def end_runs_of(self, pipeline: Any) -> None:
        """A pipeline is called anew, so its last call is over, unless it calls itself."""
        for entry in [entry for entry in self.entries if entry.run.pipeline is pipeline]:
            if entry.frame not in {id(frame) for frame in _calls()}:
                self._end(entry)

    def _begin(self, pipeline: Any, frame: int, adopt: Adopt | None) -> Run | None:
        try:
            entry = _Entry(FoundRun(pipeline), frame)
        except TypeError:  # Its class allows no weak references.
            return None
        self.entries.append(entry)
        if adopt is not None:
            entry.hooks += _adopt(entry.run, adopt)
        return entry.run

    def _end_those_without(self, frames: list[types.FrameType]) -> None:
        if self.entries:
            there = {id(frame) for frame in frames}
            for entry in [entry for entry in self.entries if entry.frame not in there]:
                self._end(entry)

    def _end(self, entry: _Entry) -> None:
        self.entries.remove(entry)
        entry.end()


_found = _Found()
run_watches.append(_found.end_runs_of)


def _calls() -> Iterator[types.FrameType]:
    """The frames of objects that are being called, innermost first."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__call__" and frame.f_code.co_argcount:
            yield frame
        frame = frame.f_back


def _caller(frame: types.FrameType) -> Any:
    """The pipeline whose call a frame is, if it is one."""
    names = frame.f_locals
    pipeline = names.get(frame.f_code.co_varnames[0])
    if isinstance(names, dict):  # Before Python 3.13 it is a copy, which would keep all tensors in it until the end.
        names.clear()
    return pipeline if hasattr(pipeline, "scheduler") else None
