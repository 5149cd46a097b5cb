"""Runs, records and replays the calls of a denoiser.

The first call of a form runs. The second runs too; then the same is run once more to see what it does, recorded, and
replayed: only if that gives the bits of the run are later calls replays. A replay is launched first and its guard is
checked while the device computes; where it no longer holds, the result is dropped and the call runs. Every N-th
replay the forward runs as well: other bits turn graphs off.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from ..arch.modules import unwrapped
from ..core import nested
from ..core.interop import modes
from ..hooks import Handle, HookRegistry, ModelHook, install_hook, watched
from ..trace.twin import TrialFailed, draws_random_numbers, trial
from .audit import Audit, Constants
from .config import GraphsConfig
from .guard import Guard, obstacle
from .recorders import Recorder, Recording, failing_as, recorder_for
from .static_inputs import StaticInputs, Unsuitable, form_of, has_same_bits

Function = Callable[[Any], Any]

HOOK_NAME = "graphs"
_MAX_FORMS = 256
"""Forms that are remembered; the one that was used longest ago goes first."""
_MANY_NEW = 16
"""Warn after this many consecutive new forms."""
_MAX_VARIANTS = 4
"""Recordings of one form that are kept for different adapters."""
_MAX_WAIT = 8
"""Warn if a form is recorded so seldom, since recordings of it are of no use."""
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
    misses: int = 0
    """Calls that were not replayed, since it was recorded last or could not be."""
    wait: int = 2
    """Misses before it is recorded; doubled each time, until there is a replay."""


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

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        size = f"{self.num_bytes / 2**20:.1f} MiB"
        lines = [f"{self.replayed} calls replayed, {self.run} run; {self.recorded} graphs, {size}"]
        return "\n".join((*lines, *(f"  not replayed: {why}" for why in self.reasons)))


class GraphsHook(ModelHook, Handle):
    """Graphs on a denoiser, and the handle that takes them off: replays what one model does."""

    def __init__(self, config: GraphsConfig, refused: str | None = None) -> None:
        """`refused`: why nothing can be replayed, if that is known already."""
        Handle.__init__(self)
        self.config, self._refused = config, refused
        self._model = torch.nn.Module()
        self._forms: OrderedDict[Hashable, _Form] = OrderedDict()
        self._replayed = self._run = self._num_new = 0
        self._reasons: dict[str, None] = {}
        self._final: ReplayStats | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model = module
        HookRegistry.get_or_create(module).recorder = self
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        HookRegistry.get_or_create(module).recorder = None
        self._final = self.stats()
        return self.reset_state(module)

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Free all recordings."""
        self._forms.clear()
        return module

    def stats(self) -> ReplayStats:
        """What was replayed."""
        kept = [one for form in list(self._forms.values()) for one in form.variants]
        num_bytes = sum(one.num_bytes for one in kept)
        return self._final or ReplayStats(self._replayed, self._run, len(kept), num_bytes, (*self._reasons,))

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
                    form.wait = 2
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
            self._forms.popitem(last=False)
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
        if not one.guard.state.is_in_place() or not (is_likely or one.guard.change() is None):
            return None
        one.inputs.fill(given)
        one.recording.replay()
        output = nested.map_tensors(torch.clone, one.recording.output)
        is_same = not is_likely or one.guard.change() is None  # Seen while the device computes.
        return (output,) if is_same else None

    def _compared(self, output: Any, function: Function, given: Any) -> Any:
        """The output of a replay; every N-th time that of the forward, which it is compared with."""
        self._replayed += 1
        if self._replayed % self.config.compare_every:
            return output
        with watched():
            expected = function(given)
        if not has_same_bits(output, expected):
            self._refused = (
                f"replay {self._replayed} gave other bits than the forward: something that it depends on has changed "
                "unseen, so graphs are off for this model"
            )
            self._note(self._refused)
            self._forms.clear()
        return expected

    def _sweep(self) -> None:
        """Drop what cannot be replayed any more: it would keep modules alive, and count."""
        for form in self._forms.values():
            form.variants = [one for one in form.variants if one.guard.state.is_in_place()]

    # ------------------------------------------------------------------------------------------ recording

    def _record(self, form: _Form, recorder: Recorder, function: Function, given: Any) -> Any:
        """Run a call, and record it."""
        form.misses, form.wait = 0, 2 * form.wait
        inputs = StaticInputs(given)
        output = self._plainly(function, given)
        try:
            self._make_room(form)
            with watched():
                form.variants.insert(0, self._recorded(inputs, recorder, function, output))
            if form.wait > _MAX_WAIT:
                self._note("what it depends on changes from call to call")
            del form.variants[_MAX_VARIANTS:]
        except Unsuitable as why:
            self._note(str(why))
        torch.clear_autocast_cache()
        return output

    def _make_room(self, form: _Form) -> None:
        """Drop what is kept for other adapters before any form is refused."""
        kept, most = [one.variants for one in self._forms.values()], self.config.max_graphs
        for variants in kept:
            if sum(map(len, kept)) >= most:
                del variants[variants is not form.variants :]
        if sum(map(len, kept)) >= most:
            raise Unsuitable(f"there are {most} graphs already (max_graphs={most})")

    def _recorded(self, inputs: StaticInputs, recorder: Recorder, function: Function, expected: Any) -> Recorded:
        if (problem := obstacle(self._model)) is not None:
            raise Unsuitable(problem)
        with failing_as(Unsuitable, "what it depends on cannot be compared"):
            guard = Guard(self._model)
        audit, constants = Audit(inputs.tensors, guard.state.plain()), Constants(inputs.tensors[0].device)

        def run() -> Any:
            torch.clear_autocast_cache()  # What autocast has cast before would be all that a replay reads of a weight.
            return function(inputs.given())

        def run_seen() -> None:
            with constants, audit:
                run()

        # torch gives up for good what it has compiled if it is called inside a mode that sees operations.
        eager = torch.compiler.set_stance("force_eager")
        try:
            with trial(inputs.tensors), eager:
                is_random = draws_random_numbers(run_seen)
        except TrialFailed as error:
            raise Unsuitable(f"trying it failed ({error})") from error
        if audit.problem is not None or is_random:
            raise Unsuitable(f"its forward {audit.problem or 'draws random numbers'}")
        with constants if constants.made else contextlib.nullcontext():
            recording = recorder.record(run)
        if (change := guard.change()) is not None:
            raise Unsuitable(f"its forward changes what it depends on: {change}")
        recorder.take_turn()
        recording.replay()
        if not has_same_bits(recording.output, expected):
            raise Unsuitable("a replay gives other bits than its forward")
        return Recorded(inputs, recording, guard, [*audit.constants, *constants.made.values()])


def apply_graphs(module: torch.nn.Module, config: GraphsConfig | None = None, refused: str | None = None) -> GraphsHook:
    """Replay the computed forwards of a denoiser as CUDA graphs. Skipped steps of a cache stay outside. `refused`: why
    none can be, if that is known already."""
    module = unwrapped(module)
    HookRegistry.get_or_create(module).refuse_second(HOOK_NAME, "graphs", param="compile")
    hook = GraphsHook(config or GraphsConfig(), refused)
    install_hook(hook._undo, module, HOOK_NAME, hook)
    return hook
