"""Runs, records and replays the calls of a denoiser.

The first call of a form runs. The second runs too; then the same is run once more to see what it does, recorded, and
replayed: only if that gives the bits of the run are later calls replays. A replay is launched first and its guard is
checked while the device computes; where it no longer holds, the result is dropped and the call runs. Every so many
replays the forward runs as well: other bits turn graphs off.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..arch.modules import unwrapped
from ..core import nested
from ..core.interop import modes
from ..hooks import watched
from ..trace.twin import TrialFailed, draws_random_numbers, trial
from .audit import Audit, Constants
from .config import GraphsConfig
from .guard import Guard, obstacle
from .recorders import Recorder, Recording, failing_as, recorder_for
from .static_inputs import StaticInputs, Unsuitable, form_of, has_same_bits

Function = Callable[[Any], Any]

_MAX_FORMS = 256
"""Forms that are remembered before they are recorded."""
_MANY_NEW = 16
"""Warn after this many consecutive new forms."""
_MAX_VARIANTS = 4
"""Recordings of one form that are kept for different adapters."""
_MIN_REPLAYS = 2
"""Replays that a recording is worth."""
_logger = logging.getLogger(__name__)


class Recorded(NamedTuple):
    """A form that can be replayed."""

    inputs: StaticInputs
    recording: Recording
    guard: Guard
    constants: list[torch.Tensor]
    """Held, since a replay reads them."""

    @property
    def num_bytes(self) -> int:
        return self.recording.num_bytes + sum(tensor.nbytes for tensor in self.inputs.tensors)


@dataclass
class _Form:
    """What is known of calls of one form."""

    variants: list[Recorded] = field(default_factory=list)
    """The one used last first; others are for other adapters."""
    replays: int = 0
    """Since it was recorded last."""
    misses: int = 0
    """Calls that were not replayed, since it was recorded last or could not be."""
    wait: int = 2
    """So many of them until it is recorded: twice as many each time that was in vain."""


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
    """Replays what one model does."""

    def __init__(self, model: torch.nn.Module, config: GraphsConfig, refused: str | None = None) -> None:
        """`refused`: why nothing can be replayed, if that is known already."""
        self._model, self._config, self._refused = unwrapped(model), config, refused
        self._forms: OrderedDict[Hashable, _Form] = OrderedDict()
        self._replayed = self._run = self._num_new = 0
        self._reasons: dict[str, None] = {}

    def stats(self) -> ReplayStats:
        kept = [one for form in list(self._forms.values()) for one in form.variants]
        return ReplayStats(self._replayed, self._run, len(kept), sum(one.num_bytes for one in kept), (*self._reasons,))

    def forget(self) -> None:
        """Free all recordings."""
        self._forms.clear()

    def __call__(self, function: Function, given: Any) -> Any:
        """What the forward returns for what is given."""
        try:
            recorder, key = self._recorder(given)
        except Unsuitable as why:
            self._note(str(why))
            return self._plainly(function, given)
        with recorder.lock:
            form = self._form(key)
            recorder.take_turn()
            for number, one in enumerate(form.variants):
                replayed = self._replay(one, given, is_likely=number == 0)
                if replayed is not None:
                    form.variants.insert(0, form.variants.pop(number))
                    form.replays += 1
                    return self._compared(replayed[0], function, given)
            self._sweep()
            form.misses += 1
            if form.misses >= form.wait:
                return self._record(form, recorder, function, given)
        return self._plainly(function, given)

    def _recorder(self, given: Any) -> tuple[Recorder, Hashable]:
        """What records such calls, and their form. Unsuitable if they are not replayed whatever was recorded."""
        if self._refused is not None:
            raise Unsuitable(self._refused)
        if torch.is_grad_enabled():
            raise Unsuitable("gradients are recorded; call it under torch.no_grad()")
        is_seen, default_device = modes()
        if is_seen:
            raise Unsuitable("a mode of torch, such as a profiler's, wants to see every operation")
        device, form = form_of(given)
        recorder, kind = recorder_for(device), device.type
        if recorder is None:
            raise Unsuitable(f"there are no graphs on {kind}")
        casts = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return recorder, (form, default_device, casts, torch.is_inference_mode_enabled(), torch.get_default_dtype())

    def _form(self, key: Hashable) -> _Form:
        self._num_new = 0 if key in self._forms else self._num_new + 1
        if self._num_new == _MANY_NEW:
            self._note("each call has another form: other shapes, or numbers that change from step to step")
        form = self._forms.setdefault(key, _Form())
        self._forms.move_to_end(key)
        if len(self._forms) > _MAX_FORMS:
            self._forms.pop(next((k for k, one in self._forms.items() if not one.variants), next(iter(self._forms))))
        return form

    def _plainly(self, function: Function, given: Any) -> Any:
        self._run += 1
        return function(given)

    def _note(self, why: str) -> None:
        """Say so once."""
        if why not in self._reasons:
            self._reasons[why] = None
            _logger.warning("%s runs without graphs: %s.", type(self._model).__name__, why)

    # ------------------------------------------------------------------------------------------ replaying

    def _replay(self, one: Recorded, given: Any, is_likely: bool) -> tuple[Any] | None:
        """The output, unless what the recording depends on has changed."""
        if not one.guard.is_in_place() or not (is_likely or one.guard.change() is None):
            return None
        one.inputs.fill(given)
        one.recording.replay()
        output = nested.map_tensors(torch.clone, one.recording.output)
        is_same = not is_likely or one.guard.change() is None  # Seen while the device computes.
        return (output,) if is_same else None

    def _compared(self, output: Any, function: Function, given: Any) -> Any:
        """The output of a replay; every so many times that of the forward, which it is compared with."""
        self._replayed += 1
        if self._replayed % self._config.compare_every:
            return output
        with watched():
            expected = function(given)
        if not has_same_bits(output, expected):
            self._refused = (
                f"replay {self._replayed} gave other bits than the forward: something that it depends on has changed "
                "unseen, so graphs are off for this model"
            )
            self._note(self._refused)
            self.forget()
        return expected

    def _sweep(self) -> None:
        """Drop what cannot be replayed any more: it would keep modules alive, and count."""
        for form in self._forms.values():
            form.variants = [one for one in form.variants if one.guard.is_in_place()]

    # ------------------------------------------------------------------------------------------ recording

    def _record(self, form: _Form, recorder: Recorder, function: Function, given: Any) -> Any:
        """Run a call, and record it."""
        was_in_vain = bool(form.variants) and form.replays < _MIN_REPLAYS
        form.wait, form.misses, form.replays = 2 * form.wait if was_in_vain else 2, 0, 0
        if form.wait > 8:
            self._note("what it depends on changes from call to call")
        inputs = StaticInputs(given)
        output = self._plainly(function, given)
        try:
            self._make_room(form)
            with watched(), _casting_each_time():
                form.variants.insert(0, self._recorded(inputs, recorder, function, output))
            del form.variants[_MAX_VARIANTS:]
        except Unsuitable as why:
            form.wait *= 2
            self._note(str(why))
        return output

    def _make_room(self, form: _Form) -> None:
        """Drop what is kept for other adapters before any form is refused."""
        kept, most = [one.variants for one in self._forms.values()], self._config.max_graphs
        for variants in kept:
            while sum(map(len, kept)) >= most and len(variants) > (variants is not form.variants):
                variants.pop()
        if sum(map(len, kept)) >= most:
            raise Unsuitable(f"there are {most} graphs already (max_graphs={most})")

    def _recorded(self, inputs: StaticInputs, recorder: Recorder, function: Function, expected: Any) -> Recorded:
        problem = obstacle(self._model)
        if problem is not None:
            raise Unsuitable(problem)
        with failing_as(Unsuitable, "what it depends on cannot be compared"):
            guard = Guard(self._model)
        audit, constants = Audit(inputs.tensors, guard.state.plain()), Constants(inputs.tensors[0].device)

        def run() -> Any:
            return function(inputs.given())

        def run_seen() -> None:
            with constants, audit:
                run()

        try:
            # torch gives up for good what it has compiled if it is called inside a mode that sees operations.
            with trial(inputs.tensors), torch.compiler.set_stance("force_eager"):
                is_random = draws_random_numbers(run_seen)
        except TrialFailed as error:
            raise Unsuitable(f"trying it failed ({error})") from error
        if audit.problem is not None or is_random:
            raise Unsuitable(f"its forward {audit.problem or 'draws random numbers'}")
        with constants if constants.made else contextlib.nullcontext():
            recording = recorder.record(run)
        change = guard.change()
        if change is not None:
            raise Unsuitable(f"its forward changes what it depends on: {change}")
        recorder.take_turn()
        recording.replay()
        if not has_same_bits(recording.output, expected):
            raise Unsuitable("a replay gives other bits than its forward")
        return Recorded(inputs, recording, guard, [*audit.constants, *constants.made.values()])


@contextlib.contextmanager
def _casting_each_time() -> Iterator[None]:
    """Inside, autocast casts weights where they are used: what it has cast before would be all that a replay reads."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
