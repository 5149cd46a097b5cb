"""Offload on a pipeline, and off again: `apply_offload(pipeline, OffloadConfig(...))`.

Everything is checked and planned before anything moves, and a failure half-way is undone.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..arch.devices import read_device
from ..arch.skeleton import loaded_parts
from ..core import nested
from ..core.errors import SettingError
from ..core.interop import accelerate_hook, compiled_call, diffusers_hooks
from ..core.settings import parse_bytes
from ..core.tensor_parts import num_bytes_of
from ..hooks import (
    NOT_BYPASSED,
    Handle,
    HookOrder,
    HookRegistry,
    ModelHook,
    PipelineHook,
    Run,
    current_run,
    hook_pipeline,
)
from ..hooks.registry import install_hook
from ..trace.activations import Activations, activations_of
from ..trace.dry_run import BATCHES, RequestSize
from ..trace.time_only import is_autocast
from .component import OffloadedComponent, Phases
from .config import OffloadConfig
from .cuda import CudaStage
from .device import Pressure, Stage
from .history import History
from .host_device import HostStage
from .host_tiers import TIME_LAYERS, TierPlan, plan_tiers, uses_of
from .layout import check_movable
from .load_hooks import HOOK, entries_of, hooks_for
from .measured import Timer, file_of, kept_folder, read_history, with_margin, write_history
from .pinned import HostMemory, host_limit
from .planner import OTHER_KERNELS, PHASES, OffloadPlan, plan_offload
from .sizes import Component, ComponentSize, find_components, format_bytes, measure_components
from .stats import OffloadStats
from .streaming import Timing
from .time_layers import TimeLayers, choose_layers, may_have_time_layers, with_layers_of, with_time_layers

_UNLIMITED = 2**62
_MOVING_S = 2.0
"""Another plan is followed, though the one before would do, once runs have lost this time, about what it takes."""
_ATTEMPTS = 3
"""Calls of a component that runs out of memory although the plan said that it would not."""
_MORE, _MORE_BYTES = 0.1, 2**27
"""How much more it is taken to need in the next one, of what others of ours keep beside it."""
_MORE_ALONE = 0.25
"""The same where nothing is beside it."""
_MAX_RETRIES = 6
"""How often the allocator may give memory back in the calls of a component in one run. Each takes milliseconds."""
_SIZE_ARGUMENTS = {"height": "height", "width": "width", "frames": "num_frames"}
_STEPS = ("num_inference_steps", "timesteps", "sigmas")


def apply_offload(pipeline: Any, config: OffloadConfig | None = None, *, stage: Stage | None = None) -> Offloaded:
    """Offload a pipeline or a single model. `stage` replaces the device, for tests and other hardware."""
    offloaded = prepare_offload(pipeline, config, stage=stage)
    try:
        offloaded.start()
        return offloaded
    except BaseException:
        offloaded.detach()
        raise


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
        self._host = HostMemory(stage)
        self._lock = threading.RLock()
        """Held by the one thread that calls a component or changes where weights are."""
        self._phases = Phases()
        shared = stage, self._host, self._lock, self._phases
        self._components = {component.name: OffloadedComponent(component, *shared) for component in components}
        self._is_lone = any(component.module is pipeline for component in components)
        """Whether it is a single model, which is called once a step, so that its calls are not runs."""
        self._hooks = contextlib.ExitStack()
        self._known: dict[RequestSize, Activations] = {}
        self.time_layers: dict[str, TimeLayers] = {}
        """By component: the layers that are computed ahead."""
        self.not_ahead: dict[str, str] = {}
        """By component: which layers stay what they are though they see time alone, and why."""
        self._lost_s = 0.0
        """What runs have lost, as far as is known, since another plan would have been quicker."""
        self._num_runs = 0
        self._inside = threading.local()
        """The components that a thread is calling."""
        self._unseen: set[tuple[str, int]] = set()
        """Entries of components whose need a run is still to show."""
        self._retries: Counter[str] = Counter()
        """Of this run, by component: how often torch's allocator gave memory back to find some."""
        self._seen: set[tuple[str, int]] = set()
        """Those that were called in it."""
        is_wanted = config.precompute is not False
        self._not_tried = {c.name for c in components if is_wanted and may_have_time_layers(c)}
        self._file: Path | None = None
        """Where figures are kept."""
        self.history = self._written = self._recalled()
        """What runs have shown."""
        self.plan = self._plan_with_layers(config)
        self._is_timed = self.history.timing is not None
        """Whether the plan that is followed knows the times of blocks."""
        self.tiers = self._tiers_for(config, self.plan)

    # ------------------------------------------------------------------------------------------------ plans

    def _recalled(self) -> History:
        """What earlier runs have shown."""
        folder = kept_folder(self.config.figures) if self.stage.is_real or self.config.figures else None
        usual = History(steps=_usual_steps(self._pipeline))
        if folder is None:
            return usual
        counted = self._activations_for(self.config)
        found = counted.by_name if counted is not None and self.config.gpu_memory is not None else {}
        self._file = file_of(folder, self.stage.name, self._sizes, found, self.config.size)
        history = read_history(self._file)
        return replace(history, steps=history.steps or usual.steps)

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

    def _measure(self, components: Sequence[Component]) -> tuple[ComponentSize, ...]:
        coded = self.config.compress == "lossless" or (self.config.compress == "auto" and self.stage.decodes_fast)
        return measure_components(components, in_phase=self.stage.keeps_phase, coded=coded)

    def _plan_for(self, config: OffloadConfig) -> OffloadPlan:
        budget, history = config.gpu_memory, self.history
        if budget is None and config.mode == "auto":
            free = self.stage.free_bytes()
            tensors = [tensor for c in self._components.values() for tensor in c.component.tensors()]
            budget = _UNLIMITED if free is None else free + num_bytes_of(filter(self.stage.is_here, tensors))
        timing = config.timing or history.timing or self._speeds()
        known = self._activations_for(config) if budget not in (None, _UNLIMITED) else None
        if budget == _UNLIMITED:
            known = Activations(dict.fromkeys(self._components, 0), "")
        return plan_offload(self._sizes, replace(config, gpu_memory=budget, timing=timing), known, history)

    def _speeds(self) -> Timing:
        """What is known of the device alone."""
        may_code = self.config.compress != "none"
        return Timing(self.stage.measure_bus(), decoding_s=self.stage.measure_decoding() if may_code else 0.0)

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

    # ------------------------------------------------------------------------------------------------ on and off

    def start(self) -> None:
        """Follow the plan. A failure half-way detaches."""
        started = time.perf_counter()
        if self.config.gpu_memory is not None:
            self.stage.expand_segments()
        for name, component in self._components.items():
            layers, why = choose_layers(component.whole, component.whole.time_layers)
            if len(layers) < len(component.whole.time_layers):  # Blocks were compiled since they were found.
                self.not_ahead[name] = why
                self.plan, self.tiers = self._with(replace(component.whole, time_layers=layers))
        try:
            self._follow(self.plan, self.tiers)
            self.stage.stats.setup_s += time.perf_counter() - started
        except BaseException:
            self.detach()
            raise

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

    def detach(self) -> None:
        """Take the offload off: every weight is where it was, with the value that it has now."""
        with self._lock:
            self._undo_plan()
            for component in self._components.values():
                component.restore()
            self._host.close()

    def _follow(self, plan: OffloadPlan, tiers: TierPlan) -> None:
        self._undo_plan()
        try:
            self._host.follow(tiers.buffer_bytes)
            self.stage.release_unused()
            with self._within_budget():
                for name, component in self._components.items():
                    component.follow(plan.component(name), tiers, graphs=self.config.graphs)
                self._install(plan, tiers)
        except BaseException:
            self.detach()
            raise
        self.plan, self.tiers, self._is_timed = plan, tiers, self.history.timing is not None

    def _install(self, plan: OffloadPlan, tiers: TierPlan) -> None:
        movers = {name: c for name, c in self._components.items() if plan.component(name).placement != "resident"}
        roles = list(PHASES)
        self._phases.components = sorted(movers.values(), key=lambda c: roles.index(c.whole.role))
        if not self._is_lone:
            self._hooks.enter_context(hook_pipeline(self._pipeline, HOOK, self))
        for name, component in movers.items():
            for module, hook in hooks_for(component, plan.component(name)):
                install_hook(self._hooks, module, HOOK, hook)
        for name, component in self._components.items():
            if plan.component(name).ahead_bytes:
                layers = self.time_layers[name] = TimeLayers(component, tiers.tier((name, TIME_LAYERS)))
                layers.install(self._hooks)
            is_unseen = (name in movers or bool(plan.component(name).note)) and self._is_unseen(name, plan)
            if name in movers or name in self.time_layers or name in self._not_tried or is_unseen:
                for index, module in enumerate(entries_of(component.component)):
                    install_hook(self._hooks, module, f"{HOOK}_entry", _EntryHook(self, name, index))
                    self._unseen |= {(name, index)} if is_unseen else set()
            if name not in movers:
                component.settle()

    def _is_unseen(self, name: str, plan: OffloadPlan) -> bool:
        """Whether a call is to show what a component needs."""
        given = self.config.activations
        is_given = name in given if isinstance(given, Mapping) else given is not None
        is_wanted = plan.budget_bytes is not None and name not in self.history.needs and not is_given
        return is_wanted and (self.stage.is_real or not plan.component(name).is_known)

    def _undo_plan(self) -> None:
        """Move everything to the host and remove the hooks."""
        self._hooks.close()
        for layers in self.time_layers.values():
            layers.restore()
        self.time_layers = {}
        self._unseen, self._seen = set(), set()
        for component in self._components.values():
            component.unload()
        self._phases.components, self._phases.current = (), None

    def _with(self, component: Component) -> tuple[OffloadPlan, TierPlan]:
        """Plans for another choice of layers that are computed ahead."""
        self._components[component.name].whole = component
        self._sizes = self._measure([c.whole for c in self._components.values()])
        plan = self._plan_for(self.config)
        return plan, self._tiers_for(self.config, plan)

    # ------------------------------------------------------------------------------------------------ runs

    def stats(self) -> OffloadStats:
        """A snapshot of what was done so far."""
        self.stage.count_peak()
        return copy.deepcopy(self.stage.stats)

    @contextlib.contextmanager
    def measure(self) -> Iterator[None]:
        """Measure anew what components need and how long their blocks take, in what is run inside. `replan` plans with
        it; the first run on a GPU is measured so in any case.

        with offloaded.measure():
            pipeline("a warm-up")
        offloaded.replan()
        """
        self.history = replace(self.history, needs={}, narrow=(), timing=None)
        self._unseen = {(n, at) for n, c in self._components.items() for at, _ in enumerate(entries_of(c.component))}
        self._begin_timing()
        yield
        self._unseen = set()
        self._end_timing()

    def _begin_timing(self) -> None:
        for component in self._phases.components:
            if component.whole.role != "encoder":  # Its only call is also that in which kernels are loaded.
                component.timer = Timer(self.stage)

    def _end_timing(self) -> None:
        timing = self.history.timing or self._speeds()
        for name, component in self._components.items():
            if component.timer is not None:
                timing = component.timer.timing(name, timing, self.plan.component(name).decoding_s)
                self.history = replace(self.history, timing=timing)
            component.timer = None

    def start_run(self, run: Run) -> None:
        """Weights may have changed since the last run, and this one may need more memory than was planned for."""
        with self._lock:
            if not self._num_runs:  # Else weights would leave in the middle of another run.
                self._replan_for(run)
                self._phases.begin_run()
                self.stage.note_others()
                if self.stage.is_real and self.history.timing is None and self.config.timing is None:
                    self._begin_timing()
            self._num_runs += 1
            for component in self._components.values():
                component.refresh()

    def end_run(self, run: Run) -> None:
        """Compare what layers were given that were computed ahead, and keep what the run has shown."""
        with self._lock:
            self._num_runs = max(self._num_runs - 1, 0)
            for layers in self.time_layers.values():
                layers.settle()
            if not self._num_runs:
                self._trust_needs(is_over=not run.failed)
                self._note_retries()
                self._learn_of_run()

    def _learn_of_run(self) -> None:
        """Keep what the run has shown."""
        self._end_timing()
        if self._file is not None and self.history != self._written:
            write_history(self._file, self.history)
            self._written = self.history

    def _replan_for(self, run: Run) -> None:
        """Plan again if this run needs more memory than was planned for, takes another number of steps, or if more is
        known by now. A run for which no plan is enough is refused."""
        steps = _steps_of(run.arguments) or _usual_steps(self._pipeline)
        if steps is not None and self.config.steps is None:
            self.history = replace(self.history, steps=steps)
        larger = self._larger_size(run)
        if larger is not None:
            self.replan(**vars(larger))
        elif self._is_outdated():
            self._move_to(self._plan_with_layers(self.config))
        elif self.config.steps is None and steps is not None:
            self._move_to(self._moved(self.plan, steps))

    def _moved(self, plan: OffloadPlan, steps: int) -> OffloadPlan:
        """The plan for a number of steps: this one, or the best once runs have lost as much as it takes to move."""
        best = plan.at(steps)
        self._lost_s += plan.run_s(steps) - best.run_s(steps)
        return best if self._lost_s >= _MOVING_S else replace(plan, steps=steps)

    def _move_to(self, plan: OffloadPlan) -> None:
        """Follow another plan, which takes seconds, if that changes what is done."""
        if _structure(plan) != _structure(self.plan):
            self._follow(plan, self._tiers_for(self.config, plan))
            self._lost_s = 0.0
        self.plan, self._is_timed = plan, self.history.timing is not None

    def _is_outdated(self) -> bool:
        """Whether what runs have shown asks for another plan: what a component needs, or how long its blocks take."""
        needs_are_new = any(not part.is_known and part.name in self.history.needs for part in self.plan.components)
        return needs_are_new or (
            self.plan.budget_bytes is not None and not self._is_timed and self.history.timing is not None
        )

    def _larger_size(self, run: Run) -> RequestSize | None:
        """The size of a run if that needs more memory than was planned for."""
        if self.config.gpu_memory is None or self._activations_for(self.config) is None:
            return None
        planned = self._rehearsed(self.config.size)
        known, asked = _said(planned.size or self.config.size), _said(asked_size(run.arguments))
        if not planned.by_name or not any(value > known.get(name, 0) for name, value in asked.items()):
            return None
        larger = RequestSize(**known | asked)
        try:
            needs = self._rehearsed(larger).by_name
        except SettingError:  # It is one that the pipeline does not take, which it will say itself.
            return None
        return larger if any(needs[name] > planned.by_name.get(name, 0) for name in needs) else None

    # ------------------------------------------------------------------------------------------------ calls

    def _within_budget(self) -> contextlib.AbstractContextManager[None]:
        budget = parse_bytes(self.config.gpu_memory, "gpu_memory")
        return contextlib.nullcontext() if budget is None else self.stage.within(budget)

    def is_inside(self, name: str) -> bool:
        """Whether this thread is calling a component."""
        return name in vars(self._inside)

    def call(self, name: str, entry: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a component within the budget. If it runs out of memory, it is called again in less of it."""
        setattr(self._inside, name, True)
        try:
            self._learn(name, args, kwargs)
            if current_run() is None:
                self.stage.note_others()
            if self.plan.budget_bytes is None:
                return self._called(name, entry, module, args, kwargs)
            before, pressure = _Containers((args, kwargs)), self.stage.pressure()
            for attempt in range(_ATTEMPTS):
                try:
                    output = self._called(name, entry, module, args, kwargs)
                    self._note_pressure(name, pressure)
                    return output
                except torch.OutOfMemoryError as error:
                    problem = str(error)  # The error itself keeps alive what the call had computed.
                is_over = before.have_changed()
                if is_over or attempt + 1 < _ATTEMPTS:
                    self._shrink(name, problem, drops_others=attempt > 0, is_over=is_over)
                if is_over:
                    problem = f"Its arguments were changed before that, so it is not called again. {problem}"
                    break
            raise torch.OutOfMemoryError(self._shortage(name, self.plan, problem))
        finally:
            delattr(self._inside, name)

    def _note_pressure(self, name: str, before: Pressure) -> None:
        """Convolutions that were refused the room that they asked for take other kernels, which round otherwise, and
        cuDNN keeps to them as long as the process runs. What was beside a VAE then leaves before it is called again."""
        planned, now = self.plan.component(name), self.stage.pressure()
        self._retries[name] += now.retries - before.retries
        if now.refusals == before.refusals or planned.role != "vae" or name in self.history.narrow:
            return
        if any(c.held_bytes for c in self._phases.components if c.whole.name != name):
            self._note_need(name, planned.activation_bytes + planned.beside_bytes)
            self._make_room_for(name)
        else:
            self.history = replace(self.history, narrow=(*self.history.narrow, name))
        warnings.warn(f"{name}: {OTHER_KERNELS}.", stacklevel=3)

    def _called(self, name: str, entry: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        layers = self.time_layers.get(name)
        ahead = contextlib.nullcontext() if layers is None else layers.calling(args, kwargs)
        with self._without_gradients(name, module, args, kwargs), self._within_budget(), ahead:
            if (name, entry) in self._unseen:
                return self._watched(name, entry, module, args, kwargs)
            return module(*args, **kwargs)

    def _watched(self, name: str, entry: int, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Call a component that has the card alone, and note what it needs beside its weights."""
        stage = self.stage
        with self._lock:
            self._components[name].load_alone()
        stage.peak_bytes()  # Counts anew from here.
        beside = stage.stats.held_bytes + stage.others_bytes
        output = module(*args, **kwargs)
        self._note_need(name, with_margin(stage.peak_bytes() - beside))
        self._seen.add((name, entry))
        if self._is_lone:
            self._trust_needs()
        return output

    def _note_need(self, name: str, num_bytes: int) -> None:
        """A component was seen to need so much beside its weights."""
        need = max(num_bytes, self.history.needs.get(name, 0))
        self.history = replace(self.history, needs={**self.history.needs, name: need})

    def _trust_needs(self, *, is_over: bool = True) -> None:
        """What was watched is known now, unless the run was cut off. Not before: components may be called in parts, of
        which the first needs least, as VAEs are that decode some frames at a time."""
        names = {name for name, _ in self._seen}
        if is_over:
            self._unseen -= self._seen
        else:
            needs = {name: need for name, need in self.history.needs.items() if name not in names}
            self.history = replace(self.history, needs=needs)
        self._seen = set()
        for name in names - {name for name, _ in self._unseen}:
            self._make_room_for(name)

    def _make_room_for(self, name: str) -> None:
        """From now on others stay beside a component in what it was seen to leave, and no more."""
        with contextlib.suppress(SettingError):  # Too little room, of which the next run will hear.
            self._components[name].beside_bytes = self._plan_for(self.config).component(name).beside_bytes

    def _note_retries(self) -> None:
        """Where torch's allocator has given memory back and taken it again many times, others leave more room."""
        for name, count in self._retries.items():
            planned = self.plan.component(name)
            more = min(self._components[name].beside_bytes, int(planned.activation_bytes * _MORE_ALONE))
            if count > _MAX_RETRIES and more > 0:
                self._note_need(name, self.history.needs.get(name, planned.activation_bytes) + more)
                self._make_room_for(name)
        self._retries.clear()

    def _without_gradients(
        self, name: str, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> contextlib.AbstractContextManager[Any]:
        """Weights that come and go cannot have gradients, so none are computed where nobody wants them."""
        is_wanted = module.training or any(tensor.requires_grad for tensor in nested.tensors((args, kwargs)))
        is_moving = self._components[name] in self._phases.components
        return torch.no_grad() if is_moving and not is_wanted else contextlib.nullcontext()

    def _shrink(self, name: str, problem: str, *, drops_others: bool, is_over: bool) -> None:
        """Follow a plan for less memory, since there was too little although the plan said otherwise: if others have
        taken it, within what is there; else the component needs more than was planned. `is_over`: the call is not made
        again."""
        with self._lock:
            plan, config, history = self.plan, self.config, self.history
            budget, planned = plan.budget_bytes or 0, plan.component(name)
            self._undo_plan()
            gc.collect()
            self.stage.release_unused()
            there, others = self.stage.available_bytes(), self.stage.others_bytes
            little = int(planned.activation_bytes * _MORE) + _MORE_BYTES
            if there is not None and budget + others - there > self.stage.workspace_bytes:
                self.config = replace(config, gpu_memory=there - others)
            else:
                more = planned.beside_bytes if drops_others else min(planned.beside_bytes, little)
                need = planned.activation_bytes + (more or int(planned.activation_bytes * _MORE_ALONE))
                self.history = replace(history, needs={**history.needs, name: need})
            try:
                changed = self._plan_for(self.config)
                tiers = self._tiers_for(self.config, changed)
            except SettingError as refused:
                self.config, self.history = config, history
                message = self._shortage(name, plan, f"{refused} ({problem})")
                self._follow(plan, self.tiers)
                raise torch.OutOfMemoryError(message) from None
            self._follow(changed, tiers)
            then = "Later calls run" if is_over else "It runs again"
            warnings.warn(
                f"{name} ran out of memory within gpu_memory={format_bytes(budget)}. {then} within "
                f"{format_bytes(changed.budget_bytes or 0)}, with less beside it, until replan(gpu_memory=...).",
                stacklevel=2,
            )

    def _shortage(self, name: str, plan: OffloadPlan, problem: str) -> str:
        """What to say of a component that runs out of memory even so."""
        peak, budget = format_bytes(plan.component(name).peak_bytes), format_bytes(plan.budget_bytes or 0)
        free, held = self.stage.free_bytes(), self.stage.stats.held_bytes
        there = "an unknown amount" if free is None else format_bytes(free + held)
        why = f"It needs more, or others have taken memory ({there} of the device is free without our weights)"
        return f"{name} was planned to need {peak} of {budget}, and that was not enough. {why}. {problem}"

    def _learn(self, name: str, args: Any, kwargs: Any) -> None:
        """Look for time-only layers in the first call of a denoiser. If there are any, plan again."""
        if name not in self._not_tried or is_autocast() or not (self.plan.offloads_anything or self.config.precompute):
            return
        with self._lock:
            self._not_tried.discard(name)
            component, self.not_ahead[name] = with_layers_of(self._components[name].whole, args, kwargs)
            if component.time_layers:
                plan, tiers = self._with(component)
                if plan.computes_ahead:
                    self._follow(plan, tiers)


class _Containers:
    """The lists and dictionaries of a call, and what was in them, which is not kept alive: a VAE of videos replaces the
    features of earlier frames in a list that it is given, and to keep the old ones would take their memory again."""

    def __init__(self, value: Any) -> None:
        self._before: list[tuple[Any, list[Any]]] = []
        self._note(value)

    def _note(self, value: Any) -> None:
        if type(value) in (list, dict):
            refs = [weakref.ref(part) if isinstance(part, torch.Tensor) else part for part in _parts_of(value)]
            self._before.append((value, refs))
        if type(value) in (list, dict, tuple):
            for part in _parts_of(value):
                self._note(part)

    def have_changed(self) -> bool:
        now = ((_parts_of(container), refs) for container, refs in self._before)
        return any(len(parts) != len(refs) or not all(map(_is_still, parts, refs)) for parts, refs in now)


def _parts_of(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _is_still(part: Any, before: Any) -> bool:
    return part is (before() if isinstance(before, weakref.ref) else before)


class _EntryHook(ModelHook):
    """Calls a component within its budget."""

    order = HookOrder.OUTERMOST

    def __init__(self, offloaded: Offloaded, name: str, entry: int) -> None:
        self._offloaded, self._name, self._entry = offloaded, name, entry

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._offloaded.is_inside(self._name):
            return NOT_BYPASSED
        return self._offloaded.call(self._name, self._entry, module, args, kwargs)


def _structure(plan: OffloadPlan) -> list[Any]:
    """What is to be done anew if it changes."""
    return [(part.placement, part.streamed, part.ring_bytes, part.ahead_bytes) for part in plan.components]


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


def _steps_of(arguments: Mapping[str, Any]) -> int | None:
    """The steps of a call, as far as its arguments say."""
    for value in map(arguments.get, _STEPS[::-1]):
        if isinstance(value, (int, list, tuple)) and not isinstance(value, bool):
            return value if isinstance(value, int) else len(value)
    return None


def _usual_steps(pipeline: Any) -> int | None:
    """The steps of a call that does not say: the default of the pipeline, or those that its scheduler is set to."""
    call = type(pipeline).__dict__.get("__call__") or getattr(type(pipeline), "__call__", None)  # noqa: B004
    if call is not None and not isinstance(pipeline, torch.nn.Module):
        default = inspect.signature(call).parameters.get(_STEPS[0])
        if default is not None and isinstance(default.default, int):
            return default.default
    timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
    return len(timesteps) if isinstance(timesteps, torch.Tensor) else None


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
