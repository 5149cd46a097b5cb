"""Is this denoising step skipped, and with what? TeaCache, for any model that is built of blocks.

A step is skipped while the changes of the modulated input, summed since the last computed step, stay
below a threshold. The first branch of a run decides for those that are called after it in a step; what
a step is made of when it is skipped, each branch has stored for itself.
"""

from __future__ import annotations

import inspect
import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch

from ..arch.modules import unwrapped
from ..errors import SettingError
from ..hooks import BranchHook, CallContext, HookOrder, HookRegistry, ModelHook, StateManager, current_run
from . import inputs as change
from .coefficients import coefficients_for, rescaling
from .config import TeaCacheConfig
from .decision import Agree, Attempt, Signal, measure
from .extractors import Extractor, extractor_for
from .forecast import Outlook
from .hard import HardPictures
from .inputs import Inputs
from .line import Line
from .runners import BlockRunner, ExtractorRunner, Runner
from .schedule import Verdict, judge
from .state import TeaCacheState
from .stats import BranchStats, CacheStats, StepRecord

HOOK_NAME = "teacache"
BRANCH_HOOK_NAME = "branches"
_MOST_BRANCHES = 8
"""Of so many branches of a run something is stored."""
_MOST_RUNS = 16
"""Of so many runs the statistics are kept."""
_NEW_RUN = "a new run"
_logger = logging.getLogger(__name__)


class _Call(NamedTuple):
    """One call of the denoiser, with all that belongs to it."""

    module: torch.nn.Module
    inputs: Inputs
    context: CallContext
    line: Line
    state: TeaCacheState


class TeaCacheHook(ModelHook):
    """Attached to a denoiser; `apply_teacache_hook` does that."""

    order = HookOrder.CACHE

    def __init__(self, config: TeaCacheConfig | None = None, agree: Agree | None = None) -> None:
        self.config = config or TeaCacheConfig()
        self.rescale_func = rescaling(None)
        self.extractor_fn: Extractor | None = None
        self.state_manager: StateManager[TeaCacheState] = StateManager(TeaCacheState, self.config)
        self._agree = agree
        self._attached: Runner | None = None
        self._names: tuple[str, ...] = ()
        self._model = ""
        self._polynomial = ""
        self._signal = ""
        self.is_paused = False
        """Whether every call is computed as if there were no cache."""
        self.brought_branches = False
        """Whether the hook that tells branches apart came with this one."""
        self._announced: int | None = None
        self._lines: OrderedDict[Hashable, Line] = OrderedDict()
        self._records: OrderedDict[Hashable, dict[str, list[StepRecord]]] = OrderedDict()

    # ------------------------------------------------------------------------------------------ on and off

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model = type(module).__name__
        self._names = tuple(inspect.signature(module.forward).parameters)
        known = coefficients_for(module, self.config.coefficients)
        self.rescale_func = rescaling(known)
        self._polynomial = f"rescaled by the coefficients of {known.origin}" if known else "taken as it is"
        self.extractor_fn = extractor_for(module)
        if self.extractor_fn is not None:
            self._attached = ExtractorRunner(module, self.extractor_fn)
        else:
            self._attached = BlockRunner(module, HOOK_NAME)
        if known is None and self.config.schedule is None:
            _logger.info("No coefficients are known for %s: changes of its signal are taken as they are.", self._model)
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.reset_state(module)
        if self._attached is not None:
            self._signal = self._attached.signal()
            self._attached.remove()
            self._attached = None
        return module

    @property
    def _runner(self) -> Runner:
        assert self._attached is not None, "the hook is not attached"
        return self._attached

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget everything that is stored; the next call begins a run."""
        self.state_manager.reset()
        self._lines.clear()
        if self._attached is not None:
            self._attached.forget()
        return module

    def refresh(self, module: torch.nn.Module, num_inference_steps: int | None = None) -> None:
        """Begin a run of so many steps, in a loop of one's own; a pipeline that is hooked does that itself."""
        is_count = isinstance(num_inference_steps, int) and not isinstance(num_inference_steps, bool)
        if num_inference_steps is not None and not (is_count and num_inference_steps >= 1):
            raise SettingError(f"A run of {num_inference_steps!r} steps; a whole number from 1 upwards was expected.")
        scheduled = self.config.scheduled_steps
        if scheduled is not None and num_inference_steps not in (None, scheduled):
            raise SettingError(
                f"The schedule is for {scheduled} steps, not for {num_inference_steps}. Give one of the right length."
            )
        self._announced = num_inference_steps
        self.reset_state(module)

    def end_run(self, module: torch.nn.Module, request: Hashable) -> None:
        """Forget one run, which has ended or was given up. Its statistics stay."""
        self.state_manager.drop(request)
        self._lines.pop(request, None)
        branches = HookRegistry.get_or_create(module).get_hook(BRANCH_HOOK_NAME)
        if isinstance(branches, BranchHook):
            branches.drop(request)
        if not self._lines and self._attached is not None:
            self._attached.forget()

    # ------------------------------------------------------------------------------------------ a call

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = self.state_manager.context
        if self.is_paused or context.branch is None:  # Whose call this is cannot be told, so nothing may be reused.
            return self.call_original(module, *args, **kwargs)
        inputs = Inputs(args, kwargs, self._names)
        line = self._begin_call(context, inputs)
        call = _Call(module, inputs, context, line, self.state_manager.get_state())
        call.state.begin_call(line, inputs)
        decided = None if self.config.is_by_branch else line.verdict
        verdict = decided or judge(line.plan or self.config, line.step, call.state.skipped_in_a_row, context.branch)
        if verdict.reason in ("settings", "min_steps"):  # Nothing of this run will ever be skipped.
            self._note(context, StepRecord(line.index, True, verdict.reason))
            return self.call_original(module, *args, **kwargs)
        return self._take_step(call, verdict)

    def _begin_call(self, context: CallContext, inputs: Inputs) -> Line:
        """The line of calls that this one goes on with, or a new one."""
        run = current_run()
        line = self._lines.get(context.request) or self._new_line(context.request)
        time = inputs.host_time() if run is None else None
        goes_back = time is not None and line.goes_back(time)
        if goes_back or not line.begin_call(context.branch, run, inputs.time()):
            self._restart(context.request)
            line = self._new_line(context.request)
            line.begin_call(context.branch, run, inputs.time())
        self._lines.move_to_end(context.request)
        if len(line.recent) > _MOST_BRANCHES:  # Of a pipeline whose conditioning is new at each step.
            branch, _ = line.recent.popitem(last=False)
            self.state_manager.drop_branch(CallContext(context.request, str(branch)))
        if len(self._lines) > self.state_manager.most_states:
            self._lines.popitem(last=False)
        return line

    def _new_line(self, request: Hashable) -> Line:
        self._records[request] = {}
        self._records.move_to_end(request)
        while len(self._records) > _MOST_RUNS:
            self._records.popitem(last=False)
        line = self._lines[request] = Line(self._announced)
        return line

    def _restart(self, request: Hashable) -> None:
        for context, state in self.state_manager.states().items():
            if context.request == request:
                state.reset()
        self._lines.pop(request, None)

    def _take_step(self, call: _Call, verdict: Verdict) -> Any:
        inputs, line, state = call.inputs, call.line, call.state
        of_output, judges = self.config.forecast_of == "output", self.config.schedule is None
        key = inputs.signature if of_output and not judges else self._runner.key(inputs)
        others = change.changes(inputs, state.watched)
        obstacle = None if verdict.action == "compute" else self._obstacle(call, key, verdict, others)
        outlook = None
        if verdict.action != "compute" and obstacle is None:
            outlook = self._outlook(call)
            obstacle = "a step that its forecast rests on is not stored" if outlook is None else None
        if obstacle is not None and verdict.action == "ask" and self._agree is not None:
            measure(None, (), None, self._agree, inputs.device())  # The other ranks ask, and wait for this one.
        action, reason = Verdict("compute", obstacle) if obstacle else verdict
        record = StepRecord(line.index, action != "skip", reason)

        def decide(signal: Signal) -> bool:
            nonlocal record
            record = self._decide(record, signal, call, others)
            return not record.computed

        # On another rank a branch that follows here may lead: it needs its signal of the step before.
        may_lead = line.verdict is None or (self._agree is not None and action == "compute")
        attempt = Attempt(action, outlook, judges and may_lead, of_output, decide, state.memo)
        self._carry_out(call, attempt, key)
        if attempt.computed and not record.computed:
            record = record._replace(computed=True, reason="the blocks are called otherwise than before")
        if call.context.branch == line.leader:
            line.verdict = Verdict("compute" if record.computed else "skip", record.reason)
        if record.reason == _NEW_RUN:
            self._restart(call.context.request)
            line = self._begin_call(call.context, inputs)
            record = record._replace(step=line.index)
        if attempt.computed:
            record = self._look_for_hard(call, attempt.output, record)
        self._note(call.context, record)
        if attempt.computed:  # Fitted weights are for the scheduled steps: one more would push out one of them.
            counts = verdict.action == "compute" or self.config.forecast != "fitted"
            return state.computed(line, inputs, attempt, counts=counts)
        return state.skipped(line, inputs, attempt, record.accumulated or 0.0, bool(others))

    def _outlook(self, call: _Call) -> Outlook | None:
        """What the step would give if it were skipped; None if that cannot be said."""
        if self.config.forecast != "fitted":
            return call.state.history.forecast(call.line.place)
        weights = (call.line.plan or self.config).weights_for(call.context.branch, call.line.index)
        return None if weights is None else call.state.history.weighted(weights)

    def _look_for_hard(self, call: _Call, output: Any, record: StepRecord) -> StepRecord:
        """At the step where that is told: whether the run goes on by the schedule of hard pictures."""
        hard = self.config.hard
        if not isinstance(hard, HardPictures) or (hard.branch, hard.step) != (call.context.branch, call.line.index):
            return record
        is_hard = hard.told(call.state.history.weighted(hard.weights), output)
        if any(is_hard):
            call.line.plan = self.config.plan_of_hard
        return record._replace(hard=is_hard)

    def _carry_out(self, call: _Call, attempt: Attempt, key: Hashable) -> None:
        def forward(given: Inputs) -> Any:
            return self.call_original(call.module, *given.args, **given.kwargs)

        if attempt.of_output and (attempt.mode == "skip" or not attempt.judges):  # The blocks have no say in it.
            attempt.computed, attempt.key = attempt.mode != "skip", key
            attempt.output = forward(call.inputs) if attempt.computed else None
        else:
            self._runner.run(call.inputs, attempt, forward)

    def _obstacle(self, call: _Call, key: Any, verdict: Verdict, others: list[change.Pair]) -> str | None:
        """Why a step that might be skipped is not."""
        state, inputs = call.state, call.inputs
        obstacle = state.obstacle(key, inputs, asks=verdict.action == "ask")
        if obstacle is None and self.config.forecast_of == "residual":
            obstacle = self._runner.problem(key)
        if obstacle is None and others and verdict.action == "skip":  # Nothing else would look at them.
            # What leads has decided: this is about the branch's own inputs, on however many ranks they are.
            agree: Agree | None = getattr(self._agree, "within_branch", self._agree)
            measured = measure(others[0], others[1:], None, agree)
            if max(measured.signal, measured.others) >= self.config.rel_l1_thresh:
                return "other inputs changed"
        return obstacle

    def _decide(self, record: StepRecord, signal: Signal, call: _Call, others: list[change.Pair]) -> StepRecord:
        """The record of a step that was left to its signal."""
        assert call.state.signal is not None
        pair = call.state.signal.change(signal)
        time = None if call.line.is_told else call.inputs.time()
        measured = measure(pair, others, time, self._agree, signal.value.device)
        if pair is None:
            return record._replace(computed=True, reason="signal of another form")
        increase = max(self.rescale_func(measured.signal), measured.others)
        accumulated = call.state.accumulated_rel_l1_distance + increase
        record = record._replace(distance=measured.signal, accumulated=accumulated)
        if measured.time is not None and call.line.goes_back(measured.time):
            return record._replace(computed=True, reason=_NEW_RUN)
        if accumulated < self.config.rel_l1_thresh:
            return record._replace(computed=False, reason="below the threshold")
        return record._replace(computed=True, reason="the threshold is reached")

    # ------------------------------------------------------------------------------------------ what was done

    def _note(self, context: CallContext, record: StepRecord) -> None:
        run = self._records.setdefault(context.request, {})
        run.setdefault(context.branch or "", []).append(record)

    def stats(self, request: Hashable = None) -> CacheStats:
        """What was done in a run; the most recent one if no request is named."""
        if request is None and self._records:
            request = next(reversed(self._records))
        branches: Mapping[str, list[StepRecord]] = self._records.get(request, {})
        attached = self._attached
        signal = f"{attached.signal() if attached else self._signal}, {self._polynomial}"
        return CacheStats(
            self._model,
            self.config.summary(),
            "a saved schedule" if self.config.schedule else signal,
            {name: BranchStats(tuple(steps)) for name, steps in branches.items()},
            attached.trouble() if attached else None,
        )


def apply_teacache_hook(
    module: torch.nn.Module, config: TeaCacheConfig | Mapping[str, Any] | None = None, agree: Agree | None = None
) -> TeaCacheHook:
    """Let a denoiser skip steps. `agree` makes ranks that compute one picture together decide alike."""
    if not isinstance(module, torch.nn.Module):
        raise SettingError(f"TeaCache attaches to a denoiser, a torch.nn.Module; not to {module!r}.")
    module = unwrapped(module)
    registry = HookRegistry.get_or_create(module)
    if HOOK_NAME in registry:
        raise SettingError(f"This {type(module).__name__} has TeaCache already. Remove it first: remove_teacache_hook.")
    hook = TeaCacheHook(TeaCacheConfig.read(config), agree)
    registry.register_hook(HOOK_NAME, hook)
    if BRANCH_HOOK_NAME not in registry:
        registry.register_hook(BRANCH_HOOK_NAME, BranchHook())
        hook.brought_branches = True
    return hook


def remove_teacache_hook(module: torch.nn.Module) -> None:
    """Take TeaCache off a denoiser, which is then what it was; no error if it has none."""
    registry = HookRegistry.get_or_create(unwrapped(module))
    hook = registry.get_hook(HOOK_NAME)
    if isinstance(hook, TeaCacheHook):
        registry.remove_hook(HOOK_NAME)
        if hook.brought_branches:
            registry.remove_hook(BRANCH_HOOK_NAME)
