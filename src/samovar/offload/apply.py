"""Offload on a pipeline, and off again: `apply_offload(pipeline, OffloadConfig(...))`.

Everything is checked and planned before anything moves, and a failure half-way is undone.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..arch.devices import read_device
from ..arch.skeleton import loaded_parts
from ..core.errors import SettingError
from ..core.interop import accelerate_hook, compiled_call, diffusers_hooks
from ..core.settings import parse_bytes
from ..core.tensor_parts import num_bytes_of
from ..hooks import NOT_BYPASSED, Handle, HookOrder, HookRegistry, ModelHook, PipelineHook, Run, hook_pipeline
from ..hooks.registry import install_hook
from ..trace.activations import Activations, activations_of
from ..trace.dry_run import BATCHES, RequestSize
from ..trace.time_only import is_autocast
from .ahead import choose_layers, find_time_layers, may_have_time_layers, with_time_layers
from .config import OffloadConfig
from .cuda import CudaStage
from .host import HostMemory, host_limit
from .measure import Measured
from .moving import HOOK, OffloadedComponent, hooks_for
from .planner import PHASES, OffloadPlan, plan_offload
from .simulated import HostStage
from .sizes import Component, ComponentSize, find_components, format_bytes, measure_components
from .staging import Stage
from .stats import OffloadStats
from .streaming import Timing
from .tiers import TIME_LAYERS, TierPlan, plan_tiers, uses_of
from .time_layers import TimeLayers
from .weights import check_movable, tensors_of

_UNLIMITED = 2**62
_SHRINK = 0.8
"""What is left of a budget within which a call ran out of memory."""
_SIZE_ARGUMENTS = {"height": "height", "width": "width", "frames": "num_frames"}


def apply_offload(pipeline: Any, config: OffloadConfig | None = None, *, stage: Stage | None = None) -> Offloaded:
    """Offload a pipeline or a single model. `stage` replaces the device, for tests and other hardware."""
    offloaded = prepare_offload(pipeline, config, stage=stage)
    offloaded.start()
    return offloaded


def prepare_offload(pipeline: Any, config: OffloadConfig | None = None, *, stage: Stage | None = None) -> Offloaded:
    """Check and plan an offload without changing anything; `start` applies it."""
    started = time.perf_counter()
    config = config or OffloadConfig()
    if stage is None:
        device = read_device(config.device)
        stage = CudaStage(device) if device.type == "cuda" else HostStage()
    offloaded = Offloaded(pipeline, config, stage)
    stage.stats.setup_s = time.perf_counter() - started
    return offloaded


class Offloaded(Handle, PipelineHook):
    """An offloaded pipeline."""

    def __init__(self, pipeline: Any, config: OffloadConfig, stage: Stage) -> None:
        super().__init__()
        self.config, self.stage, self.execution_device = config, stage, stage.device
        self._pipeline = pipeline
        for name, part in loaded_parts(pipeline).items():
            if part.module is not None and name not in config.exclude:
                _check_free(name, part.module)
                check_movable(name, part.module, stage.device)
        components = find_components(pipeline, config.exclude)
        for component in components:
            for path, block in (("", component.module), *component.blocks.items()):
                check_compiled(f"{component.name}.{path}".rstrip("."), block)
        self._sizes = self._measure(components)
        self._host = HostMemory(stage, None)
        self._lock = threading.RLock()
        """Held by the one thread that calls a component or changes where weights are."""
        self._components = {c.name: OffloadedComponent(c, stage, self._host, self._lock) for c in components}
        self._hooks = contextlib.ExitStack()
        self._known: dict[RequestSize, Activations] = {}
        self.time_layers: dict[str, TimeLayers] = {}
        """By component: the layers that are computed ahead."""
        self._needs: dict[str, int] = {}
        """Bytes beside their weights that components were seen to need, where no plan could know."""
        self._num_runs = 0
        self.not_ahead: dict[str, str] = {}
        """By component: which layers stay what they are though they see time alone, and why."""
        is_wanted = config.precompute is not False
        self._not_tried = {c.name for c in components if is_wanted and may_have_time_layers(c)}
        self.plan = self._plan_with_layers(config)
        self.tiers = self._tiers_for(config, self.plan)

    def _plan_with_layers(self, config: OffloadConfig) -> OffloadPlan:
        """A plan, for which time-only layers are looked for if it is worth it."""
        plan = self._plan_for(config)
        if not self._not_tried or not (plan.offloads_anything or config.precompute):
            return plan
        self._find_layers([component.whole for component in self._components.values()])
        return self._plan_for(config)

    def _find_layers(self, components: Sequence[Component]) -> None:
        """Look for time-only layers in a run without weights."""
        calls = self._rehearsed(self.config.size).calls
        found, self.not_ahead = with_time_layers(components, calls)
        # A rehearsed call may be one that a model cannot be traced with. Then the first real one is looked at.
        self._not_tried -= {
            c.name for c in found if c.name in calls and (c.time_layers or not self.not_ahead.get(c.name))
        }
        for component in found:
            self._components[component.name].whole = component
        self._sizes = self._measure(found)

    def start(self) -> None:
        """Follow the plan. A failure half-way detaches."""
        started = time.perf_counter()
        if self.config.gpu_memory is not None:
            self.stage.expand_segments()
        for name, component in self._components.items():
            layers, why = choose_layers(component.whole, component.whole.time_layers)
            if len(layers) < len(component.whole.time_layers):  # Blocks were compiled since they were found.
                self.not_ahead[name] = why
                self.plan, self.tiers = self._with_time_layers(name, layers)
        self._follow(self.plan, self.tiers)
        self.stage.stats.setup_s += time.perf_counter() - started

    def stats(self) -> OffloadStats:
        """A snapshot of what was done so far."""
        return copy.deepcopy(self.stage.stats)

    def replan(self, **changes: Any) -> OffloadPlan:
        """Change settings, given as fields of `OffloadConfig`, and follow the new plan. Pinned weights stay pinned."""
        config = replace(self.config, **changes)
        with self._lock:
            before, self.config = self.config, config
            try:
                self._sizes = self._measure([component.whole for component in self._components.values()])
                plan = self._plan_with_layers(config)
                tiers = self._tiers_for(config, plan)
            except BaseException:
                self.config = before
                raise
            self._follow(plan, tiers)
        return plan

    def measure(self) -> contextlib.AbstractContextManager[Measured]:
        """Run the pipeline once inside, to learn what its components need and how long its blocks take.

        with offloaded.measure() as measured:
            pipeline("a warm-up")
        offloaded.replan(activations=measured.activations, timing=measured.timing)
        """
        return Measured(self.stage, [c.component for c in self._components.values()]).watching()

    def detach(self) -> None:
        """Take the offload off: every weight is where it was, with the value that it has now."""
        with self._lock:
            self._undo_plan()
            for component in self._components.values():
                component.restore()
            self._host.close()

    def start_run(self, run: Run) -> None:
        """Weights may have changed since the last run, and this one may need more memory than was planned for."""
        with self._lock:
            problems = {name: layers.problem for name, layers in self.time_layers.items() if layers.problem}
            self.not_ahead |= problems
            for name in problems:
                self._follow(*self._with_time_layers(name, {}))
            if not self._num_runs:  # Else weights would leave in the middle of another run.
                self._replan_for(run)
            self._num_runs += 1
            for component in self._components.values():
                component.refresh()

    def end_run(self, run: Run) -> None:
        """Compare what layers were given that were computed ahead."""
        with self._lock:
            self._num_runs = max(self._num_runs - 1, 0)
            for layers in self.time_layers.values():
                layers.settle()

    def _replan_for(self, run: Run) -> None:
        """Plan again if this run needs more memory than was planned for, or if its need is known by now. A run for
        which no plan is enough is refused."""
        if any(not part.is_measured and part.name in self._needs for part in self.plan.components):
            self.replan()
        elif self.config.gpu_memory is not None and not self._needs and self._activations_for(self.config) is not None:
            planned = self._rehearsed(self.config.size)
            known, asked = _said(planned.size or self.config.size), _said(asked_size(run.arguments))
            larger = RequestSize(**known | asked)
            is_larger = any(value > known.get(name, 0) for name, value in asked.items())
            needs = self._needs_at(larger) if is_larger and planned.by_name else {}
            if any(needs[name] > planned.by_name.get(name, 0) for name in needs):
                self.replan(**vars(larger))

    def _needs_at(self, size: RequestSize) -> Mapping[str, int]:
        """What components need at a size; nothing for one that the pipeline does not take, which it will say itself."""
        try:
            return self._rehearsed(size).by_name
        except SettingError:
            return {}

    def note_need(self, name: str, num_bytes: int) -> None:
        """A component was seen to need so much beside its weights."""
        self._needs[name] = max(num_bytes, self._needs.get(name, 0))

    def shrink(self, name: str, problem: str) -> None:
        """Follow a plan for less memory, since there was too little although the plan said otherwise."""
        with self._lock:
            before, planned = self.plan.budget_bytes or 0, self.plan.component(name).peak_bytes
            self._undo_plan()
            self.stage.release_unused()
            free = self.stage.free_bytes()
            budget = int(before * _SHRINK) if free is None else min(int(before * _SHRINK), free)
            try:
                plan = self._plan_for(replace(self.config, gpu_memory=budget))
            except SettingError as refused:
                self._follow(self.plan, self.tiers)
                there = "an unknown amount" if free is None else format_bytes(free)
                raise torch.OutOfMemoryError(
                    f"{name} was planned to need {format_bytes(planned)} of {format_bytes(before)}, and had less: "
                    f"{there} is free with all our weights off the device. {refused} ({problem})"
                ) from None
            self.config = replace(self.config, gpu_memory=budget)
            self._follow(plan, self._tiers_for(self.config, plan))
            warnings.warn(
                f"{name} ran out of memory within gpu_memory={format_bytes(before)}. It runs again within "
                f"{format_bytes(budget)}, and so do later calls until replan(gpu_memory=...).",
                stacklevel=2,
            )

    def _measure(self, components: Sequence[Component]) -> tuple[ComponentSize, ...]:
        coded = self.config.compress == "lossless" or (self.config.compress == "auto" and self.stage.decodes_fast)
        return measure_components(components, in_phase=self.stage.keeps_phase, coded=coded)

    def _plan_for(self, config: OffloadConfig) -> OffloadPlan:
        budget = config.gpu_memory
        if budget is None and config.mode == "auto":
            free = self.stage.free_bytes()
            tensors = [tensor for c in self._components.values() for tensor in c.component.tensors()]
            budget = _UNLIMITED if free is None else free + num_bytes_of(filter(self.stage.is_here, tensors))
        timing = config.timing or Timing(self.stage.measure_bus())
        known = self._activations_for(config) if budget not in (None, _UNLIMITED) else None
        if budget == _UNLIMITED:
            known = Activations(dict.fromkeys(self._components, 0), "")
        elif self._needs:
            known = known or Activations({}, "")
            known = replace(known, by_name={**self._needs, **known.by_name})
        return plan_offload(self._sizes, replace(config, gpu_memory=budget, timing=timing), known)

    def _activations_for(self, config: OffloadConfig) -> Activations | None:
        """What a run without weights shows, unless the settings say it all."""
        given = config.activations
        if given is not None and (not isinstance(given, Mapping) or {c.name for c in self._sizes} <= set(given)):
            return None
        return self._rehearsed(config.size)

    def _rehearsed(self, size: RequestSize) -> Activations:
        if size not in self._known:
            self._known[size] = activations_of(self._pipeline, size)
        return self._known[size]

    def _tiers_for(self, config: OffloadConfig, plan: OffloadPlan) -> TierPlan:
        with self._host.adopting():
            uses = uses_of(self._sizes, plan, lambda key: self._components[key[0]].anonymous_bytes(key[1]))
        budget = parse_bytes(config.host_memory, "host_memory")
        return plan_tiers(uses, budget, host_bytes=host_limit())

    def _follow(self, plan: OffloadPlan, tiers: TierPlan) -> None:
        self._undo_plan()
        cache = None if self.config.compress_cache is None else Path(self.config.compress_cache)
        try:
            self._host.follow(tiers, shares=bool(self.config.share))
            self.stage.release_unused()
            for name, component in self._components.items():
                component.follow(plan.component(name), tiers, cache=cache)
            self._install(plan, tiers)
        except BaseException:
            self.detach()
            raise
        self.plan, self.tiers = plan, tiers

    def _install(self, plan: OffloadPlan, tiers: TierPlan) -> None:
        self._link(plan)
        if all(component.component.module is not self._pipeline for component in self._components.values()):
            # A lone model is called once a step, so its calls are not runs.
            self._hooks.enter_context(hook_pipeline(self._pipeline, HOOK, self))
        for name in self._not_tried if plan.offloads_anything or self.config.precompute else ():
            install_hook(self._hooks, self._components[name].whole.module, f"{HOOK}_form", _FormHook(self, name))
        for name, component in self._components.items():
            if plan.component(name).ahead_bytes:
                how = self.stage, self._host, self._lock, tiers.tier((name, TIME_LAYERS)), tiers.may_pin_all
                layers = self.time_layers[name] = TimeLayers(component.whole, *how)
                layers.install(self._hooks)
        for name, component in self._components.items():
            if not component.others or plan.component(name).placement == "resident":
                component.load()

    def _link(self, plan: OffloadPlan) -> None:
        """Put hooks on those that come and go and on those that need their room, and tell each of the others."""
        active = [c for name, c in self._components.items() if plan.component(name).placement != "resident"]
        linked = [c for c in self._components.values() if active and (c in active or c.whole.role in PHASES)]
        order = list(PHASES)
        for component in linked:
            # Those of the phase before are needed last, those of the next one first.
            own = order.index(component.whole.role) + 1
            others = [(order.index(other.whole.role), other) for other in active if other is not component]
            component.others = [other for _, other in sorted(others, key=lambda pair: -((pair[0] - own) % len(order)))]
            component.has_neighbours = len(linked) > 1
            for module, hook in hooks_for(component, plan.component(component.whole.name)):
                install_hook(self._hooks, module, HOOK, hook)
            if plan.budget_bytes is not None:
                for module in entries_of(component.component):
                    install_hook(self._hooks, module, f"{HOOK}_entry", _EntryHook(self, component.whole.name))

    def learn(self, name: str, args: Any, kwargs: Any) -> bool:
        """Look for time-only layers in the first call of a denoiser. If there are any, plan again and say so."""
        with self._lock:
            if name not in self._not_tried or is_autocast():
                return False
            self._not_tried.discard(name)
            layers, self.not_ahead[name] = find_time_layers(self._components[name].whole, args, kwargs)
            if layers:
                self._follow(*self._with_time_layers(name, layers))
            return bool(layers)

    def _with_time_layers(self, name: str, layers: Mapping[str, torch.nn.Module]) -> tuple[OffloadPlan, TierPlan]:
        """Have a component compute these layers ahead, and plan again."""
        component = self._components[name]
        component.whole = replace(component.whole, time_layers=layers)
        self._sizes = self._measure([c.whole for c in self._components.values()])
        plan = self._plan_for(self.config)
        return plan, self._tiers_for(self.config, plan)

    def _undo_plan(self) -> None:
        """Move everything to the host and remove the hooks."""
        self._hooks.close()
        for layers in self.time_layers.values():
            layers.restore()
        self.time_layers = {}
        for component in self._components.values():
            component.unload()
            component.others, component.has_neighbours = (), False


class _EntryHook(ModelHook):
    """Runs a call again, once and in less room, if it ran out of memory; and sees what it needs if nobody knows."""

    order = HookOrder.OUTERMOST

    def __init__(self, offloaded: Offloaded, name: str) -> None:
        self._offloaded, self._name = offloaded, name
        self._is_inside = False

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return NOT_BYPASSED
        offloaded, name = self._offloaded, self._name
        self._is_inside = True
        try:
            is_known = offloaded.plan.component(name).is_measured
            before = 0 if is_known else offloaded.stage.used_bytes()
            output = module(*args, **kwargs)
            if not is_known:
                offloaded.note_need(name, offloaded.stage.peak_bytes() - before)
            return output
        except torch.OutOfMemoryError as error:
            problem = str(error)  # The error itself keeps alive what the call had computed.
        finally:
            self._is_inside = False
        offloaded.shrink(name, problem)
        return module(*args, **kwargs)


def entries_of(component: Component) -> list[torch.nn.Module]:
    """The modules by which a component is entered: itself, and the halves of a VAE."""
    module = component.module
    children = module.children() if component.role == "vae" else ()
    return [module, *(child for child in children if tensors_of(child, component.skip))]


def _said(size: RequestSize) -> dict[str, int]:
    """What a size says."""
    return {name: value for name, value in vars(size).items() if value is not None}


def asked_size(arguments: Mapping[str, Any]) -> RequestSize:
    """The size that a pipeline is called for, as far as its arguments say."""
    found = {name: arguments.get(given) for name, given in _SIZE_ARGUMENTS.items()}
    each = next((arguments[name] for name in BATCHES if isinstance(arguments.get(name), int)), 1)
    prompt = arguments.get("prompt")
    found["batch"] = each * len(prompt) if isinstance(prompt, (list, tuple)) else each
    return RequestSize(**{name: value if type(value) is int and value > 0 else None for name, value in found.items()})


class _FormHook(ModelHook):
    """Looks at the first call of a denoiser."""

    order = HookOrder.OUTERMOST

    def __init__(self, offloaded: Offloaded, name: str) -> None:
        self._offloaded, self._name = offloaded, name

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # After a new plan the call begins again, with the hooks of that plan.
        return module(*args, **kwargs) if self._offloaded.learn(self._name, args, kwargs) else NOT_BYPASSED


def _check_free(name: str, whole: torch.nn.Module) -> None:
    """Refuse a component that is offloaded already."""
    for path, module in whole.named_modules():
        where = f"{name}.{path}".rstrip(".")
        if HOOK in HookRegistry.get_or_create(module):
            raise SettingError(f"{where} is offloaded already. Call samovar.detach(pipe) first.")
        is_grouped = any("group_offloading" in name for name in diffusers_hooks(module))
        if is_grouped or accelerate_hook(module) is not None:
            raise SettingError(
                f"{where} is offloaded by accelerate or diffusers. Load the pipeline again, or remove their hooks "
                "first: pipeline.remove_all_hooks()."
            )


def check_compiled(name: str, module: torch.nn.Module) -> None:
    """Refuse modules compiled into CUDA graphs, which keep the addresses of their weights."""
    for compiled in (compiled_call(module), module):
        read = getattr(compiled, "get_compiler_config", None)
        config = read() if read is not None else None
        if isinstance(config, dict) and config.get("triton.cudagraphs"):
            raise SettingError(
                f"{name} is compiled with CUDA graphs, which keep the addresses of its weights, so it cannot be "
                'offloaded. Compile it with mode="default" or "max-autotune-no-cudagraphs".'
            )
