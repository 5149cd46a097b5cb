"""Which guidance branch is this call, when the pipeline does not say?

Everything that a denoiser is given stays the same through all steps of one branch, except for the sample, the time and
residuals computed from them. A pipeline that passes the very same tensors is recognised by their identity, which takes
microseconds. Where it makes new ones, values are compared, and what is found out is remembered (see `roles`).
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

from .context import CallContext, current_context, running_context
from .registry import HookOrder, ModelHook
from .roles import Leaves, Roles, Snapshot, leaves_of, parameter_names, role_by_name
from .runs import current_step

_logger = logging.getLogger(__name__)
_MOST_STRANGE = 4
"""Steps in a row that may look like new requests before a warning is logged."""
_NOTHING = "all of its arguments change at every step"


class _Branch:
    """One sequence of calls, as its last call left it."""

    def __init__(self, name: str | None, *, is_named: bool = False) -> None:
        self.name = name
        """None as long as nothing distinguishes it."""
        self.is_named = is_named
        """Whether the pipeline named it."""
        self.key: tuple[Hashable, ...] = ()
        self.values: dict[str, Snapshot] = {}
        self.has_copies = False
        """Whether all values can be compared with those of the next call, as is needed to learn roles."""
        self.step: int | None = None
        """The step of the last call, if the scheduler counts."""
        self.new_objects: dict[str, int] = {}
        """At how many calls in a row an argument was a new object with the old values."""
        self.doubtful: list[dict[str, Snapshot]] = []
        """What differed at calls that were later steps of this branch, or calls of others."""

    def moved(self, leaves: Leaves, paths: Iterable[str]) -> set[str]:
        """Those that have other values than at the last call. This may wait for the device."""
        values = self.values
        return {
            path
            for path in paths
            if (not values[path].equals(leaves.get(path)) if path in values else leaves.get(path) is not None)
        }

    def conditioning(self, roles: Roles, leaves: Leaves) -> list[str]:
        """The conditioning of the last call and of this one."""
        return roles.paths({**self.values, **leaves}, "conditioning")

    def has_passed(self, roles: Roles, leaves: Leaves) -> bool:
        """Whether this call is at a later step than the last one: the sample has changed, and the time."""
        groups = (roles.candidates(leaves, "time"), roles.candidates(leaves, "sample"))
        return all(bool(self.moved(leaves, paths)) for paths in groups if paths)

    def is_at_once(self, roles: Roles, leaves: Leaves) -> bool:
        """Whether this call is surely at the time of the last one."""
        if self.step is not None and current_step() != self.step:
            return False
        times = roles.paths(self.values, "time")
        return roles.have_moved(times) and all(self.values[path].is_surely_same(leaves.get(path)) for path in times)

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
        self.calm = 0
        """Calls since the last new branch."""
        self.strange = 0
        """Steps in a row that looked like new requests."""

    def unnamed(self) -> list[_Branch]:
        return [branch for branch in self.branches if not branch.is_named]

    def merge(self, roles: Roles) -> None:
        """Merge branches that can no longer be told apart."""
        kept: list[_Branch] = []
        for branch in self.unnamed():
            held = {path: value.held for path, value in branch.values.items()}
            if all(other.moved(held, other.conditioning(roles, held)) for other in kept):
                kept.append(branch)
            else:
                self.branches.remove(branch)


class _OpenCall(NamedTuple):
    """A call that has not returned yet."""

    token: Token[CallContext]
    was_learning: bool
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
    most_branches = 64
    """Held for a model at a time; the one that was used longest ago goes first."""

    def __init__(self) -> None:
        self.roles = Roles()
        self._parameters: tuple[str, ...] = ()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()
        self._count = 0
        self._open = _Open()
        self._lock = threading.RLock()
        self._trouble: str | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._parameters = parameter_names(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context = current_context()
        leaves = leaves_of(self._parameters, args, kwargs)
        with self._lock:
            learning = self.roles.is_learning(leaves)
            branch = self._branch_of(module, context, leaves, learning)
        inner = context if branch == context.branch else context._replace(branch=branch)
        self._open.calls.append(_OpenCall(running_context.set(inner), learning, leaves, (*args, *kwargs.values())))
        return args, kwargs

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

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        call = self._open.calls.pop()
        running_context.reset(call.token)
        if call.was_learning:
            self.roles.note_output(output)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        running_context.reset(self._open.calls.pop().token)

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

    def _branch_of(self, module: torch.nn.Module, context: CallContext, leaves: Leaves, learning: bool) -> str | None:
        group = self._groups.setdefault(context.request, _Group())
        self._groups.move_to_end(context.request)
        branch: _Branch | None
        key, version = self.roles.identity(leaves), self.roles.version
        if context.branch is not None:
            branch = self._named(group, context.branch, leaves, key, learning)
        else:
            known = [branch for branch in group.unnamed() if branch.key == key]
            if len(known) == 1 and not learning and self._is_clear(group, known[0], leaves):
                branch = known[0]
                branch.new_objects.clear()
                branch.doubtful.clear()
                self._note_known(module, group, branch)
            else:
                branch = self._look(module, group, leaves, learning)
        if branch is None:
            return None
        if self.roles.version != version:
            key = self.roles.identity(leaves)
        if learning or branch.has_copies or key != branch.key or not branch.is_named:
            branch.keep(self.roles, leaves, key, learning=learning)
        if group.branches[-1] is not branch:
            group.branches.remove(branch)
            group.branches.append(branch)
        return branch.name

    def _named(self, group: _Group, name: str, leaves: Leaves, key: tuple[Hashable, ...], learning: bool) -> _Branch:
        """The branch that the pipeline names; its calls are learned from."""
        for branch in group.branches:
            if branch.name == name:
                if learning or key != branch.key:
                    self._learn(branch, leaves, learning)
                return branch
        return self._add(group, _Branch(name, is_named=True))

    def _is_clear(self, group: _Group, branch: _Branch, leaves: Leaves) -> bool:
        """Whether identity alone shows that a call is one of this branch."""
        roles, samples = self.roles, self.roles.paths(branch.values, "sample")
        is_at_once = branch.is_at_once(roles, leaves)
        has_same_sample = all(branch.values[path].is_object(leaves.get(path)) for path in samples)
        if branch.name is None and roles.can_tell(leaves):
            return False
        if is_at_once and not has_same_sample:  # A tile, or another request with the same conditioning.
            return False
        if roles.remade.isdisjoint(leaves):
            return True
        # What is remade is not looked at. It may be all that distinguishes this call from one of the same step.
        is_same_step = is_at_once or (has_same_sample and bool(samples))
        certain = (path for path in roles.paths(leaves, "conditioning") if path not in roles.remade)
        has_tensor = any(isinstance(leaves[path], torch.Tensor) for path in certain)
        return has_tensor and not is_same_step and group.calm >= 2 * len(group.branches)

    def _look(self, module: torch.nn.Module, group: _Group, leaves: Leaves, learning: bool) -> _Branch | None:
        """The branch of a call by values, perhaps a new one; None if it cannot be known."""
        roles, unnamed = self.roles, group.unnamed()
        version, key = roles.version, roles.identity(leaves)
        apart = {branch: branch.moved(leaves, branch.conditioning(roles, leaves)) for branch in unnamed}
        same = [branch for branch in unnamed if not apart[branch] and not self._is_other_sequence(branch, leaves)]
        if roles.version != version:
            return self._look(module, group, leaves, learning)
        if len(same) > 1:
            same = [branch for branch in same if branch.key == key] or same
        if len(same) == 1:
            return self._matched(module, group, same[0], leaves, learning)
        if same:
            if same[0].has_passed(roles, leaves):
                self._note_strange(module, group, "its calls differ in nothing but the sample and the time")
            return None
        nearest = min(unnamed, key=lambda branch: len(apart[branch]), default=None)
        if nearest is not None and apart[nearest]:
            passed = nearest.has_passed(roles, leaves)
            samples = nearest.moved(leaves, roles.paths(leaves, "sample"))
            obvious = roles.obvious(leaves, apart[nearest] | samples)
            if obvious or (passed and self._is_changing(nearest, apart[nearest], leaves)):
                roles.note_changing(leaves, obvious or apart[nearest])
                group.merge(roles)
                return self._look(module, group, leaves, learning)
            if passed:
                paths = ", ".join(sorted(apart[nearest]))
                self._note_strange(module, group, f"there are new values at each call ({textwrap.shorten(paths, 60)})")
            if passed and nearest.doubtful and not any(roles.is_settled(path) for path in apart[nearest]):
                return None
            if not passed and len(apart[nearest]) == 1:
                roles.note_telling(*apart[nearest])
        return self._add(group, _Branch(self._new_name(leaves)))

    def _is_other_sequence(self, branch: _Branch, leaves: Leaves) -> bool:
        """Whether a call with this branch's conditioning is not part of it: at one time there is one sample."""
        roles, step = self.roles, current_step()
        if step is not None and branch.step not in (None, step):  # A sampler of second order may stay at one time.
            return False
        times, samples = roles.candidates(leaves, "time"), roles.candidates(leaves, "sample")
        if not times or branch.moved(leaves, times):
            return False
        moved = branch.moved(leaves, samples)
        stayed = [path for path in samples if path not in moved]
        if len(moved) == 1 and not roles.have_moved(moved) and any(role_by_name(path) == "sample" for path in stayed):
            # The argument that stayed is the one that is denoised, so the one that moved is what tells branches apart.
            roles.note_telling(*moved)
        return bool(moved) and roles.have_moved(times)

    def _is_changing(self, nearest: _Branch, paths: set[str], leaves: Leaves) -> bool:
        """Whether these have had a new value at each of the last steps, while other conditioning stayed."""
        stayed = (path for path in nearest.conditioning(self.roles, leaves) if path not in paths)
        if not any(isinstance(leaves.get(path), torch.Tensor) for path in stayed):
            return False
        for before in nearest.doubtful:
            if before.keys() == paths and all(value.equals(leaves.get(path)) for path, value in before.items()):
                nearest.doubtful.remove(before)  # It has come back: another branch.
                return False
        nearest.doubtful.append({path: Snapshot(leaves.get(path), hold=False, copy=True) for path in paths})
        return len(nearest.doubtful) >= (3 if any(map(self.roles.is_settled, paths)) else 2)

    def _matched(
        self, module: torch.nn.Module, group: _Group, branch: _Branch, leaves: Leaves, learning: bool
    ) -> _Branch:
        branch.name = branch.name or self._new_name(leaves)
        if branch.name is not None or branch.has_passed(self.roles, leaves):
            self._note_known(module, group, branch)
        self._learn(branch, leaves, learning)
        branch.doubtful.clear()
        group.calm += 1
        return branch

    def _learn(self, branch: _Branch, leaves: Leaves, learning: bool) -> None:
        """Learn from a call of a branch, in comparison with its last one."""
        conditioning = branch.conditioning(self.roles, leaves)
        if learning and branch.has_copies and branch.has_passed(self.roles, leaves):
            self.roles.note_step(leaves, branch.moved(leaves, leaves))
        for path in conditioning:
            value, last = leaves.get(path), branch.values.get(path)
            if isinstance(value, torch.Tensor) and last is not None and value is not last.held and last.equals(value):
                branch.new_objects[path] = branch.new_objects.get(path, 0) + 1
                if branch.new_objects[path] == 2 and path not in self.roles.remade:
                    self.roles.note_remade(path)
            else:
                branch.new_objects.pop(path, None)

    def _new_name(self, leaves: Leaves) -> str | None:
        if not self.roles.can_tell(leaves):
            return None
        self._count += 1
        return f"conditioning {self._count}"

    def _add(self, group: _Group, branch: _Branch) -> _Branch:
        group.branches.append(branch)
        group.calm = 0
        while sum(len(each.branches) for each in self._groups.values()) > self.most_branches:
            next(each for each in self._groups.values() if each.branches).branches.pop(0)
        for request in [request for request, each in self._groups.items() if not each.branches]:
            del self._groups[request]
        return branch

    # ------------------------------------------------------------------------------------------ trouble

    def _note_known(self, module: torch.nn.Module, group: _Group, branch: _Branch) -> None:
        if branch.name is None:
            self._note_strange(module, group, _NOTHING)
        else:
            group.strange = 0

    def _note_strange(self, module: torch.nn.Module, group: _Group, reason: str) -> None:
        """Note that a step looks like the first one of a request, and warn if they all do."""
        group.strange += 1
        if group.strange < _MOST_STRANGE:
            return
        is_first = self._trouble is None
        self._trouble = (
            f"Every step of {type(module).__name__} looks like a new request, because {reason}. So nothing is reused "
            "from one step to the next. If it is one request, name the branch: with call_context(branch=...)."
        )
        if is_first:
            _logger.warning(self._trouble)
