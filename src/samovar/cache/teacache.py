"""Is this denoising step skipped, and with what? TeaCache, for any model that is built of blocks.

A step is skipped while the changes of the modulated input, summed since the last computed step, stay below a threshold.
The first branch of a run decides for those that are called after it in a step; each branch stores for itself what its
skipped steps are made of. The hook finds the run and the step that a call belongs to (`clock`), and has it taken
(`step`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..errors import ModelError, SettingError
from ..hooks import (
    BranchHook,
    CallContext,
    HookOrder,
    HookRegistry,
    ModelHook,
    Run,
    StateManager,
    run_around,
)
from ..hooks.roles import parameter_names
from .clock import Clock
from .coefficients import coefficients_for, rescaling
from .config import TeaCacheConfig
from .decision import Agree
from .extractors import Extractor, ExtractorModel, extractor_for
from .inputs import Inputs
from .model import About, BlockModel, CacheableModel
from .state import TeaCacheState
from .stats import BranchStats, CacheStats, StepRecord
from .step import NEVER, NEW_RUN, Call, Steps

HOOK_NAME = "teacache"
BRANCH_HOOK_NAME = "branches"
UNKNOWN = "unknown"
"""The branch of calls that nothing tells apart."""
_UNKNOWN_STEP = StepRecord(-1, True, "its branch is not known")
_MOST_BRANCHES = 8
"""Branches of a run for which something is stored."""
_MOST_OPEN_RUNS = 16
"""Runs that nobody has ended for which something is stored."""
_MOST_RUNS = 16
"""Runs whose statistics are retained."""
_logger = logging.getLogger(__name__)


class TeaCacheHook(ModelHook):
    """Attached to a denoiser; `apply_teacache_hook` does that."""

    order = HookOrder.CACHE

    def __init__(self, config: TeaCacheConfig | None = None, agree: Agree | None = None) -> None:
        self.config = config or TeaCacheConfig()
        self.rescale_func = rescaling(None)
        self.extractor_fn: Extractor | None = None
        self.state_manager: StateManager[TeaCacheState] = StateManager(TeaCacheState, self.config)
        self.is_paused = False
        """Whether every call is computed as if there were no cache."""
        self.branches = BranchHook()
        """What tells branches apart, and what each argument is."""
        self.brought_branches = False
        """Whether it came with this hook."""
        self._agree = agree
        self._model: CacheableModel | None = None
        self._steps: Steps | None = None
        self._model_name = ""
        self._names: tuple[str, ...] = ()
        self._polynomial = ""
        self._announced: int | None = None
        self._clocks: OrderedDict[Hashable, Clock] = OrderedDict()
        self._records: OrderedDict[Hashable, dict[str, list[StepRecord]]] = OrderedDict()
        self._about = About("")
        """What is known of the model when the hook is off again."""

    # ------------------------------------------------------------------------------------------ on and off

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model_name = type(module).__name__
        self._names = parameter_names(module)
        known = coefficients_for(module, self.config.coefficients)
        self.rescale_func = rescaling(known)
        self._polynomial = f"rescaled by the coefficients of {known.origin}" if known else "taken as it is"
        self.extractor_fn = extractor_for(module)
        if self.extractor_fn is not None:
            self._model = ExtractorModel(module, self.extractor_fn)
        else:
            self._model = BlockModel(module, HOOK_NAME)
        self._steps = Steps(self.config, self._model, self.rescale_func, self._agree, self)
        if known is None and self.config.schedule is None:
            _logger.info("No coefficients are known for %s: its signal is taken as it is.", self._model_name)
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.reset_state(module)
        if self._model is not None:
            self._about = self._model.about()
            self._model.remove()
            self._model = self._steps = None
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget everything that is stored; the next call begins a run."""
        self.state_manager.reset()
        self._clocks.clear()
        if self._model is not None:
            self._model.forget()
        return module

    def refresh(self, module: torch.nn.Module, num_inference_steps: int | None = None) -> None:
        """Begin a run of this many steps, in a loop of one's own; a pipeline that is hooked does that itself."""
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
        self._clocks.pop(request, None)
        self.branches.drop(request)
        if not self._clocks and self._model is not None:
            self._model.forget()

    # ------------------------------------------------------------------------------------------ a step

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = self.state_manager.context
        if self.is_paused:
            return self.call_original(module, *args, **kwargs)
        if context.branch is None:  # Nothing may be reused.
            self._records.setdefault(context.request, {}).setdefault(UNKNOWN, []).append(_UNKNOWN_STEP)
            return self.call_original(module, *args, **kwargs)
        _refuse_training(module)
        assert self._steps is not None
        call = self._begin(module, args, kwargs, context)
        if call.inputs.device.type == "meta":  # There are shapes and no values, so nothing can be judged.
            return self.call_original(module, *args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.inputs.tensors):
            call.state.restart()  # A skipped step has no gradients of its blocks.
            self._note(call, StepRecord(call.clock.index, True, "gradients are recorded"))
            return self.call_original(module, *args, **kwargs)
        plan = self._steps.judge(call)
        if plan.verdict.reason in NEVER:
            self._note(call, StepRecord(call.clock.index, True, plan.verdict.reason))
            return self.call_original(module, *args, **kwargs)
        record, outcome = self._steps.take(call, plan)
        if record.reason == NEW_RUN:
            call = call._replace(clock=self._restart(call.context, None, call.inputs))
            record = record._replace(step=call.clock.index)
        record, output = self._steps.record(call, plan, record, outcome)
        self._note(call, record)
        return output

    def _begin(self, module: torch.nn.Module, args: Any, kwargs: Any, context: CallContext) -> Call:
        """Find the step that a call belongs to."""
        run = run_around(module)
        inputs = Inputs(args, kwargs, self._names, self.branches.roles)
        if run is not None and context.request is None:  # A pipeline that nobody has hooked.
            context = context._replace(request=run.request)
        clock = self._clocks.get(context.request) or self._new_clock(context.request)
        if not clock.advance(context.branch, run, inputs):
            clock = self._restart(context, run, inputs)
        self._clocks.move_to_end(context.request)
        self._bound(clock, context)
        state = self.state_manager.state_of(context)
        if clock.has_gap or clock.is_again:
            state.restart()
        return Call(module, inputs, context, clock, state)

    def _restart(self, context: CallContext, run: Run | None, inputs: Inputs) -> Clock:
        """Begin the run of a request anew."""
        for known, state in self.state_manager.states().items():
            if known.request == context.request:
                state.reset()
        clock = self._new_clock(context.request)
        clock.advance(context.branch, run, inputs)
        return clock

    def _new_clock(self, request: Hashable) -> Clock:
        self._records[request] = {}
        self._records.move_to_end(request)
        while len(self._records) > _MOST_RUNS:
            self._records.popitem(last=False)
        clock = self._clocks[request] = Clock(self._announced)
        return clock

    def _bound(self, clock: Clock, context: CallContext) -> None:
        """Let go of what was used longest ago, where pipelines never end what they begin."""
        if len(clock.recent) > _MOST_BRANCHES:
            branch, _ = clock.recent.popitem(last=False)
            self.state_manager.drop_branch(CallContext(context.request, str(branch)))
        if len(self._clocks) > _MOST_OPEN_RUNS:
            request, _ = self._clocks.popitem(last=False)
            self.state_manager.drop(request)

    # ------------------------------------------------------------------------------------------ what was done

    def _note(self, call: Call, record: StepRecord) -> None:
        run = self._records.setdefault(call.context.request, {})
        run.setdefault(call.context.branch or "", []).append(record)

    def stats(self, request: Hashable = None) -> CacheStats:
        """What was done in a run; the most recent one if no request is named."""
        if request is None and self._records:
            request = next(reversed(self._records))
        branches: Mapping[str, list[StepRecord]] = self._records.get(request, {})
        about = self._model.about() if self._model is not None else self._about
        return CacheStats(
            self._model_name,
            self.config.summary(),
            "a saved schedule" if self.config.schedule else f"{about.signal}, {self._polynomial}",
            {name: BranchStats(tuple(steps)) for name, steps in branches.items()},
            about.problem or self.branches.trouble(),
            about.coverage,
        )


def _refuse_training(module: torch.nn.Module) -> None:
    if module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            f"{type(module).__name__} is being trained with a cache on: it is in training mode, and gradients are "
            "recorded. A skipped step has no gradients for its blocks. Detach the cache to train (attached.detach()), "
            "or generate under torch.no_grad()."
        )


def apply_teacache_hook(
    module: torch.nn.Module, config: TeaCacheConfig | Mapping[str, Any] | None = None, agree: Agree | None = None
) -> TeaCacheHook:
    """Let a denoiser skip steps. `agree` makes ranks that compute one image together decide alike."""
    if not isinstance(module, torch.nn.Module):
        raise SettingError(f"TeaCache attaches to a denoiser, a torch.nn.Module; not to {module!r}.")
    module = unwrapped(module)
    registry = HookRegistry.get_or_create(module)
    if HOOK_NAME in registry:
        raise SettingError(f"This {type(module).__name__} has TeaCache already. Remove it first: remove_teacache_hook.")
    hook = TeaCacheHook(TeaCacheConfig.read(config), agree)
    registry.register_hook(HOOK_NAME, hook)
    known = registry.get_hook(BRANCH_HOOK_NAME)
    if isinstance(known, BranchHook):
        hook.branches = known
    else:
        registry.register_hook(BRANCH_HOOK_NAME, hook.branches)
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
