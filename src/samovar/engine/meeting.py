"""Continuous batching: runs of one pipeline whose calls of the denoiser are merged.

Every run is its own call of the pipeline, in its own thread, with its own scheduler, steps, guidance and cache. Runs
take turns: only one thread runs at a time, and it passes its turn on when it comes to the denoiser. So encoders and
VAEs have one caller at a time, and whatever a library keeps for a process is never used by two. When no run can go on
without the denoiser, the calls of one form are concatenated, run once, and split.

Where components take turns on the device, encoding, denoising and decoding are phases, and to change from one to
another moves weights. Then runs wait at encoders and VAEs too, until nothing is left to do in the phase that is on the
device, or a wait has been long enough to be worth a change: one change is paid by all who wait for it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.errors import CancelledRequestError
from ..hooks import Handle, HookOrder, ModelHook, install_hook, is_watched
from ..hooks.roles import parameter_names
from ..trace.model_state import Generation
from .calling import random_state, set_random_state
from .merging import NO_ROWS, Forward, Given, KeptState, Rows, are_independent, merged

HOOK_NAME = "meeting"
DENOISER, ENCODER = "denoiser", "encoder"
GO_ON = ""
"""The role of a run that needs nothing but its turn."""
MAX_FORMS = 256
CHANGES_PER_WAIT = 8.0
"""A run waits for another phase this many times as long as a change of phase takes, while there is work in this one."""


@dataclass(eq=False)
class Member:
    """A run that takes part, and what it waits for."""

    priority: int = 0
    deadline: float = math.inf
    """When it must have begun."""
    adapters: Hashable = ()
    """What the model must have switched on."""
    is_cancelled: Callable[[], bool] = lambda: False
    random_state: list[torch.Tensor] = field(default_factory=list)
    """Of torch's own generators, while another run has its turn."""
    turn: threading.Event = field(default_factory=threading.Event)
    role: str | None = None
    """What it waits for: to go on, or a module of some role; None while it is computed."""
    number: int = 0
    since: float = 0.0
    rows: Rows = NO_ROWS
    """What is to be computed of a denoiser. Elsewhere the run computes it itself, in its turn."""
    batch: Sequence[Member] = ()
    """Those to compute with it, for the one that is first among them."""
    output: Any = None
    error: BaseException | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Higher priorities are first; among equals, those that came first: so each run gets a step in turn."""
        return -self.priority, self.number

    def compute(self) -> None:
        """Its own output, or its own error."""
        try:
            self.output = self.rows.forward(*self.rows.given)
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            self.error = error

    def take(self) -> Any:
        """What was computed for it; raises what went wrong."""
        output, self.output = self.output, None
        if self.error is not None:
            raise self.error
        return output


def choose_role(waiting: Sequence[Member], current: str | None, now: float, change_s: float) -> str | None:
    """The phase to go on with: the current one, unless nothing waits for it, or something that is more urgent has
    waited for another."""
    here = [member for member in waiting if member.role == current]
    most = max((member.priority for member in here), default=-math.inf)
    due = [
        member
        for member in waiting
        if member.role != current
        and (member.priority > most or now >= min(member.deadline, member.since + CHANGES_PER_WAIT * change_s))
    ]
    return min(due or here or waiting, key=lambda member: member.rank).role


class Meeting(Handle):
    """Where the runs of a pipeline meet. `switch` makes the model have a run's adapters."""

    def __init__(
        self,
        doors: Mapping[str, Sequence[torch.nn.Module]],
        pipeline: Any,
        max_batch: int,
        switch: Callable[[Any], None] = lambda adapters: None,
    ) -> None:
        """`doors`: denoisers, and, where to change between phases takes time, what is called in the others."""
        super().__init__()
        self.num_merged = self.num_changes = 0
        """Calls that were computed together with others, and changes of phase."""
        self._max_batch, self._switch = max_batch, switch
        self._lock = threading.Lock()
        self._holder: Member | None = None
        self._open: list[Member] = []
        self._numbers = itertools.count()
        self._role: str | None = ""
        self._change_s = self._changed_at = 0.0
        self._random_state: list[torch.Tensor] = []
        """What it was before any run began."""
        self._limits: dict[Hashable, int] = {}
        """By form, how many calls are computed at once: 1 if they are not independent, fewer if memory was short."""
        self._kept = KeptState(pipeline)
        self._generations = {module: Generation(module, module.modules) for module in doors.get(DENOISER, ())}
        self._phases = frozenset(doors)
        for role, modules in doors.items():
            for module in modules:
                install_hook(self._undo, module, HOOK_NAME, _DoorHook(self, role, parameter_names(module)))

    @property
    def problem(self) -> str:
        """Why there is only one run at a time, if the model was seen to need that."""
        return self._kept.problem

    # ------------------------------------------------------------------------------------------ turns

    @contextlib.contextmanager
    def member(self, **how: Any) -> Iterator[None]:
        """A run, inside of which no other one runs but while this one waits. `how`: fields of `Member`."""
        with self._lock:
            if not self._open:
                self._random_state = random_state()
            # Each begins with it, and leaves it behind.
            member = Member(random_state=self._random_state, **how)
            self._open.append(member)
        token = _member.set(member)
        try:
            self._wait(member, GO_ON)
            yield
        finally:
            _member.reset(token)
            with self._lock:
                self._open.remove(member)
                if self._holder in (None, member):
                    self._pass_on()

    def _wait(self, member: Member, role: str, rows: Rows = NO_ROWS) -> None:
        """Let others run until it is this run's turn; raises why there is none. All is then what it was before."""
        if self._holder is member:
            member.random_state = random_state()
        with self._lock:
            member.role, member.number, member.since = role, next(self._numbers), time.monotonic()
            member.rows, member.batch = rows, ()
            if self._holder in (None, member):
                self._pass_on()
        member.turn.wait()
        member.turn.clear()
        self._switch(member.adapters)
        set_random_state(member.random_state)
        if member.error is not None:
            raise member.error

    def _pass_on(self) -> None:
        """Give the turn to a run that can go on, or else to the first of those that wait for one phase."""
        waiting = [member for member in self._open if member.role is not None]
        for member in waiting:
            if member.role != GO_ON and member.is_cancelled():
                member.role, member.error = GO_ON, CancelledRequestError("The request was cancelled.")
        ready = [member for member in waiting if member.role == GO_ON]
        at_doors = [member for member in waiting if member.role != GO_ON]
        self._holder = holder = None
        if ready:
            holder = min(ready, key=lambda member: member.rank)
            holder.role = None
        elif at_doors:
            holder, *_ = batch = self._next_batch(at_doors)
            holder.batch = batch
            for member in batch:
                member.role = None
        if holder is not None:
            self._holder = holder
            holder.turn.set()

    def _next_batch(self, waiting: Sequence[Member]) -> list[Member]:
        """The first of the phase to go on with, and those that can be merged with it."""
        now = time.monotonic()
        role = choose_role(waiting, self._role, now, self._change_s)
        self._enter(role, now)
        here = sorted((member for member in waiting if member.role == role), key=lambda member: member.rank)
        first, *others = here
        limit = self._limits.get(first.rows.form, self._max_batch)
        fitting = (member for member in others if first.rows.fits(member.rows))
        return [first, *itertools.islice(fitting, limit - 1)]

    def _enter(self, role: str | None, now: float) -> None:
        if self._role != role:
            self.num_changes += bool(self._role)
            self._role, self._changed_at = role, now

    def _note_change(self) -> None:
        """The first call of a phase is over: that is what it takes to change to it."""
        if self._changed_at:
            self._change_s, self._changed_at = time.monotonic() - self._changed_at, 0.0

    # ------------------------------------------------------------------------------------------ at the doors

    def arrive(self, role: str, module: torch.nn.Module, names: Sequence[str], forward: Forward, given: Given) -> Any:
        """Compute a call: in its phase, and of a denoiser alone or with others. `names`: those of its parameters."""
        member = _member.get()
        if member is None or member is not self._holder or is_watched():
            return forward(*given)
        is_alone = len(self._open) == 1
        if role != DENOISER:
            self.wait_for(role)
        elif not is_alone and self._kept.may_wait(module):
            return self._meet(module, names, member, forward, given)
        self._enter(role, time.monotonic())
        output = forward(*given)
        self._note_change()
        if role == DENOISER:
            self._kept.note(module, member)
        return output

    def wait_for(self, role: str) -> None:
        """Wait for a phase, where it takes time to change to it, and others run meanwhile."""
        member = _member.get()
        if member and member is self._holder and role in self._phases - {self._role} and len(self._open) > 1:
            self._wait(member, role)

    def _meet(
        self, module: torch.nn.Module, names: Sequence[str], member: Member, forward: Forward, given: Given
    ) -> Any:
        state = id(module), member.adapters, self._generations[module].check()
        self._wait(member, DENOISER, Rows.of(given, names, forward, state))
        others = member.batch[1:]
        if member.batch:  # Else another run has computed it.
            try:
                self._compute(member.batch)
            finally:  # After an interrupt, those that it should have computed wait for another.
                with self._lock:
                    is_over = all(each.output is not None or each.error for each in others)
                    for other in others:
                        other.role = GO_ON if is_over else DENOISER
            self._note_change()
        return member.take()

    def _compute(self, batch: Sequence[Member]) -> None:
        """Compute the calls of a batch, each with its output or its own error."""
        form, is_known = batch[0].rows.form, batch[0].rows.form in self._limits
        outputs = merged(*(member.rows for member in batch)) if len(batch) > 1 and is_known else None
        if outputs is not None:
            self.num_merged += len(batch)
            for member, output in zip(batch, outputs, strict=True):
                member.output = output
            return
        for member in batch:
            member.compute()
        if len(batch) > 1:
            self._limits[form] = max(1, len(batch) // 2) if is_known else self._limit(*batch[:2])

    def _limit(self, one: Member, other: Member) -> int:
        """How many calls of a form may be computed at once: one if their rows are not independent."""
        while len(self._limits) >= MAX_FORMS:
            del self._limits[next(iter(self._limits))]
        is_done = one.error is None and other.error is None
        is_fit = is_done and are_independent(one.rows, other.rows, (one.output, other.output))
        return self._max_batch if is_fit else 1


class _DoorHook(ModelHook):
    """Brings the calls of a module that no cache has answered."""

    order = HookOrder.MEETING

    def __init__(self, meeting: Meeting, role: str, names: Sequence[str]) -> None:
        self._meeting, self._role, self._names = meeting, role, names

    def arrive(self, module: torch.nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        return self._meeting.arrive(self._role, module, self._names, forward, (args, kwargs))


_member: ContextVar[Member | None] = ContextVar("samovar_member", default=None)
