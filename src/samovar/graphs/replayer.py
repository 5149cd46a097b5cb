"""Is this call run, recorded or replayed?

The first call of a form runs. The second runs too; then the same is run once more to see what it does, recorded, and
replayed: only if that gives the bits of the run are later calls replays. A replay is launched first and its reasons are
checked while the device computes; where they no longer hold, its result is dropped and the call runs.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch

from ..arch.modules import unwrapped
from ..core.interop import is_compiled, modes
from ..hooks import watched
from ..trace.shadow import TrialFailed, trial
from .audit import Audit
from .config import GraphsConfig
from .constants import Constants
from .forms import Form, Given, Places, Unsuitable, copier, has_same_bits
from .recorders import Recorder, Recording, failing_as, recorder_for
from .snapshot import Snapshot, obstacle
from .spared import Spared

Function = Callable[[Any], Any]

_MOST_SEEN = 256
"""Forms that are remembered before they are recorded."""
_MANY_NEW = 16
"""So many calls in a row that all have a form of their own are said to."""
_MOST_VARIANTS = 4
"""Recordings of one form that are kept for different adapters."""
_MOST_SHORT_LIVES = 3
"""How often in a row a form may be recorded in vain."""
_LONG_LIFE = 2
"""Number of replays after which it was not in vain."""
_logger = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """A form that can be replayed."""

    places: Places
    recording: Recording
    copy: Callable[[], Any]
    """Makes a copy of its output."""
    snapshot: Snapshot
    constants: list[torch.Tensor]
    """Held, since a replay reads them."""

    @property
    def num_bytes(self) -> int:
        return self.places.num_bytes + self.recording.num_bytes


@dataclass
class _Form:
    """A form of calls, and what is known about it."""

    given: Form
    surroundings: tuple[Hashable, ...]
    misses: int = 0
    """Calls since it was recorded last that were not replayed. Those of other adapters may come between."""
    variants: list[Recorded] = field(default_factory=list)
    """The one used last first; others are for other adapters."""
    replays: int = 0
    """Since it was recorded last."""
    short_lives: int = 0
    """How often in a row it was recorded in vain."""
    is_refused: bool = False
    is_final: bool = False
    """Whether it is not tried again."""


@dataclass(frozen=True)
class ReplayStats:
    """What was replayed."""

    replayed: int
    run: int
    """Calls that were not replayed."""
    recorded: int
    """Forms that can be replayed."""
    num_bytes: int
    """Memory that they take: inputs, and what is computed on the way."""
    reasons: tuple[str, ...]
    """Why calls were not replayed that might have been."""

    def __str__(self) -> str:
        size = f"{self.num_bytes / 2**20:.1f} MiB"
        lines = [f"{self.replayed} calls replayed, {self.run} run; {self.recorded} graphs, {size}"]
        return "\n".join((*lines, *(f"  not replayed: {why}" for why in self.reasons)))


class Replayer:
    """Replays the forwards of one model, and parts of them that a cache asks for."""

    def __init__(self, model: torch.nn.Module, config: GraphsConfig, refused: str | None = None) -> None:
        """`refused`: why nothing can be replayed, if that is known already."""
        self._model, self._refused_for = unwrapped(model), refused
        self._config = config
        self._forms: OrderedDict[tuple[Hashable, ...], _Form] = OrderedDict()
        self._latest: dict[Hashable, _Form] = {}
        """By function: the form that it was called with last."""
        self._lock = threading.RLock()
        self._replayed = self._run = 0
        self._reasons: dict[str, None] = {}
        self._ahead = _Ahead()
        self._num_new: dict[Hashable, int] = {}
        """By function: calls in a row whose form was not seen before."""
        self._refused: OrderedDict[Hashable, int] = OrderedDict()
        """By function: how often it was not replayed for a reason that may stay."""

    def stats(self) -> ReplayStats:
        kept = [one for form in list(self._forms.values()) for one in form.variants]
        return ReplayStats(self._replayed, self._run, len(kept), sum(one.num_bytes for one in kept), (*self._reasons,))

    def forget(self) -> None:
        """Free all recordings."""
        self._forms.clear()
        self._latest.clear()
        self._num_new.clear()

    def refuses(self, what: Hashable) -> bool:
        if what not in self._refused:
            return False
        self._refused[what] += 1
        return not _is_power_of_two(self._refused[what])  # Reasons may go.

    @contextlib.contextmanager
    def ahead(self, what: Hashable, given: Any) -> Iterator[None]:
        """Inside, such a call needs only be launched. Nothing that was given may change meanwhile."""
        one: Recorded | None = None
        with contextlib.suppress(Unsuitable):
            call = self._read(what, given)
            with call.recorder.lock:
                one = call.form.variants[0] if call.form.variants else None
                if one is not None and one.snapshot.is_in_place():
                    call.recorder.take_turn()
                    one.places.fill(call.given.tensors)
                    self._ahead.call = call
        try:
            yield
        finally:
            self._ahead.call = None
            if one is not None:
                one.places.held = None

    def __call__(self, what: Hashable, function: Function, given: Any, idle: Collection[torch.nn.Module] = ()) -> Any:
        call = self._ahead.call
        if call is None or call.what != what or not _is_same(call.given.value, given):
            try:
                call = self._read(what, given)
            except Unsuitable as why:
                self._refuse(what, str(why))
                return self._plainly(function, given)
        form = call.form
        if form.variants and (replayed := self._replay(form, call)) is not None:
            return replayed[0]
        form.misses += 1
        is_due = form.misses > 1 and not form.is_final and (not form.is_refused or _is_power_of_two(form.misses))
        if not is_due or not self._lock.acquire(blocking=False):
            return self._plainly(function, given)
        try:
            return self._record(call, function, idle)
        finally:
            self._lock.release()

    def _read(self, what: Hashable, value: Any) -> _Call:
        """Unsuitable if this call cannot be replayed, whatever was recorded."""
        given = Given(value)
        is_seen, default_device = modes()
        recorder = self._recorder(given.tensors, is_seen)
        surroundings = default_device, *_surroundings(given.tensors[0].device)
        form = self._latest.get(what)
        if form is None or form.surroundings != surroundings or not given.is_of(form.given):
            form = self._form(what, given.form(), surroundings)
        else:
            self._num_new[what] = 0
        return _Call(what, given, recorder, form)

    def _recorder(self, tensors: list[torch.Tensor], is_seen: bool) -> Recorder:
        """Unsuitable if this call cannot be replayed, whatever was recorded."""
        if self._refused_for is not None:
            raise Unsuitable(self._refused_for)
        if not tensors:
            raise Unsuitable("it takes no tensors")
        if torch.is_grad_enabled():
            raise Unsuitable("gradients are recorded; call it under torch.no_grad()")
        if is_seen:
            raise Unsuitable("a mode of torch, such as a profiler's, wants to see every operation")
        device = tensors[0].device
        recorder = recorder_for(device)
        if recorder is None:
            raise Unsuitable(f"there are no graphs on {device.type}")
        return recorder

    def _form(self, what: Hashable, given: Form, surroundings: tuple[Hashable, ...]) -> _Form:
        key = what, given.key, surroundings
        with self._lock:
            self._num_new[what] = 0 if key in self._forms else self._num_new.get(what, 0) + 1
            if self._num_new[what] == _MANY_NEW:
                self._note("each call has another form: other shapes, or numbers that change from step to step")
            form = self._latest[what] = self._forms.setdefault(key, _Form(given, surroundings))
            self._forms.move_to_end(key)
            if len(self._forms) > _MOST_SEEN:
                oldest = next((k for k, one in self._forms.items() if not one.variants), next(iter(self._forms)))
                if self._forms.pop(oldest) is self._latest.get(oldest[0]):
                    del self._latest[oldest[0]], self._num_new[oldest[0]]
            return form

    def _plainly(self, function: Function, given: Any) -> Any:
        self._run += 1
        return function(given)

    def _refuse(self, what: Hashable, why: str) -> None:
        self._refused.setdefault(what, 0)
        if len(self._refused) > _MOST_SEEN:
            self._refused.popitem(last=False)
        self._note(why)

    def _note(self, why: str) -> None:
        """Say so once."""
        if why not in self._reasons:
            self._reasons[why] = None
            _logger.warning("%s runs without graphs: %s.", type(self._model).__name__, why)

    # ------------------------------------------------------------------------------------------ replaying

    def _replay(self, form: _Form, call: _Call) -> tuple[Any] | None:
        recorder, tensors = call.recorder, call.given.tensors
        with recorder.lock:
            recorder.take_turn()
            for number, one in enumerate(form.variants):
                if one.places.held is not tensors:  # Else all of this was done ahead.
                    if not one.snapshot.is_in_place() or (number and not one.snapshot.is_current()):
                        continue
                    one.places.fill(tensors)
                one.recording.replay()
                one.places.held = None
                output = one.copy()
                if number or one.snapshot.is_current():  # Seen while the device computes.
                    form.variants.insert(0, form.variants.pop(number))
                    form.replays += 1
                    self._replayed += 1
                    return (output,)
            self._sweep()
        return None

    def _sweep(self) -> None:
        """After a change, drop what cannot be replayed any more: it would keep modules alive, and count."""
        modules = set(self._model.modules())
        for form in list(self._forms.values()):
            form.variants = [one for one in form.variants if one.snapshot.is_of(modules) and one.snapshot.is_in_place()]

    # ------------------------------------------------------------------------------------------ recording

    def _record(self, call: _Call, function: Function, idle: Collection[torch.nn.Module]) -> Any:
        """Run a call, and record it."""
        what, form, given = call.what, call.form, call.given
        try:
            with call.recorder.lock:
                self._check(form)
            places = Places(given)
        except Unsuitable as why:
            form.is_refused = True
            self._refuse(what, str(why))
            return self._plainly(function, given.value)
        output = self._plainly(function, given.value)
        try:
            with watched(), call.recorder.lock, _casting_each_time():
                with failing_as(Unsuitable, "what it depends on cannot be compared"):
                    snapshot = Snapshot(self._model, idle)
                recorded = self._recorded(places, call.recorder, function, output, snapshot)
                form.variants = [recorded, *form.variants][:_MOST_VARIANTS]
        except Unsuitable as why:
            form.is_refused, form.is_final = True, isinstance(why, _Never)
            self._refuse(what, str(why))
        else:
            form.misses, form.replays, form.is_refused = 0, 0, False
            self._refused.pop(what, None)
        return output

    def _check(self, form: _Form) -> None:
        form.short_lives = form.short_lives + 1 if form.variants and form.replays < _LONG_LIFE else 0
        if form.short_lives >= _MOST_SHORT_LIVES:
            form.variants, form.is_final = [], True
            raise Unsuitable("what it depends on changes from call to call")
        kept, most = [one.variants for one in self._forms.values()], self._config.max_graphs
        for variants in kept:  # What is kept for other adapters goes before any form is refused.
            while sum(map(len, kept)) >= most and len(variants) > (variants is not form.variants):
                variants.pop()
        if sum(map(len, kept)) >= most:
            raise Unsuitable(f"there are {most} graphs already (max_graphs={most})")
        problem = obstacle(self._model)
        if problem is not None:
            raise Unsuitable(problem)

    def _recorded(
        self, places: Places, recorder: Recorder, function: Function, expected: Any, snapshot: Snapshot
    ) -> Recorded:
        def run() -> Any:
            return function(places.given())

        audit, constants = Audit(places.tensors, snapshot.weights()), Constants(places.tensors[0].device)
        try:
            # torch gives up for good what it has compiled if it is called inside a mode that sees operations.
            with trial(places.tensors), torch.compiler.set_stance("force_eager"), constants, audit:
                run()
        except TrialFailed as error:
            raise Unsuitable(f"trying it failed ({error})") from error
        if audit.problem is not None:
            raise _Never(audit.problem)
        held = [*audit.constants, *constants.tensors()]
        with constants if len(constants) else contextlib.nullcontext():
            if snapshot.is_of_parts and not any(map(is_compiled, snapshot.modules)):
                with contextlib.suppress(Unsuitable):  # Then all of it is recorded.
                    with failing_as(Unsuitable, "what it reads cannot be seen"), trial(places.tensors):
                        (spared := Spared(run)).run()  # Better here than while a device records.
                    recording = _recording(recorder, spared.run, expected, snapshot)
                    places.leave_out(spared.live)
                    return Recorded(places, recording, copier(recording.output), snapshot, [*held, *spared.constants])
            recording = _recording(recorder, run, expected, snapshot)
        return Recorded(places, recording, copier(recording.output), snapshot, held)


def _recording(recorder: Recorder, run: Callable[[], Any], expected: Any, snapshot: Snapshot) -> Recording:
    recording = recorder.record(run)
    if not (snapshot.is_in_place() and snapshot.is_current()):
        raise Unsuitable(f"its forward changes what it depends on: {snapshot.changed()}")
    recorder.take_turn()
    recording.replay()
    if not has_same_bits(recording.output, expected):
        raise _Never("a replay gives other bits than its forward")
    return recording


class _Call(NamedTuple):
    """A call that may be replayed."""

    what: Hashable
    given: Given
    recorder: Recorder
    form: _Form


class _Ahead(threading.local):
    """The call that was prepared on this thread."""

    call: _Call | None = None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two calls are given the very same: positional arguments, those by keyword, and nothing else."""
    (args, kwargs, *rest), (others, named, *more) = one, other
    return one is other or (
        not (any(rest) or any(more))
        and len(args) == len(others)
        and kwargs.keys() == named.keys()
        and all(map(is_, chain(args, kwargs.values()), chain(others, named.values())))
    )


class _Never(Unsuitable):
    """The same for a reason that stays."""


@contextlib.contextmanager
def _casting_each_time() -> Iterator[None]:
    """Inside, autocast casts weights where they are used: what it has cast before would be all that a replay reads."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _surroundings(device: torch.device) -> tuple[Hashable, ...]:
    """Modes of torch that decide what is computed."""
    kind = device.type
    casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return casts, torch.is_inference_mode_enabled(), torch.get_default_dtype()
