"""Recognising the guidance branch of a call, where the pipeline does not name it.

Everything that a denoiser is given stays the same through all steps of one branch, except for the sample, the time and
residuals computed from them. So calls with the very same conditioning are of one branch, and else those whose values
are the same (see `roles`). A model that takes no conditioning is denoising one request as long as time runs one way.
Whatever is ambiguous is unknown, and nothing may be reused.
"""

from __future__ import annotations

import logging
import textwrap
import threading
from collections import OrderedDict
from collections.abc import Hashable
from contextvars import Token
from operator import is_
from typing import Any, NamedTuple

import torch

from ..core import nested
from .context import CallContext, running_context
from .registry import HookOrder, ModelHook
from .roles import Leaves, Roles, Snapshot, leaves_of, moved, parameter_names
from .runs import current_step

_logger = logging.getLogger(__name__)
MAX_UNRECOGNISED = 4
"""Steps in a row that may look like new requests before a warning is logged."""


class _Branch:
    """One sequence of calls, as its last call left it."""

    def __init__(self, name: str, *, is_named: bool = False) -> None:
        self.name = name
        self.is_named = is_named
        """Whether the pipeline named it."""
        self.num_strange = 0
        """Steps in a row that looked like new requests."""
        self._step: int | None = None
        """The step of the last call, if the scheduler counts."""
        self._place: float | None = None
        """Where the last call was in time, if that is all there is to know the branch by."""
        self._direction = 0
        """Which way time runs: 1 or -1, and 0 if that is not known yet."""
        self.values: dict[str, Snapshot] = {}
        """Those of the last call."""

    def difference(self, roles: Roles, leaves: Leaves, *, looks: bool) -> set[str]:
        """Why a call is not the next one of this branch: other conditioning or, at the same time, another sample."""
        values = self.values
        other = moved(values, leaves, roles.paths({**values, **leaves}, "conditioning"), looks=looks)
        step, times = current_step(), roles.candidates(leaves, "time")
        is_later = None not in (step, self._step) and step != self._step  # Some samplers stay at one time.
        if other or is_later or not roles.are_seen(times) or moved(values, leaves, times, looks=looks):
            return other
        return moved(values, leaves, roles.candidates(leaves, "sample"))

    def turn(self, place: float) -> int:
        """Which way time has run since the last call."""
        return 0 if self._place is None else (place > self._place) - (place < self._place)

    def is_over(self, place: float | None) -> bool:
        """Whether time has turned, so that a call is of another request."""
        return place is not None and self._direction * self.turn(place) < 0

    def go_on(self, roles: Roles, leaves: Leaves, place: float | None) -> None:
        """Learn from a call in comparison with the last one, and remember it. Of a sample only the identity is kept,
        once roles are learned."""
        is_learned, before = roles.are_learned(leaves), self.values
        if before and not is_learned:
            roles.learn_step(leaves, moved(before, leaves, leaves))
        if place is not None:
            self._direction, self._place = self.turn(place) or self._direction, place
        self._step, self.values = current_step(), {}
        for path, value in leaves.items():
            known = before.get(path)
            if known is None or not known.is_same(value, looks=False):
                known = Snapshot(value, hold=not is_learned or roles.of(path) in ("conditioning", "time"))
            self.values[path] = known


class _OpenCall(NamedTuple):
    """A call that has not returned yet."""

    token: Token[CallContext]
    arguments: list[Any]
    leaves: Leaves
    is_learned: bool
    """The role of each leaf was known before it."""


class BranchHook(ModelHook):
    """Names the branch of a denoiser's call by its conditioning, if the pipeline does not.

    Conditioning is held as long as the branch is, so that no new tensor can take the place of an old one in memory and
    be mistaken for it. If the branch cannot be known it is None, and nothing may be reused.
    """

    order = HookOrder.OUTERMOST
    max_branches = 64
    """Held for a model at a time; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self.roles = Roles()
        self._model_name = ""
        self._parameters: tuple[str, ...] = ()
        self._branches: OrderedDict[CallContext, _Branch] = OrderedDict()
        """The one that was called last at the end."""
        self._count = self._num_unknown = 0
        self._open = threading.local()
        """The calls of a thread, the innermost last."""
        self._lock = threading.RLock()
        self._trouble: str | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model_name, self._parameters = type(module).__name__, parameter_names(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context, leaves = running_context.get(), leaves_of(self._parameters, args, kwargs)
        with self._lock:
            is_learned = self.roles.are_learned(leaves)
            if context.branch is not None and is_learned:  # Nothing of it need be remembered.
                self._branches.pop(context, None)
                self._num_unknown = 0
            else:
                branch = self._branch_of(context, leaves)
                context = context._replace(branch=None if branch is None else branch.name)
        token, given = running_context.set(context), [*args, *kwargs, *kwargs.values()]
        vars(self._open).setdefault("calls", []).append(_OpenCall(token, given, leaves, is_learned))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        call = self._open.calls.pop()
        running_context.reset(call.token)
        if not (call.is_learned or self.roles.are_learned(call.leaves)):
            self.roles.note_output(output)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        running_context.reset(self._open.calls.pop().token)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves:
        """The leaves of the running call with these arguments, which hooks inside this one may have replaced."""
        given = [*args, *kwargs, *kwargs.values()]
        calls: list[_OpenCall] = getattr(self._open, "calls", [])
        for call in calls[-1:]:
            is_same = len(given) == len(call.arguments) and all(map(is_, given, call.arguments))
            if is_same and not any("." in path for path in call.leaves):  # Containers may have other contents now.
                return call.leaves
        return leaves_of(self._parameters, args, kwargs)

    def samples(self) -> list[torch.Tensor]:
        """The samples of the running call, before they are split over ranks."""
        leaves = self._open.calls[-1].leaves
        return [leaves[path] for path in self.roles.paths(leaves, "sample") if isinstance(leaves[path], torch.Tensor)]

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._branches.clear()
        return module

    def drop(self, request: Hashable) -> None:
        """Forget the branches of one request, and release their conditioning."""
        with self._lock:
            for key in [key for key in list(self._branches) if key.request == request]:
                del self._branches[key]

    def trouble(self) -> str | None:
        """Why nothing can be reused from step to step, if so. It was logged as a warning too."""
        return self._trouble

    # ------------------------------------------------------------------------------------------ which branch is it?

    def _branch_of(self, context: CallContext, leaves: Leaves) -> _Branch | None:
        if context.branch is not None:
            return self._go_on(context, self._branches.get(context) or _Branch(context.branch, is_named=True), leaves)
        can_tell = self.roles.can_tell(leaves)
        place = None if can_tell else self._place(leaves)
        if not can_tell and place is None:
            self._note_unknown("all of its arguments change at every step")
            return None
        differences = self._differences(context.request, leaves, can_tell)
        same = [branch for branch, difference in differences.items() if not difference]
        for branch in [branch for branch in same if branch.is_over(place)]:
            same.remove(branch)
            del differences[branch], self._branches[context._replace(branch=branch.name)]
        if len(same) > 1:
            self._note_unknown("its calls differ in nothing but the sample and the time")
            return None
        if same:
            same[0].num_strange = 0
            return self._go_on(context, same[0], leaves, place)
        new = _Branch(f"{'conditioning' if can_tell else 'request'} {self._count + 1}")
        if differences:
            nearest = min(differences, key=lambda branch: len(differences[branch]))
            now_other = moved(nearest.values, leaves, leaves)
            if self.roles.learn_missing(leaves, now_other):
                for branch in differences:  # What set them apart is no conditioning.
                    del self._branches[context._replace(branch=branch.name)]
                return self._branch_of(context, leaves)
            if self.roles.is_later(leaves, now_other):
                new.num_strange = nearest.num_strange + 1
                paths = textwrap.shorten(", ".join(sorted(differences[nearest])), 60)
                self._note(new.num_strange, f"there are new values at each call ({paths})")
        self._count += 1
        return self._go_on(context, new, leaves, place)

    def _differences(self, request: Hashable, leaves: Leaves, can_tell: bool) -> dict[_Branch, set[str]]:
        """Why a call is not the next one of each branch of a request; by identity alone, if that leaves one."""
        known = [one for key, one in reversed(self._branches.items()) if key.request == request and not one.is_named]
        for looks in (False, True) if can_tell else (True,):
            found = {branch: branch.difference(self.roles, leaves, looks=looks) for branch in known}
            if sum(not difference for difference in found.values()) == 1:
                break
        return found

    def _go_on(self, context: CallContext, branch: _Branch, leaves: Leaves, place: float | None = None) -> _Branch:
        key = context._replace(branch=branch.name)
        self._branches[key] = branch
        self._branches.move_to_end(key)
        if len(self._branches) > self.max_branches:
            self._branches.popitem(last=False)
        self._num_unknown = 0
        branch.go_on(self.roles, leaves, place)
        return branch

    def _place(self, leaves: Leaves) -> float | None:
        """Where a call is in time: the scheduler's step, or the time that is given. This may wait for the device."""
        step, times = current_step(), [leaves[path] for path in self.roles.paths(leaves, "time")]
        time = next((time for time in times if time is not None), None)
        if step is None and isinstance(time, torch.Tensor):
            return float(time.max()) if time.numel() and nested.is_comparable(time) else None
        return step if step is not None else time

    def _note_unknown(self, why: str) -> None:
        self._num_unknown += 1
        self._note(self._num_unknown, why)

    def _note(self, num_strange: int, why: str) -> None:
        """Warn if calls look like new requests again and again."""
        if num_strange < MAX_UNRECOGNISED:
            return
        is_first = self._trouble is None
        self._trouble = (
            f"Every step of {self._model_name} looks like a new request, because {why}. So nothing is reused "
            "from one step to the next. If it is one request, name the branch: with call_context(branch=...)."
        )
        if is_first:
            _logger.warning(self._trouble)
