"""Is this denoising step skipped, and with what? TeaCache, for any model that is built of blocks.

A step is skipped while the summed changes of the modulated input since the last computed step stay below a threshold.
The first branch of a run decides for those called after it in a step; each branch stores what its own skipped steps are
made from. The hook finds the run and the step of a call (`clock`), and takes the step (`step`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..core.errors import ModelError, SettingError
from ..core.settings import count, read_as
from ..hooks import BranchHook, CallContext, Handle, HookOrder, HookRegistry, ModelHook, Run, StateManager, run_around
from ..hooks.roles import parameter_names
from .auto import AutoSteps, WholeModel, asked_tolerance
from .config import AutoConfig, CacheConfig, TeaCacheConfig
from .decision import Agree, coefficients_for, rescaling
from .extractors import Extractor, ExtractorModel, extractor_for
from .inputs import Inputs
from .model import About, BlockModel, CacheableModel
from .some_rows import SomeRows
from .state import Clock, TeaCacheState
from .stats import BranchStats, CacheStats, StepRecord
from .step import NEVER, NEW_RUN, Call, Steps

HOOK_NAME = "teacache"
BRANCH_HOOK_NAME = "branches"
UNKNOWN = "unknown"
"""The branch of calls whose branch is unknown."""
_UNKNOWN_STEP = StepRecord(-1, True, "its branch is unknown")
_MOST_BRANCHES = 8
"""Number of branches of a run whose state is retained."""
_MOST_OPEN_RUNS = 16
"""Number of unfinished runs whose state is retained."""
_MOST_RUNS = 16
"""Number of runs whose stats are retained."""
_logger = logging.getLogger(__name__)


class TeaCacheHook(ModelHook, Handle):
    """TeaCache on a denoiser, and the handle that takes it off. `apply_teacache_hook` attaches it."""

    order = HookOrder.CACHE

    def __init__(self, config: CacheConfig | None = None, agree: Agree | None = None) -> None:
        Handle.__init__(self)
        self.config: CacheConfig = config or TeaCacheConfig()
        self.rescale_func = rescaling(None)
        self.extractor_fn: Extractor | None = None
        self.state_manager: StateManager[TeaCacheState] = StateManager(TeaCacheState, self.config)
        self.is_paused = False
        """Compute every call as if there were no cache."""
        self.branches = BranchHook()
        """Recognises branches, and the role of each argument."""
        self._agree = agree
        self._model: CacheableModel | None = None
        self._steps: Steps | AutoSteps | None = None
        self._model_name = ""
        self._names: tuple[str, ...] = ()
        self._judged_by = ""
        self._announced: int | None = None
        self._clocks: OrderedDict[Hashable, Clock] = OrderedDict()
        self._records: OrderedDict[Hashable, dict[str, list[StepRecord]]] = OrderedDict()
        self._about = About("")
        """Facts about the model once the hook is detached."""

    # ------------------------------------------------------------------------------------------ on and off

    def attach(self, registry: HookRegistry) -> None:
        """Register this hook and, unless there is one, the hook that recognises branches."""

        def put(name: str, hook: ModelHook) -> None:
            registry.register_hook(name, hook)
            self._undo.callback(lambda: registry.remove_hook(name) if registry.get_hook(name) is hook else None)

        put(HOOK_NAME, self)
        known = registry.get_hook(BRANCH_HOOK_NAME)
        if isinstance(known, BranchHook):
            self.branches = known
        else:
            put(BRANCH_HOOK_NAME, self.branches)

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._model_name = type(module).__name__
        self._names = parameter_names(module)
        if isinstance(self.config, AutoConfig):
            self._model = WholeModel(module)
            self._steps = AutoSteps(self.config, self._model, self._agree, lambda: self.branches.samples(), SomeRows())
        else:
            self._prepare(module, self.config)
        return module

    def _prepare(self, module: torch.nn.Module, config: TeaCacheConfig) -> None:
        """Find out how the steps of a model are judged by their signal."""
        known = coefficients_for(module, config.coefficients)
        self.rescale_func = rescaling(known)
        self._judged_by = f", rescaled by the coefficients of {known.origin}" if known else ", not rescaled"
        self.extractor_fn = extractor_for(module)
        if self.extractor_fn is not None:
            self._model = ExtractorModel(module, self.extractor_fn)
        else:
            self._model = BlockModel(module, HOOK_NAME)
        self._steps = Steps(config, self._model, self.rescale_func, self._agree)
        if known is None and config.schedule is None:
            text = "No TeaCache coefficients are known for %s; changes of its signal are used without rescaling."
            _logger.info(text, self._model_name)

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.reset_state(module)
        if self._model is not None:
            self._about = self._model.about()
            self._model.detach()
            self._model = self._steps = None
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget everything stored; the next call begins a run."""
        self.state_manager.reset()
        self._clocks.clear()
        if self._model is not None:
            self._model.forget()
        return module

    def refresh(self, module: torch.nn.Module, num_inference_steps: int | None = None) -> None:
        """Begin a run with this number of steps, in your own loop. A hooked pipeline does that itself."""
        if num_inference_steps is not None:
            read_as(count(1), num_inference_steps, "num_inference_steps")
        scheduled = self._schedule_length
        if scheduled is not None and num_inference_steps not in (None, scheduled):
            raise SettingError(
                f"The schedule is for {scheduled} steps, not for {num_inference_steps}. Give one of the right length.",
                param="schedule",
            )
        self._announced = num_inference_steps
        self.reset_state(module)

    @property
    def _schedule_length(self) -> int | None:
        return self.config.scheduled_steps if isinstance(self.config, TeaCacheConfig) else None

    def end_run(self, module: torch.nn.Module, request: Hashable) -> None:
        """Forget a run that has ended. Its stats stay."""
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
        if call.inputs.device.type == "meta":  # Shapes without values decide nothing.
            return self.call_original(module, *args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.inputs.tensors):
            call.state.reset()  # A skipped step has no gradients of its blocks.
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
        inputs = Inputs(args, kwargs, self._names, self.branches.roles, self.branches.leaves(args, kwargs))
        if run is not None and context.request is None:  # A pipeline without our hook.
            context = context._replace(request=run.request)
        clock = self._clocks.get(context.request) or self._new_clock(context.request)
        if not clock.advance(context.branch, run, inputs):
            clock = self._restart(context, run, inputs)
        self._clocks.move_to_end(context.request)
        self._bound(clock, context)
        state = self.state_manager.state_of(context)
        if clock.has_gap or clock.is_again:
            state.reset()
        return Call(lambda args, kwargs: self.call_original(module, *args, **kwargs), inputs, context, clock, state)

    def _restart(self, context: CallContext, run: Run | None, inputs: Inputs) -> Clock:
        """Begin a new run of a request."""
        for known, state in self.state_manager.states().items():
            if known.request == context.request:
                state.reset()
        clock = self._new_clock(context.request)
        clock.advance(context.branch, run, inputs)
        return clock

    def _new_clock(self, request: Hashable) -> Clock:
        self._records[request] = {}
        self._records.move_to_end(request)
        if len(self._records) > _MOST_RUNS:
            self._records.popitem(last=False)
        clock = self._clocks[request] = Clock(self._announced)
        return clock

    def _bound(self, clock: Clock, context: CallContext) -> None:
        """Drop what was used longest ago, where pipelines never end their runs."""
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
        """What was computed and skipped in a run; by default the most recent one."""
        if request is None and self._records:
            request = next(reversed(self._records))
        branches: Mapping[str, list[StepRecord]] = self._records.get(request, {})
        about = self._model.about() if self._model is not None else self._about
        config, asked = self.config, asked_tolerance()
        if isinstance(config, AutoConfig) and asked is not None:
            config = AutoConfig(tolerance=asked)
        return CacheStats(
            self._model_name,
            config.summary(),
            f"{about.signal}{self._judged_by}" if self._schedule_length is None else "a saved schedule",
            {name: BranchStats(tuple(steps)) for name, steps in branches.items()},
            about.problem or self.branches.trouble(),
            about.coverage,
            isinstance(self.config, AutoConfig),
        )


def _refuse_training(module: torch.nn.Module) -> None:
    if module.training and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
        raise ModelError(
            f"{type(module).__name__} is being trained with a cache on: it is in training mode, and gradients are "
            "recorded. A skipped step has no gradients for its blocks. Detach the cache to train (attached.detach()), "
            "or generate under torch.no_grad()."
        )


def apply_teacache_hook(
    module: torch.nn.Module, config: CacheConfig | Mapping[str, Any] | None = None, agree: Agree | None = None
) -> TeaCacheHook:
    """Let a denoiser skip steps. `agree` makes ranks that compute one image together decide alike."""
    if not isinstance(module, torch.nn.Module):
        raise SettingError(f"TeaCache attaches to a denoiser, a torch.nn.Module; not to {module!r}.", param="module")
    module = unwrapped(module)
    registry = HookRegistry.get_or_create(module)
    registry.refuse_second(HOOK_NAME, "a cache", param="cache")
    hook = TeaCacheHook(config if isinstance(config, AutoConfig) else TeaCacheConfig.read(config), agree)
    hook.attach(registry)
    return hook
