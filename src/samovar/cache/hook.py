"""The cache on a denoiser: each call is computed, or skipped with what is known from earlier steps.

The hook finds the run, the branch and the step of a call, and takes the step: by the errors of forecasts (`auto`), by a
saved schedule of outputs (`schedule`), or with the model's blocks skipped (`threshold`).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from ..arch.modules import unwrapped
from ..core.errors import ModelError, SettingError
from ..core.settings import count, read_as
from ..hooks import BranchHook, CallContext, Handle, HookOrder, HookRegistry, ModelHook, StateManager, current_run
from ..hooks.intercept import call_bare
from .auto import AutoSteps, asked_tolerance
from .blocks import BlockSteps
from .config import AutoConfig, CacheConfig, TeaCacheConfig
from .extractors import Extractor, ExtractorSteps, extractor_for, takes_blocks
from .run import CachedRun, Call, TeaCacheState
from .signal import Agree, coefficients_for, rescaling
from .stats import BranchStats, CacheStats, StepRecord
from .steps import About, Steps
from .whole import ScheduledSteps

HOOK_NAME = "teacache"
BRANCH_HOOK_NAME = "branches"
UNKNOWN = "unknown"
"""The branch of calls whose branch is unknown."""
_UNKNOWN_STEP = StepRecord(-1, True, "its branch is unknown")
_MAX_BRANCHES = 8
"""Number of branches of a run whose state is retained."""
_MAX_RUNS = 16
"""Number of runs whose state and stats are retained."""
_logger = logging.getLogger(__name__)


class TeaCacheHook(ModelHook, Handle):
    """A cache on a denoiser, and the handle that takes it off. `apply_teacache_hook` attaches it."""

    order = HookOrder.CACHE

    def __init__(self, config: CacheConfig | None = None, agree: Agree | None = None) -> None:
        Handle.__init__(self)
        self.config: CacheConfig = config or TeaCacheConfig()
        self.rescale_func = rescaling(None)
        self.extractor_fn: Extractor | None = None
        self.state_manager: StateManager[TeaCacheState] = StateManager(TeaCacheState)
        self.is_paused = False
        """Compute every call as if there were no cache."""
        self.branches = BranchHook()
        """Recognises branches, and the role of each argument."""
        self._agree = agree
        self._steps: Steps | None = None
        self._model_name = ""
        self._judged_by = ""
        self._announced: int | None = None
        self._runs: OrderedDict[Hashable, CachedRun] = OrderedDict()
        """By request, the one called last at the end. Of those that have ended only records are left."""
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
        self._steps = self._prepare(module)
        return module

    def _prepare(self, module: torch.nn.Module) -> Steps:
        """Find out how the steps of a model are taken."""
        config = self.config
        if isinstance(config, AutoConfig):
            return AutoSteps(config, module, self._agree, lambda: self.branches.samples())
        if config.forecast_of == "output":
            return ScheduledSteps(config, module, self._agree)
        known = coefficients_for(config.transformer_type or self._model_name, config.coefficients)
        self.rescale_func = rescaling(known)
        self.extractor_fn = extractor_for(module, config.transformer_type)
        self._judged_by = f", rescaled by the coefficients of {known.origin}" if known else ", not rescaled"
        if known is None and config.schedule is None:
            text = "No TeaCache coefficients are known for %s; changes of its signal are used without rescaling."
            _logger.info(text, self._model_name)
        settings = config, self.rescale_func, self._agree
        if self.extractor_fn is None or takes_blocks(self.extractor_fn):
            return BlockSteps(module, HOOK_NAME, self.extractor_fn, *settings)  # type: ignore[arg-type]
        return ExtractorSteps(module, self.extractor_fn, *settings)

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.reset_state(module)
        if self._steps is not None:
            self._about = self._steps.about()
            self._steps.detach()
            self._steps = None
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        """Forget everything stored; the next call begins a run."""
        self.state_manager.reset()
        self._end(list(self._runs.values()))
        return module

    def refresh(self, module: torch.nn.Module, num_inference_steps: int | None = None) -> None:
        """Begin a run with this number of steps, in your own loop. A hooked pipeline does that itself."""
        if num_inference_steps is not None:
            read_as(count(1), num_inference_steps, "num_inference_steps")
        scheduled = self.config.scheduled_steps
        if scheduled is not None and num_inference_steps not in (None, scheduled):
            raise SettingError(
                f"The schedule is for {scheduled} steps, not for {num_inference_steps}. Give one of the right length.",
                param="schedule",
            )
        self._announced = num_inference_steps
        self.reset_state(module)

    def end_run(self, module: torch.nn.Module, request: Hashable) -> None:
        """Forget a run that has ended. Its stats stay."""
        self.state_manager.drop(request)
        self.branches.drop(request)
        self._end([self._runs[request]] if request in self._runs else [])

    def _end(self, runs: Iterable[CachedRun]) -> None:
        for run in runs:
            run.end()
        if self._steps is not None and all(run.is_over for run in list(self._runs.values())):
            self._steps.forget()

    # ------------------------------------------------------------------------------------------ a step

    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        steps, context = self._steps, self.state_manager.context
        if steps is None or self.is_paused:
            return self.call_original(module, *args, **kwargs)
        if context.branch is None:  # Nothing may be reused.
            self._run_of(context.request).records.setdefault(UNKNOWN, []).append(_UNKNOWN_STEP)
            return self.call_original(module, *args, **kwargs)
        has_gradients = torch.is_grad_enabled()
        if has_gradients and module.training:
            _refuse_training(module)
        branches = self.branches
        call = Call(partial(call_bare, module), args, kwargs, branches.leaves(args, kwargs), branches.roles)
        if call.device.type == "meta":  # Shapes without values decide nothing.
            return call.compute()
        call.branch, call.generation = context.branch, steps.generation.check()
        self._begin(call, context)
        if has_gradients and any(tensor.requires_grad for tensor in call.tensors):
            call.state.reset()  # A skipped step has no gradients of its blocks.
            record, output = StepRecord(call.step.index, True, "gradients are recorded"), call.compute()
        else:
            record, output = steps.take(call)
        call.run.records.setdefault(call.branch, []).append(record)
        return output

    def _begin(self, call: Call, context: CallContext) -> None:
        """Find the step that a call belongs to."""
        request, run = context.request, current_run()
        own = self._run_of(request)
        if len(own.branches) > _MAX_BRANCHES or not own.advance(call, run):
            # Another run of the same request, or one whose branches are new at each step.
            self.state_manager.drop(request)
            own = self._new_run(request)
            own.advance(call, run)
        state = call.state = own.branches[call.branch] = self.state_manager.state_of(context)
        if call.has_gap or call.is_again:
            state.reset()

    def _run_of(self, request: Hashable) -> CachedRun:
        run = self._runs.get(request)
        if run is None or run.is_over:
            return self._new_run(request)
        self._runs.move_to_end(request)
        return run

    def _new_run(self, request: Hashable) -> CachedRun:
        run = self._runs[request] = CachedRun(self._announced, waits=self.config.scheduled_steps is None)
        self._runs.move_to_end(request)
        if len(self._runs) > _MAX_RUNS:  # Some pipelines never end their runs.
            self.state_manager.drop(self._runs.popitem(last=False)[0])
        return run

    # ------------------------------------------------------------------------------------------ what was done

    def stats(self, request: Hashable = None) -> CacheStats:
        """What was computed and skipped in a run; by default the most recent one."""
        if request is None and self._runs:
            request = next(reversed(self._runs))
        records = self._runs[request].records if request in self._runs else {}
        about = self._about if self._steps is None else self._steps.about()
        config, asked = self.config, asked_tolerance()
        if isinstance(config, AutoConfig) and asked is not None:
            config = AutoConfig(tolerance=asked)
        return CacheStats(
            self._model_name,
            config.summary(),
            f"{about.signal}{self._judged_by}" if config.scheduled_steps is None else "a saved schedule",
            {name: BranchStats(tuple(steps)) for name, steps in records.items()},
            about.problem or self.branches.trouble(),
            about.coverage,
            isinstance(config, AutoConfig),
        )


def _refuse_training(module: torch.nn.Module) -> None:
    if any(parameter.requires_grad for parameter in module.parameters()):
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
