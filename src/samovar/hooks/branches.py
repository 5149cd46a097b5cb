"""Which guidance branch is this call, when the pipeline does not say?

Everything that a denoiser is given, but the sample, the time and residuals computed from them, stays the same through
all steps of one branch. A pipeline that passes the very same tensors is recognised by their identity, which takes
microseconds. Where it makes new ones, values are compared, and what is found out is kept (see `roles`).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextvars import Token
from typing import Any, NamedTuple

import torch

from .context import CallContext, current_context, enter_context, leave_context
from .registry import HookOrder, ModelHook
from .roles import Leaves, Mark, Roles, hint, leaves_of, parameter_names, same_marks
from .runs import Adopt, current_run, current_step, run_around

_logger = logging.getLogger(__name__)
_warned: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_MOST_STEPS = 4
"""Steps in a row that may look like new requests before something is said."""
_NOTHING = "nothing but the sample and what changes with it is passed to it"


def _listed(paths: Iterable[str]) -> str:
    first, *rest = sorted(paths)
    more = f", {rest[0]}" if len(rest) == 1 else f", {rest[0]} and {len(rest) - 1} more" if rest else ""
    return f"{first}{more} {'are' if rest else 'is'}"


class _Branch:
    """One line of calls, as its last call left it."""

    def __init__(self, name: str | None, *, is_named: bool = False) -> None:
        self.name = name
        self.is_named = is_named
        """By the pipeline."""
        self.key: tuple[Hashable, ...] = ()
        self.marks: dict[str, Mark] = {}
        """Its conditioning; as long as roles are learned, everything."""
        self.has_all = False
        self.step: int | None = None
        """That of the last call, where a scheduler counts."""
        self.samples: dict[str, int] = {}
        """Only the identity: nothing of a sample is kept."""
        self.times: dict[str, Mark] = {}
        self.new_objects: dict[str, int] = {}
        """At how many calls in a row an argument was a new object with the old values."""
        self.doubtful: list[dict[str, Mark]] = []
        """What differed at calls that were later steps of this branch, or calls of others."""

    def moved(self, leaves: Leaves, paths: Iterable[str]) -> set[str]:
        """Those that have other values than at the last call. This may wait for the device."""
        return {path for path in paths if self._has_moved(path, leaves.get(path))}

    def _has_moved(self, path: str, value: Any) -> bool:
        mark = self.marks.get(path) or self.times.get(path)
        if mark is not None:
            return not mark.equals(value)
        return id(value) != self.samples[path] if path in self.samples else value is not None

    def has_passed(self, roles: Roles, leaves: Leaves) -> bool:
        """Whether this call is at a later step than the last one: the sample has changed, and the time."""
        times, samples = roles.times(leaves), roles.samples(leaves)
        return (not times or bool(self.moved(leaves, times))) and (not samples or bool(self.moved(leaves, samples)))

    def is_at_once(self, roles: Roles, leaves: Leaves) -> bool:
        """Whether this call is surely at the time of the last one."""
        if self.step is not None and current_step() != self.step:
            return False
        is_same = all(mark.is_surely_same(leaves.get(path)) for path, mark in self.times.items())
        return is_same and roles.have_moved(self.times)

    def keep(self, roles: Roles, leaves: Leaves, key: tuple[Hashable, ...], *, learning: bool) -> None:
        """Remember the call."""
        self.step = current_step()
        if learning:
            self.marks = {
                path: Mark(value, hold=roles.of(path) in ("conditioning", "time"), copy=True)
                for path, value in leaves.items()
            }
        elif key != self.key or self.has_all or not self.marks:
            self.marks = {
                path: Mark(value, hold=True, copy=False)
                for path, value in leaves.items()
                if roles.of(path) == "conditioning"
            }
        self.has_all, self.key = learning, key
        self.samples = {path: id(value) for path, value in leaves.items() if roles.of(path) == "sample"}
        self.times = {p: Mark(leaves[p], hold=True, copy=False) for p in leaves if roles.of(p) == "time"}


class _Line:
    """The branches of one request."""

    def __init__(self) -> None:
        self.branches: OrderedDict[str | None, _Branch] = OrderedDict()
        """In the order in which they were last called. One without a name has nothing to be known by, yet."""
        self.by_key: dict[tuple[Hashable, ...], list[_Branch]] = {}
        self.version = 0
        """Of the roles, when the keys were made."""
        self.calm = 0
        """Calls since the last new branch."""
        self.strange = 0
        """Steps in a row that looked like new requests."""

    def set_key(self, branch: _Branch, key: tuple[Hashable, ...]) -> None:
        if branch not in self.by_key.get(key, ()):
            self._forget_key(branch)
            self.by_key.setdefault(key, []).append(branch)

    def remove(self, branch: _Branch) -> None:
        self.branches.pop(branch.name, None)
        self._forget_key(branch)

    def unnamed(self) -> list[_Branch]:
        return [branch for branch in self.branches.values() if not branch.is_named]

    def merge(self, roles: Roles) -> None:
        """Keep one of those branches that nothing tells apart any more."""
        kept: list[_Branch] = []
        for branch in self.unnamed():
            if any(_are_alike(branch, other, roles) for other in kept):
                self.remove(branch)
            else:
                kept.append(branch)

    def _forget_key(self, branch: _Branch) -> None:
        others = [other for other in self.by_key.pop(branch.key, ()) if other is not branch]
        if others:
            self.by_key[branch.key] = others


def _are_alike(one: _Branch, other: _Branch, roles: Roles) -> bool:
    paths = [path for path in {*one.marks, *other.marks} if roles.of(path) == "conditioning"]
    return all(same_marks(one.marks.get(path), other.marks.get(path)) for path in paths)


class _Open(NamedTuple):
    """A call that is running."""

    token: Token[CallContext]
    is_learning: bool


class BranchHook(ModelHook):
    """Names the branch of a denoiser's call by its conditioning, where the pipeline does not.

    Conditioning is held as long as the branch is, so that no new tensor can take the place of an old one in memory and
    be mistaken for it. Where it cannot be known whose call it is, the branch is None: nothing may be reused then.
    """

    order = HookOrder.OUTERMOST
    most_branches = 64
    """Held for a model at a time; the one that was used longest ago goes first."""

    adopt: Adopt | None = None
    """If set, calls from a pipeline that is not hooked are a request of their own as well, and it is handed to this."""

    def __init__(self) -> None:
        self.roles = Roles()
        self._parameters: tuple[str, ...] = ()
        self._lines: OrderedDict[Hashable, _Line] = OrderedDict()
        self._count = 0
        self._open = threading.local()
        self._lock = threading.RLock()
        self._trouble: str | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._parameters = parameter_names(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        context = current_context()
        if self.adopt is not None and (context.request is None or current_run() is not None):
            run = run_around(module, self.adopt)
            if context.request is None and run is not None:
                context = context._replace(request=run.request)
        leaves = leaves_of(self._parameters, args, kwargs)
        with self._lock:
            learning = self.roles.is_learning(leaves)
            branch = self._branch_of(module, context, leaves, learning)
        self._calls().append(_Open(enter_context(context._replace(branch=branch)), learning))
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        call = self._calls().pop()
        leave_context(call.token)
        if call.is_learning:
            self.roles.note_output(output)
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        leave_context(self._calls().pop().token)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self._lines.clear()
        return module

    def drop(self, request: Hashable) -> None:
        """Forget the branches of one request, and let go of their conditioning."""
        self._lines.pop(request, None)

    def trouble(self) -> str | None:
        """Why nothing can be reused from step to step, if that is so; it was logged as a warning too."""
        return self._trouble

    def _calls(self) -> list[_Open]:
        calls: list[_Open] = vars(self._open).setdefault("calls", [])
        return calls

    # ------------------------------------------------------------------------------------------ whose call is it?

    def _branch_of(self, module: torch.nn.Module, context: CallContext, leaves: Leaves, learning: bool) -> str | None:
        line = self._lines.get(context.request)
        if line is None:
            line = self._lines[context.request] = _Line()
        self._lines.move_to_end(context.request)
        roles = self.roles
        if context.branch is not None:
            self._follow(line, context.branch, leaves, learning)
            return context.branch
        key, has_tensor = roles.identity(leaves)
        known = line.by_key.get(key, ()) if line.version == roles.version else ()
        if len(known) == 1 and not learning and self._is_clear(line, known[0], leaves, has_tensor):
            branch = known[0]
            branch.new_objects.clear()
            branch.doubtful.clear()
            if branch.name is None:
                self._note_strange(module, line, _NOTHING)
            else:
                line.strange = 0
        else:
            found = self._look(module, line, leaves, learning)
            if found is None:
                return None
            branch, key = found, roles.identity(leaves)[0]
        if line.version != roles.version:
            line.by_key.clear()
            line.version = roles.version
        line.set_key(branch, key)
        branch.keep(roles, leaves, key, learning=learning)
        line.branches.move_to_end(branch.name)
        return branch.name

    def _follow(self, line: _Line, name: str, leaves: Leaves, learning: bool) -> None:
        """Learn from a call whose branch the pipeline names."""
        branch = line.branches.get(name)
        key = self.roles.identity(leaves)[0]
        if branch is None:
            branch = self._add(line, _Branch(name, is_named=True))
        elif learning or key != branch.key:
            self._learn(branch, leaves, learning)
            key = self.roles.identity(leaves)[0]
        branch.keep(self.roles, leaves, key, learning=learning)
        line.branches.move_to_end(name)

    def _is_clear(self, line: _Line, branch: _Branch, leaves: Leaves, has_tensor: bool) -> bool:
        """Whether identity alone shows that a call is one of this branch."""
        is_at_once = branch.is_at_once(self.roles, leaves)
        has_same_sample = all(id(leaves.get(path)) == known for path, known in branch.samples.items())
        if branch.name is None and self.roles.can_tell(leaves):
            return False
        if is_at_once and not has_same_sample:  # A tile, or another request with the same conditioning.
            return False
        if self.roles.remade.isdisjoint(leaves):
            return True
        # What is remade is not looked at. It may be all that tells this call from one of the same step.
        is_same_step = is_at_once or (has_same_sample and bool(branch.samples))
        return has_tensor and not is_same_step and line.calm >= 2 * len(line.branches)

    def _look(self, module: torch.nn.Module, line: _Line, leaves: Leaves, learning: bool) -> _Branch | None:
        """The branch of a call by values, perhaps a new one; None if it cannot be known."""
        roles, unnamed = self.roles, line.unnamed()
        version, key = roles.version, roles.identity(leaves)[0]
        apart = {branch: branch.moved(leaves, self._conditioning(branch, leaves)) for branch in unnamed}
        same = [branch for branch in unnamed if not apart[branch]]
        same = [branch for branch in same if not self._is_other_line(branch, leaves)]
        if roles.version != version:
            return self._look(module, line, leaves, learning)
        if len(same) > 1:
            same = [branch for branch in same if branch.key == key] or same
        if len(same) == 1:
            return self._matched(module, line, same[0], leaves, learning)
        if same:
            if same[0].has_passed(roles, leaves):
                self._note_strange(module, line, "its calls differ in nothing but the sample and the time")
            return None
        nearest = min(unnamed, key=lambda branch: len(apart[branch]), default=None)
        if nearest is not None and apart[nearest]:
            passed = nearest.has_passed(roles, leaves)
            samples = nearest.moved(leaves, [path for path in leaves if roles.of(path) == "sample"])
            obvious = roles.obvious(leaves, apart[nearest] | samples)
            if obvious or (passed and self._is_changing(nearest, apart[nearest], leaves)):
                roles.note_changing(leaves, obvious or apart[nearest])
                line.merge(roles)
                return self._look(module, line, leaves, learning)
            if passed:
                self._note_strange(module, line, f"{_listed(apart[nearest])} new at each call")
            if passed and nearest.doubtful and not any(roles.is_settled(path) for path in apart[nearest]):
                return None
            if not passed and len(apart[nearest]) == 1:
                roles.note_telling(*apart[nearest])
        return self._add(line, _Branch(self._new_name() if roles.can_tell(leaves) else None))

    def _conditioning(self, branch: _Branch, leaves: Leaves) -> list[str]:
        return [path for path in {**branch.marks, **leaves} if self.roles.of(path) == "conditioning"]

    def _is_other_line(self, branch: _Branch, leaves: Leaves) -> bool:
        """Whether a call with this branch's conditioning is not one of it: at one time there is one sample."""
        roles, step = self.roles, current_step()
        if step is not None and branch.step not in (None, step):  # A sampler of second order may stay at one time.
            return False
        times, samples = roles.times(leaves), roles.samples(leaves)
        if not times or branch.moved(leaves, times):
            return False
        moved = branch.moved(leaves, samples)
        stayed = [path for path in samples if path not in moved]
        if len(moved) == 1 and not roles.have_moved(moved) and any(hint(path) == "sample" for path in stayed):
            roles.note_telling(*moved)  # That is what is denoised, so it is this that tells branches apart.
        return bool(moved) and roles.have_moved(times)

    def _is_changing(self, nearest: _Branch, paths: set[str], leaves: Leaves) -> bool:
        """Whether these have had a new value at each of the last steps, while other conditioning stayed."""
        stayed = (path for path in self._conditioning(nearest, leaves) if path not in paths)
        if not any(isinstance(leaves.get(path), torch.Tensor) for path in stayed):
            return False
        for before in nearest.doubtful:
            if before.keys() == paths and all(mark.equals(leaves.get(path)) for path, mark in before.items()):
                nearest.doubtful.remove(before)  # It has come back: another branch.
                return False
        nearest.doubtful.append({path: Mark(leaves.get(path), hold=False, copy=True) for path in paths})
        return len(nearest.doubtful) >= (3 if any(map(self.roles.is_settled, paths)) else 2)

    def _matched(
        self, module: torch.nn.Module, line: _Line, branch: _Branch, leaves: Leaves, learning: bool
    ) -> _Branch:
        if branch.name is None and self.roles.can_tell(leaves):
            line.remove(branch)
            branch.name = self._new_name()
            line.branches[branch.name] = branch
        if branch.name is None:
            if branch.has_passed(self.roles, leaves):
                self._note_strange(module, line, _NOTHING)
        else:
            line.strange = 0
        self._learn(branch, leaves, learning)
        branch.doubtful.clear()
        line.calm += 1
        return branch

    def _learn(self, branch: _Branch, leaves: Leaves, learning: bool) -> None:
        """Learn from a call of a branch, in comparison with its last one."""
        conditioning = self._conditioning(branch, leaves)
        if learning and branch.has_all and branch.has_passed(self.roles, leaves):
            self.roles.note_step(leaves, branch.moved(leaves, leaves))
        for path in conditioning:
            value, mark = leaves.get(path), branch.marks.get(path)
            if isinstance(value, torch.Tensor) and mark is not None and value is not mark.held and mark.equals(value):
                branch.new_objects[path] = branch.new_objects.get(path, 0) + 1
                if branch.new_objects[path] == 2 and path not in self.roles.remade:
                    self.roles.note_remade(path)
            else:
                branch.new_objects.pop(path, None)

    def _new_name(self) -> str:
        self._count += 1
        return f"conditioning {self._count}"

    def _add(self, line: _Line, branch: _Branch) -> _Branch:
        line.branches[branch.name] = branch
        line.calm = 0
        while sum(len(each.branches) for each in self._lines.values()) > self.most_branches:
            oldest = next(each for each in self._lines.values() if each.branches)
            oldest.remove(next(iter(oldest.branches.values())))
        for request in [request for request, each in self._lines.items() if not each.branches]:
            del self._lines[request]
        return branch

    def _note_strange(self, module: torch.nn.Module, line: _Line, reason: str) -> None:
        """Note that a step looks like the first one of a request, and say so if they all do."""
        line.strange += 1
        if line.strange < _MOST_STEPS:
            return
        self._trouble = (
            f"Every step of {type(module).__name__} looks like a new request, because {reason}. So nothing is reused "
            "from one step to the next. If it is one request, name the branch: with call_context(branch=...)."
        )
        if module not in _warned:
            _warned.add(module)
            _logger.warning(self._trouble)
