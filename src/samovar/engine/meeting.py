"""Continuous batching: runs of one pipeline whose calls of the denoiser are merged.

Every run is its own call of the pipeline, in its own thread, with its own scheduler, steps, guidance and cache. Runs
take turns: only one thread runs at a time, and it passes its turn on when it comes to the denoiser. So encoders and
VAEs have one caller at a time, and whatever a library keeps for a process is never used by two. When no run can go on
without the denoiser, the calls of one form are concatenated, run once, and split.

Nothing is assumed of a model. Rows of a batch count as independent once a call that was merged has been compared with
the same call alone, and a model that keeps something from call to call serves one run at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core import nested
from ..core.errors import CancelledRequestError
from ..hooks import Handle, HookOrder, ModelHook, install_hook, is_watched
from ..hooks.roles import parameter_names, role_by_name
from ..trace.model_state import Generation

HOOK_NAME = "meeting"
MAX_ROUNDING = {torch.float32: 5e-3, torch.float64: 5e-3}
MAX_COARSE_ROUNDING = 0.02
"""How much an output may differ by the rounding of a merged call, relative to its size."""
MAX_LEAK = 1e-5
"""How much it may change by what is in other rows."""
MAX_FORMS = 256
_NOT_STATE = frozenset({"_parameters", "_modules", "config", "training"})
Given = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[[tuple[Any, ...], dict[str, Any]], Any]
Kept = list[tuple[str, Any, int | None]]


@dataclass(eq=False)
class Member:
    """A run that takes part."""

    priority: int
    is_cancelled: Callable[[], bool]
    adapters: Hashable
    """What the model must have switched on."""
    number: int
    turn: threading.Event = field(default_factory=threading.Event)
    random_state: list[torch.Tensor] | None = None
    """Of torch's own generators, while another run has its turn."""


@dataclass(eq=False)
class Call:
    """A run's call of a denoiser, waiting to be computed."""

    member: Member
    given: Given
    rows: Given
    """What it is given, with the one time of all rows once for each."""
    num_rows: int
    form: Hashable
    """Equal for calls that may be merged, but for the values of what has no rows."""
    forward: Forward
    number: int
    batch: list[Call] = field(default_factory=list)
    """The calls to compute with it, for the one that is first among them."""
    output: Any = None
    error: BaseException | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Higher priorities are first; among equals, those that came first: so each run gets a step in turn."""
        return -self.member.priority, self.number


class Meeting(Handle):
    """Where the runs of a pipeline meet. `switch` makes the model have a run's adapters."""

    def __init__(
        self,
        denoisers: Iterable[torch.nn.Module],
        components: Mapping[str, Any],
        max_batch: int,
        switch: Callable[[Any], None] = lambda adapters: None,
    ) -> None:
        super().__init__()
        self.problem = ""
        """Why there is only one run at a time, if the model was seen to need that."""
        self.num_merged = self.num_calls = 0
        """Calls that were computed together with others, and all of them."""
        self._max_batch, self._switch = max_batch, switch
        self._lock = threading.Lock()
        self._holder: Member | None = None
        self._num_open = 0
        self._random_state: list[torch.Tensor] = []
        """What it was before any run began."""
        self._ready: list[Member] = []
        self._calls: list[Call] = []
        self._numbers = itertools.count()
        self._is_independent: dict[Hashable, bool] = {}
        self._limits: dict[Hashable, int] = {}
        """By form, how many calls fit into memory together."""
        self._state = _State(components)
        self._generations: dict[tuple[int, Hashable], Generation] = {}
        self._parameters = {id(module): parameter_names(module) for module in denoisers}
        for module in denoisers:
            install_hook(self._undo, module, HOOK_NAME, _DoorHook(self))

    # ------------------------------------------------------------------------------------------ turns

    @contextlib.contextmanager
    def member(
        self, priority: int = 0, is_cancelled: Callable[[], bool] = lambda: False, adapters: Hashable = ()
    ) -> Iterator[None]:
        """A run, inside of which no other one runs but while this one waits for the denoiser."""
        member = Member(priority, is_cancelled, adapters, next(self._numbers))
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                self._random_state = _random_state()
            member.random_state = self._random_state  # Each begins with it, and leaves it behind.
            self._ready.append(member)
            if self._holder is None:
                self._pass_on()
        token = _member.set(member)
        try:
            self._take_turn(member)
            yield
        finally:
            _member.reset(token)
            with self._lock:
                self._num_open -= 1
                self._pass_on()

    def _take_turn(self, member: Member) -> None:
        """Wait for it, and make everything what it was when the run passed it on."""
        member.turn.wait()
        member.turn.clear()
        self._switch(member.adapters)
        if member.random_state is not None:
            _set_random_state(member.random_state)
            member.random_state = None

    def _pass_on(self) -> None:
        """Give the turn to a run that can go on, or else to the first of a batch, which computes it."""
        for call in [call for call in self._calls if call.member.is_cancelled()]:
            self._calls.remove(call)
            call.error = CancelledRequestError("The request was cancelled.")
            self._ready.append(call.member)
        self._holder = None
        if self._ready:
            self._holder = min(self._ready, key=lambda member: (-member.priority, member.number))
            self._ready.remove(self._holder)
        elif self._calls:
            batch = self._next_batch()
            batch[0].batch = batch
            self._calls = [call for call in self._calls if call not in batch]
            self._holder = batch[0].member
        if self._holder is not None:
            self._holder.turn.set()

    def _next_batch(self) -> list[Call]:
        """The first call, and those that can be merged with it."""
        first, *others = sorted(self._calls, key=lambda call: call.rank)
        limit = min(self._max_batch, self._limits.get(first.form, self._max_batch))
        if not self._is_independent.get(first.form, True):
            limit = 1
        return [first, *itertools.islice((call for call in others if _can_merge(first, call)), limit - 1)]

    # ------------------------------------------------------------------------------------------ the denoiser

    def compute(self, module: torch.nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call of a denoiser, alone or with others."""
        member = _member.get()
        if member is None or member is not self._holder or is_watched():
            return forward(args, kwargs)
        self.num_calls += 1
        if self._num_open == 1 or not self._may_wait(module):
            output = forward(args, kwargs)
            self._state.note(module, member)
            self.problem = self._state.problem
            return output
        call = self._described(module, member, forward, (args, kwargs))
        member.random_state = _random_state()
        with self._lock:
            self._calls.append(call)
            self._pass_on()
        try:
            self._take_turn(member)
        except BaseException:  # Its adapters could not be read.
            with self._lock:
                self._calls += call.batch[1:]
            raise
        if call.batch:
            self._compute(call.batch)
        if call.error is not None:
            raise call.error
        return call.output

    def _may_wait(self, module: torch.nn.Module) -> bool:
        """Whether others may run between two calls of one run."""
        return not self.problem and self._state.is_known(module)

    def _described(self, module: torch.nn.Module, member: Member, forward: Forward, given: Given) -> Call:
        names, (args, kwargs) = self._parameters[id(module)], given
        sample = args[0] if args else kwargs.get(names[0] if names else "", None)
        num_rows = len(sample) if isinstance(sample, torch.Tensor) and sample.dim() > 1 else 0
        key = id(module), member.adapters
        generation = self._generations.setdefault(key, Generation(module, module.modules)).check()
        rows = _with_times(given, names, num_rows)
        form = (*key, generation, nested.signature(rows))
        return Call(member, given, rows, num_rows, form if num_rows else object(), forward, next(self._numbers))

    def _compute(self, batch: list[Call]) -> None:
        """Compute the calls of a batch, each with its output or its own error."""
        first, form = batch[0], batch[0].form
        try:
            if len(batch) > 1 and form in self._is_independent:
                self._merge(batch)
                self.num_merged += len(batch)
            else:
                for call in batch:
                    self._alone(call)
                if len(batch) > 1:
                    self._remember(form, _is_independent(first, batch[1]))
        except BaseException as error:  # An interrupt, which ends all that were to be computed.
            for call in batch:
                call.error = error if call.output is None else call.error
            raise
        finally:
            with self._lock:
                self._ready += [call.member for call in batch[1:]]

    def _merge(self, batch: list[Call]) -> None:
        """Compute all together; where that fails, one after the other, so that each fails for itself."""
        outputs = _tried(lambda: _run_merged(batch))
        if outputs is None:
            self._limits[batch[0].form] = max(1, len(batch) // 2)
        for index, call in enumerate(batch):
            if outputs is None:
                self._alone(call)
            else:
                call.output = outputs[index]

    def _alone(self, call: Call) -> None:
        try:
            call.output = call.forward(*call.given)
        except BaseException as error:
            call.error = error
            if not isinstance(error, Exception):
                raise

    def _remember(self, form: Hashable, is_independent: bool) -> None:
        while len(self._is_independent) >= MAX_FORMS:
            self._limits.pop(dropped := next(iter(self._is_independent)), None)
            del self._is_independent[dropped]
        self._is_independent[form] = is_independent


class _DoorHook(ModelHook):
    """Brings the calls of a denoiser that no cache has answered."""

    order = HookOrder.MEETING

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def arrive(self, module: torch.nn.Module, forward: Forward, args: Any, kwargs: Any) -> Any:
        return self._meeting.compute(module, forward, args, kwargs)


_member: ContextVar[Member | None] = ContextVar("samovar_member", default=None)


# ------------------------------------------------------------------------------------------------ merging


def _has_rows(value: Any, num_rows: int) -> bool:
    """Whether a tensor seems to have a row for each row of the sample. One that only happens to be that long is found
    out when merged and separate calls are compared."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == num_rows


def _with_times(given: Given, names: Sequence[str], num_rows: int) -> Given:
    """The same with a time for each row, where there is one for all, as UNets are given it."""

    def spread(name: str, value: Any) -> Any:
        is_one = isinstance(value, torch.Tensor) and value.dim() == 0 and role_by_name(name) == "time"
        return value.expand(num_rows) if is_one else value

    args, kwargs = given
    known = zip(itertools.chain(names, itertools.repeat("")), args, strict=False)
    return tuple(spread(name, value) for name, value in known), {n: spread(n, value) for n, value in kwargs.items()}


def _can_merge(one: Call, other: Call) -> bool:
    """Whether two calls have the same form, and the same values of all that has no rows."""
    if one.form != other.form:
        return False
    pairs = zip(nested.leaves(one.rows), nested.leaves(other.rows), strict=True)
    return all(a is b or _has_rows(a, one.num_rows) or nested.equal(a, b) for (_, a), (_, b) in pairs)


def _merged(batch: list[Call]) -> Given:
    num_rows = batch[0].num_rows
    columns = zip(*(nested.tensors(call.rows) for call in batch), strict=True)
    merged = (torch.cat(column) if _has_rows(column[0], num_rows) else column[0] for column in columns)
    given: Given = nested.map_tensors(lambda _: next(merged), batch[0].rows)
    return given


def _run_merged(batch: list[Call]) -> list[Any]:
    """The outputs of calls that are computed at once; ValueError if they cannot be told apart."""
    first = batch[0]
    output = first.forward(*_merged(batch))
    num_rows = first.num_rows * len(batch)
    found = list(nested.tensors(output))
    if not found or not all(_has_rows(tensor, num_rows) for tensor in found):
        raise ValueError("The output has no rows.")
    # Whoever stores its share must not keep all of them in memory.
    shares = zip(*([part.clone() for part in torch.split(tensor, first.num_rows)] for tensor in found), strict=True)
    return [_with_tensors(output, share) for share in shares]


def _tried(function: Callable[[], list[Any]]) -> list[Any] | None:
    """What it returns; None if it fails, as models do that take no merged calls, or that have no memory for them."""
    try:
        return function()
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        return None


def _with_tensors(output: Any, share: tuple[torch.Tensor, ...]) -> Any:
    parts = iter(share)
    return nested.map_tensors(lambda _: next(parts), output)


def _is_independent(first: Call, other: Call) -> bool:
    """Whether two calls give the same beside each other as alone, but for rounding; and the same beside one whose
    sample is turned round: with the same kernels, what is in other rows must not matter at all."""
    if first.error is not None or other.error is not None:
        return False
    together = _tried(lambda: _run_merged([first, other]))
    after = _tried(lambda: _run_merged([first, _unlike(other)]))
    before = _tried(lambda: _run_merged([_unlike(first), other]))
    if together is None or after is None or before is None:
        return False
    dtypes = {tensor.dtype for tensor in nested.tensors(first.output)}
    limit = min(MAX_ROUNDING.get(dtype, MAX_COARSE_ROUNDING) for dtype in dtypes)
    leaks = map(nested.difference, together, (after[0], before[1]))
    roundings = map(nested.difference, together, (first.output, other.output))
    return all(leak <= MAX_LEAK for leak in leaks) and all(rounding <= limit for rounding in roundings)


def _unlike(call: Call) -> Call:
    """The same call with another sample."""
    sample = next(tensor for tensor in nested.tensors(call.rows) if _has_rows(tensor, call.num_rows))
    return replace(call, rows=nested.map_tensors(lambda tensor: -tensor if tensor is sample else tensor, call.rows))


# ------------------------------------------------------------------------------------------------ what a run leaves


class _State:
    """Whether a model keeps something from one call of its denoiser to the next, as the first calls show."""

    def __init__(self, components: Mapping[str, Any]) -> None:
        self.problem = ""
        self._modules = [
            (f"{name}.{path}".rstrip("."), module)
            for name, part in components.items()
            if isinstance(part, torch.nn.Module)
            for path, module in part.named_modules()
        ]
        self._before: dict[int, tuple[Member | None, dict[str, Kept]]] = {}
        """By denoiser: who called it last, and what all modules kept then."""
        self._known: set[int] = set()

    def is_known(self, module: torch.nn.Module) -> bool:
        return id(module) in self._known

    def note(self, module: torch.nn.Module, member: Member) -> None:
        """A denoiser was called. What is compared are two calls of a run with no other one in between; the first may
        set up tables."""
        if self.problem or id(module) in self._known:
            return
        now = {path: _kept_by(part) for path, part in self._modules}
        whose, before = self._before.pop(id(module), (None, now))
        if whose is not member:
            self._before[id(module)] = member, now
            return
        self._known.add(id(module))
        changed = next((path for path in now if not _is_same(now[path], before[path])), None)
        if changed is not None:
            self.problem = f"{changed} keeps something from step to step"


def _kept_by(module: torch.nn.Module) -> Kept:
    """What a module keeps beside its weights: the parts, and how often tensors were written."""
    kept = {name: value for name, value in vars(module).items() if name not in _NOT_STATE and name[:8] != "_samovar"}
    return [
        (f"{name}.{path}", leaf, nested.version(leaf) if isinstance(leaf, torch.Tensor) else None)
        for name, value in kept.items()
        for path, leaf in nested.leaves(value)
    ]


def _is_same(one: Kept, other: Kept) -> bool:
    """Whether a module keeps the same objects, unwritten, and equal numbers and texts."""
    return len(one) == len(other) and all(
        path == then and version == before and (a is b or (isinstance(a, nested.ATOMS) and a == b))
        for (path, a, version), (then, b, before) in zip(one, other, strict=True)
    )


def _random_state() -> list[torch.Tensor]:
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _set_random_state(state: list[torch.Tensor]) -> None:
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state(state[1])
