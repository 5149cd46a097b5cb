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
from collections.abc import Hashable, Iterable
from contextvars import Token
from operator import is_
from typing import Any, NamedTuple

import torch

from ..core import nested
from .context import CallContext, current_context, running_context
from .registry import HookOrder, ModelHook
from .roles import Leaves, Role, Roles, Snapshot, leaves_of, parameter_names, role_by_name
from .runs import current_step

_logger = logging.getLogger(__name__)
MAX_UNRECOGNISED = 4
"""Steps in a row that may look like new requests before a warning is logged."""
MIN_CHANGES = 2
"""Steps in a row at which an argument alone was new before it is taken to be made from the sample."""


class _Branch:
    """One sequence of calls, as its last call left it."""

    def __init__(self, name: str, *, is_named: bool = False) -> None:
        self.name = name
        self.is_named = is_named
        """Whether the pipeline named it."""
        self.key: tuple[Hashable, ...] = ()
        self.values: dict[str, Snapshot] = {}
        self.has_copies = False
        """Whether all values can be compared with those of the next call, as is needed to learn roles."""
        self.step: int | None = None
        """The step of the last call, if the scheduler counts."""
        self.place: float | None = None
        """Where the last call was in time, if that is all there is to know the branch by."""
        self.direction = 0
        """Which way time runs: 1 or -1, and 0 if that is not known yet."""

    def moved(self, leaves: Leaves, paths: Iterable[str]) -> set[str]:
        """Those that have other values than at the last call. This may wait for the device."""
        values = self.values
        return {
            path
            for path in paths
            if (not values[path].equals(leaves.get(path)) if path in values else leaves.get(path) is not None)
        }

    def other_conditioning(self, roles: Roles, leaves: Leaves) -> set[str]:
        """The conditioning that is not that of the last call."""
        return self.moved(leaves, roles.paths({**self.values, **leaves}, "conditioning"))

    def is_surely_at(self, times: Iterable[str], leaves: Leaves) -> bool:
        """Whether this call is at the time of the last one, as far as can be known without a look into tensors."""
        return all(path in self.values and self.values[path].is_surely_same(leaves.get(path)) for path in times)

    def turn(self, place: float) -> int:
        """Which way time has run since the last call."""
        return 0 if self.place is None else (place > self.place) - (place < self.place)

    def keep(self, roles: Roles, leaves: Leaves, key: tuple[Hashable, ...], *, learning: bool) -> None:
        """Remember the call. Of a sample only the identity is kept, unless roles are still being learned."""
        if learning or self.has_copies or key != self.key:
            self.values = {}
        for path, value in leaves.items():
            role = roles.of(path)
            if role != "conditioning" or path not in self.values:
                self.values[path] = Snapshot(value, hold=role in ("conditioning", "time"), copy=learning)
        self.step, self.key, self.has_copies = current_step(), key, learning


class _Group:
    """The branches of one request, the one that was called last at the end."""

    def __init__(self) -> None:
        self.branches: list[_Branch] = []
        self.num_strange = 0
        """Steps in a row that looked like new requests."""
        self.changing: tuple[set[str], int] = set(), 0
        """What alone was new at the last of them, and at how many in a row."""

    def unnamed(self) -> list[_Branch]:
        return [branch for branch in self.branches if not branch.is_named]

    def note_known(self) -> None:
        """Note a call of a branch that is known."""
        self.num_strange, self.changing = 0, (set(), 0)

    def merge(self, roles: Roles) -> None:
        """Merge branches that can no longer be told apart."""
        kept: list[_Branch] = []
        for branch in self.unnamed():
            held = {path: value.held for path, value in branch.values.items()}
            if all(other.other_conditioning(roles, held) for other in kept):
                kept.append(branch)
            else:
                self.branches.remove(branch)


class _OpenCall(NamedTuple):
    """A call that has not returned yet."""

    token: Token[CallContext]
    leaves: Leaves
    given: tuple[Any, ...]


class _Open(threading.local):
    """Those of a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_OpenCall] = []


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
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._count = 0
        self._open = _Open()
        self._lock = threading.RLock()
        self._trouble: str | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model_name, self._parameters = type(module).__name__, parameter_names(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context = current_context()
        leaves = leaves_of(self._parameters, args, kwargs)
        with self._lock:
            branch = self._branch_of(context, leaves)
        inner = context if branch == context.branch else context._replace(branch=branch)
        self._open.calls.append(_OpenCall(running_context.set(inner), leaves, (*args, *kwargs.values())))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        call = self._open.calls.pop()
        running_context.reset(call.token)
        if self.roles.is_learning(call.leaves):
            self.roles.note_output(output)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        running_context.reset(self._open.calls.pop().token)

    def samples(self) -> list[torch.Tensor]:
        """The samples of the running call, before they are split over ranks."""
        leaves = self._open.calls[-1].leaves.items() if self._open.calls else ()
        return [leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor) and self.roles.of(path) == "sample"]

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Leaves | None:
        """The leaves of these arguments, if they are those of the running call."""
        call = self._open.calls[-1] if self._open.calls else None
        given = (*args, *kwargs.values())
        is_it = call is not None and len(given) == len(call.given) and all(map(is_, given, call.given))
        return call.leaves if call is not None and is_it else None

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._groups.clear()
        return module

    def drop(self, request: Hashable) -> None:
        """Forget the branches of one request, and release their conditioning."""
        self._groups.pop(request, None)

    def trouble(self) -> str | None:
        """Why nothing can be reused from step to step, if so. It was logged as a warning too."""
        return self._trouble

    # ------------------------------------------------------------------------------------------ which branch is it?

    def _branch_of(self, context: CallContext, leaves: Leaves) -> str | None:
        group = self._groups.setdefault(context.request, _Group())
        self._groups.move_to_end(context.request)
        learning = self.roles.is_learning(leaves)
        branch = None
        if context.branch is not None:
            branch = self._named(group, context.branch, leaves)
        elif not learning:
            branch = self._by_identity(group, leaves)
        branch = branch or self._by_values(group, leaves)
        if branch is None:
            return None
        if learning or branch.has_copies or not branch.is_named:
            branch.keep(self.roles, leaves, self.roles.identity(leaves), learning=learning)
        if group.branches[-1] is not branch:
            group.branches.remove(branch)
            group.branches.append(branch)
        return branch.name

    def _named(self, group: _Group, name: str, leaves: Leaves) -> _Branch:
        """The branch that the pipeline names; roles are learned from its calls."""
        branch = next((branch for branch in group.branches if branch.name == name), None)
        if branch is None:
            return self._add(group, _Branch(name, is_named=True))
        self._learn(branch, leaves)
        return branch

    def _by_identity(self, group: _Group, leaves: Leaves) -> _Branch | None:
        """The only branch that has the very same conditioning."""
        key = self.roles.identity(leaves)
        known = [branch for branch in group.unnamed() if branch.key == key]
        if len(known) != 1 or not self.roles.can_tell(leaves) or self._is_beside(known[0], leaves, looks=False):
            return None
        group.note_known()
        return known[0]

    def _by_values(self, group: _Group, leaves: Leaves) -> _Branch | None:
        """The branch of a call by values, perhaps a new one; None if it cannot be known."""
        others = {branch: branch.other_conditioning(self.roles, leaves) for branch in group.unnamed()}
        same = [branch for branch in others if not (others[branch] or self._is_beside(branch, leaves, looks=True))]
        if not same and self._learned_from_others(group, others, leaves):
            return self._by_values(group, leaves)
        return self._only(group, same, leaves) if self.roles.can_tell(leaves) else self._by_time(group, same, leaves)

    def _only(self, group: _Group, same: list[_Branch], leaves: Leaves) -> _Branch | None:
        """The one of these branches, or a new one if there is none; None if there are several."""
        if len(same) > 1:
            key = self.roles.identity(leaves)
            same = [branch for branch in same if branch.key == key] or same
        if len(same) > 1:
            if self.roles.is_later(leaves, same[0].moved(leaves, leaves)):
                self._note_strange(group, "its calls differ in nothing but the sample and the time")
            return None
        if not same:
            self._count += 1
            kind = "conditioning" if self.roles.can_tell(leaves) else "request"
            return self._add(group, _Branch(f"{kind} {self._count}"))
        self._learn(same[0], leaves)
        group.note_known()
        return same[0]

    def _by_time(self, group: _Group, same: list[_Branch], leaves: Leaves) -> _Branch | None:
        """The request that a call without conditioning goes on with: time runs one way."""
        place = self._place(leaves)
        if place is None:
            self._note_strange(group, "all of its arguments change at every step")
            return None
        for branch in [branch for branch in same if branch.direction * branch.turn(place) < 0]:
            same.remove(branch)  # That request is over.
            group.branches.remove(branch)
        found = self._only(group, same, leaves)
        if found is not None:
            found.direction = found.turn(place) or found.direction
            found.place = place
        return found

    def _is_beside(self, branch: _Branch, leaves: Leaves, *, looks: bool) -> bool:
        """Whether a call with this branch's conditioning is not part of it, as a tile or another request: at one time
        there is one sample. A look into times may wait for the device."""
        roles, step = self.roles, current_step()
        if step is not None and branch.step not in (None, step):  # A sampler of second order may stay at one time.
            return False
        times, samples = roles.candidates(leaves, "time"), roles.candidates(leaves, "sample")
        if not times or not (branch.is_surely_at(times, leaves) or (looks and not branch.moved(leaves, times))):
            return False
        moved = branch.moved(leaves, samples)
        stayed = [path for path in samples if path not in moved]
        if len(moved) == 1 and not roles.is_known(moved) and any(role_by_name(path) == "sample" for path in stayed):
            # The argument that stayed is the one that is denoised, so the one that moved is what tells branches apart.
            roles.learn(next(iter(moved)), "conditioning")
        return bool(moved) and roles.is_known(times)

    def _place(self, leaves: Leaves) -> float | None:
        """Where a call is in time: the scheduler's step, or the time that is given. This may wait for the device."""
        step, times = current_step(), [leaves[path] for path in self.roles.paths(leaves, "time")]
        time = next((time for time in times if time is not None), None)
        if step is None and isinstance(time, torch.Tensor):
            return float(time.max()) if time.numel() and nested.is_comparable(time) else None
        return step if step is not None else time

    def _learn(self, branch: _Branch, leaves: Leaves) -> None:
        """Learn from a call of a branch, in comparison with its last one."""
        if branch.has_copies and self.roles.is_learning(leaves):
            moved = branch.moved(leaves, leaves)
            if self.roles.is_later(leaves, moved):
                self.roles.learn_step(leaves, moved)

    def _learned_from_others(self, group: _Group, others: dict[_Branch, set[str]], leaves: Leaves) -> bool:
        """Whether a call that fits no branch has shown that an argument has another role than was thought."""
        roles = self.roles
        nearest = min(others, key=lambda branch: len(others[branch]), default=None)
        if nearest is None or not others[nearest]:
            return False
        differing, moved = others[nearest], nearest.moved(leaves, leaves)
        if not roles.is_later(leaves, moved):
            if len(differing) == 1:
                roles.learn(next(iter(differing)), "conditioning")
            return False
        found = roles.obvious(leaves, moved) or self._changing(group, differing, leaves)
        for path, role in found.items():
            roles.learn(path, role)
        if found:
            group.merge(roles)
        else:
            paths = ", ".join(sorted(differing))
            self._note_strange(group, f"there are new values at each call ({textwrap.shorten(paths, 60)})")
        return bool(found)

    def _changing(self, group: _Group, differing: set[str], leaves: Leaves) -> dict[str, Role]:
        """What alone was new at the last steps, while other conditioning stayed: it is made from the sample."""
        roles = self.roles
        stayed = (leaves[path] for path in roles.paths(leaves, "conditioning") if path not in differing)
        if any(map(roles.is_settled, differing)) or not any(isinstance(value, torch.Tensor) for value in stayed):
            return {}
        before, count = group.changing
        group.changing = differing, count + 1 if before == differing else 1
        is_enough = group.changing[1] >= MIN_CHANGES
        return {path: roles.changing(path, leaves) for path in differing} if is_enough else {}

    def _add(self, group: _Group, branch: _Branch) -> _Branch:
        group.branches.append(branch)
        while sum(len(each.branches) for each in self._groups.values()) > self.max_branches:
            next(each for each in self._groups.values() if each.branches).branches.pop(0)
        for request in [request for request, each in self._groups.items() if not each.branches]:
            del self._groups[request]
        return branch

    def _note_strange(self, group: _Group, why: str) -> None:
        """Note why a step looks like the first one of a request, and warn if they all do."""
        group.num_strange += 1
        if group.num_strange < MAX_UNRECOGNISED:
            return
        is_first = self._trouble is None
        self._trouble = (
            f"Every step of {self._model_name} looks like a new request, because {why}. So nothing is reused "
            "from one step to the next. If it is one request, name the branch: with call_context(branch=...)."
        )
        if is_first:
            _logger.warning(self._trouble)
