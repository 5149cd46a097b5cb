"""How is a pipeline offloaded, and how does it come back? `apply_offload(pipeline, OffloadConfig(...))`.

Everything is planned and checked before anything is moved, and whatever fails half-way is undone. What comes back
is an `Offloaded`: its plan, what it did so far, and the way back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import SettingError
from ..hooks import HookRegistry, PipelineHook, Run, hook_pipeline
from ..other_libraries import accelerate_hook, diffusers_hooks
from .cuda import CudaStage
from .host import HostMemory
from .layerwise import check_compiled
from .measure import Measured, Meter
from .model_level import HOOK, Tenant, Turns, install_hooks
from .parcels import Parcel
from .planner import ComponentPlan, Mode, OffloadPlan, plan_offload
from .sizes import SHARED, Component, find_components, format_bytes, measure_components, parse_bytes
from .staging import HostStage, Stage
from .streaming import Timing
from .weights import check_movable

_UNLIMITED = 2**62


@dataclass(frozen=True)
class OffloadConfig:
    """What is wished for. Sizes are bytes or text such as "12GiB"."""

    mode: Mode = "auto"
    """"auto": as little as `gpu_memory` demands. "model": denoisers and encoders take turns. "layerwise": their blocks
    stream."""
    gpu_memory: str | int | None = None
    """The most that may be used on the device; for "auto", all that is free there if nothing is said."""
    device: str | torch.device | None = None
    """Where the pipeline computes; a GPU if there is one. On "cpu" the host's memory plays the device."""
    activations: str | int | Mapping[str, str | int] | None = None
    """What a component needs beside its weights, for all or by name; see `measure`."""
    host_memory: str | int | None = None
    """The most that may be pinned on the host; most of its memory if nothing is said."""
    exclude: tuple[str, ...] = ()
    """Components that are left alone, wherever they are."""
    timing: Timing | None = None
    """What is known of bus and model; the bus is measured if nothing is."""
    skipped: float = 0.0
    """The share of the denoisers' forwards that a cache is expected to skip: these load nothing."""


@dataclass(frozen=True)
class OffloadStats:
    """What an offloaded pipeline did so far."""

    sent_bytes: int
    """Bytes of weights that were copied to the device."""
    block_loads: int
    late_blocks: int
    """Blocks that were not on their way when they were called."""
    dropped_blocks: int
    """Blocks that were sent ahead and not used."""
    entries: Mapping[str, int]
    """How often each component came in."""
    held_bytes: int
    """What our copies take on the device now."""
    most_held_bytes: int
    pinned_bytes: int
    pageable_bytes: int
    copied_bytes: int
    """What was copied on the host to be pinned; the rest is pinned where it lies."""
    setup_s: float

    def __str__(self) -> str:
        sent, held = format_bytes(self.sent_bytes), format_bytes(self.most_held_bytes)
        late = f", {self.late_blocks} of them late" if self.late_blocks else ""
        return (
            f"{sent} sent in {self.block_loads} block loads{late}; at most {held} of weights on the device; "
            f"{self.setup_s:.1f} s to set up"
        )


def apply_offload(pipeline: Any, config: OffloadConfig | None = None, *, stage: Stage | None = None) -> Offloaded:
    """Offload a pipeline, or a single model, as the configuration says. `stage` is for those who bring their own."""
    offloaded = prepare_offload(pipeline, config, stage=stage)
    offloaded.start()
    return offloaded


def prepare_offload(pipeline: Any, config: OffloadConfig | None = None, *, stage: Stage | None = None) -> Offloaded:
    """The same up to where it would change anything: all is checked and planned, and `start` does it."""
    config = config or OffloadConfig()
    started = time.perf_counter()
    stage = stage or _stage_for(config.device)
    components, shared = find_components(pipeline, config.exclude)
    _check_free(components)
    for component in components:
        check_movable(component.name, component.module)
        for path, block in component.blocks.items():
            check_compiled(f"{component.name}.{path}", block)
        check_compiled(component.name, component.module)
    offloaded = Offloaded(pipeline, config, stage, components, shared)
    offloaded._plan = offloaded._plan_for(config)
    offloaded._setup_s = time.perf_counter() - started
    return offloaded


def _check_free(components: Sequence[Component]) -> None:
    """Refuse what somebody else moves already."""
    for component in components:
        for path, module in component.module.named_modules():
            where = f"{component.name}.{path}".rstrip(".")
            if HOOK in HookRegistry.get_or_create(module):
                raise SettingError(
                    f"{where} is offloaded already. Call remove() on what apply_offload returned before."
                )
            theirs = diffusers_hooks(module)
            if accelerate_hook(module) is not None or any("group_offloading" in name for name in theirs):
                raise SettingError(
                    f"{where} is offloaded by accelerate or diffusers. Load the pipeline anew, or take their hooks off "
                    "first (pipeline.remove_all_hooks())."
                )


def _stage_for(device: str | torch.device | None) -> Stage:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise SettingError(f"{device!r} is no device. Give cuda, cuda:1 for the second GPU, or cpu.") from error
    if where.type not in ("cuda", "cpu"):
        raise SettingError(f"Offload to {where.type!r} is not supported: cuda or cpu was expected.")
    return CudaStage(where) if where.type == "cuda" else HostStage()


class Offloaded(PipelineHook):
    """A pipeline whose weights come and go."""

    def __init__(
        self,
        pipeline: Any,
        config: OffloadConfig,
        stage: Stage,
        components: list[Component],
        shared: list[torch.Tensor],
    ) -> None:
        self.config, self.stage, self.execution_device = config, stage, stage.device
        self._pipeline, self._components, self._shared = pipeline, components, shared
        self._sizes = measure_components(components, shared, in_phase=stage.keeps_phase)
        limit = None if config.host_memory is None else parse_bytes(config.host_memory, "host_memory")
        self._host = HostMemory(stage, limit)
        self._homes = {c.name: _home(c) for c in components}
        self._plan: OffloadPlan | None = None
        self._tenants: dict[str, Tenant] = {}
        self._settled: dict[str, Parcel] = {}
        self._hooks = contextlib.ExitStack()
        self._turns: Turns | None = None
        self._setup_s = 0.0

    @property
    def plan(self) -> OffloadPlan:
        """Where everything is."""
        assert self._plan is not None
        return self._plan

    def start(self) -> None:
        """Follow the plan: weights go where it says. What fails half-way is undone."""
        started = time.perf_counter()
        with contextlib.ExitStack() as undo:
            undo.callback(self.remove)
            self._follow(self.plan)
            undo.pop_all()
        self._setup_s += time.perf_counter() - started

    def stats(self) -> OffloadStats:
        """What was done so far."""
        rings = [tenant.ring_stats for tenant in self._tenants.values()]
        return OffloadStats(
            sent_bytes=self.stage.stats.sent_bytes,
            block_loads=sum(ring.loads for ring in rings),
            late_blocks=sum(ring.late for ring in rings),
            dropped_blocks=sum(ring.dropped for ring in rings),
            entries={name: tenant.entries for name, tenant in self._tenants.items()},
            held_bytes=self.stage.stats.held_bytes,
            most_held_bytes=self.stage.stats.most_held_bytes,
            pinned_bytes=self._host.stats.pinned_bytes,
            pageable_bytes=self._host.stats.pageable_bytes,
            copied_bytes=self._host.stats.copied_bytes,
            setup_s=self._setup_s,
        )

    def blocks_on_device(self) -> list[str]:
        """The streamed blocks that are on the device, or on their way."""
        return [name for tenant in self._tenants.values() if tenant.stream for name in tenant.stream.on_device]

    def replan(self, **changes: Any) -> OffloadPlan:
        """Follow another wish: fields of `OffloadConfig` by name. Weights that are pinned stay so."""
        config = replace(self.config, **changes)
        plan = self._plan_for(config)
        self._follow(plan)
        self.config = config
        return plan

    @contextlib.contextmanager
    def measure(self) -> Iterator[Measured]:
        """Run the pipeline inside, once, to learn what its components need and how long its blocks take.

        with offloaded.measure() as measured:
            pipeline("a warm-up")
        offloaded.replan(activations=measured.activations, timing=measured.timing)
        """
        meter = Meter(self.stage, self._components)
        measured = Measured()
        with meter.attached():
            yield measured
        meter.read_into(measured)

    def bring_in(self, name: str) -> None:
        """Bring a component in now, rather than when it is called."""
        if name not in self._tenants:
            self.plan.component(name)  # Refuses a name that it does not know; any other stays where it is.
        elif self._turns is not None:
            self._turns.enter(self._tenants[name])

    def release(self) -> None:
        """Send off all that takes turns, as at the end of a run."""
        for name, tenant in self._tenants.items():
            if self.plan.take_turns and self.plan.component(name).placement != "resident":
                tenant.go_off()

    def remove(self) -> None:
        """Take everything off again: the modules lie where they were, with the weights that they have now."""
        self._undo_plan()
        for component in self._components:
            self._send_home(component)
        self._host.close()

    # ------------------------------------------------------------------------------------------------ a run

    def start_run(self, run: Run) -> None:
        """Weights may have changed since the last run."""
        for parcel in self._settled.values():
            parcel.resettle()
        for tenant in self._tenants.values():
            tenant.refresh()

    def end_run(self, run: Run) -> None:
        """Between runs the one true copy is that on the host."""
        self.release()

    # ------------------------------------------------------------------------------------------------ plans

    def _plan_for(self, config: OffloadConfig) -> OffloadPlan:
        budget = None if config.gpu_memory is None else parse_bytes(config.gpu_memory, "gpu_memory")
        if budget is None and config.mode == "auto":
            budget = self._all_memory()
        timing = config.timing or Timing(bus_bytes_s=self.stage.measure_bus())
        return plan_offload(
            self._sizes,
            mode=config.mode,
            gpu_memory=budget,
            activations=_read_activations(config.activations),
            timing=timing,
            skipped=config.skipped,
        )

    def _all_memory(self) -> int:
        """What the device has for us: what is free, and what our components have of it already."""
        free = self.stage.free_bytes()
        here = [t for c in self._components for t in c.everything() if self.stage.is_here(t)]
        return _UNLIMITED if free is None else free + sum(t.numel() * t.element_size() for t in here)

    def _follow(self, plan: OffloadPlan) -> None:
        self._undo_plan()
        with contextlib.ExitStack() as undo:
            undo.callback(self._undo_plan)
            for component in self._components:
                self._place(component, plan.component(component.name))
            if self._shared:
                self._settle(SHARED, Parcel(SHARED, lambda: self._shared, self.stage, self._host))
            self._hook(plan)
            for name, tenant in self._tenants.items():
                if not plan.take_turns or plan.component(name).placement == "resident":
                    tenant.come_in()
            undo.pop_all()
        self._plan = plan

    def _place(self, component: Component, plan: ComponentPlan) -> None:
        tenant = self._tenants.get(component.name)
        if plan.placement == "resident" and tenant is None:
            self._settle(component.name, Parcel(component.name, component.everything, self.stage, self._host))
            return
        if tenant is None:
            tenant = self._tenants[component.name] = Tenant(component, self.stage, self._host)
        tenant.adopt(plan)

    def _settle(self, name: str, parcel: Parcel) -> None:
        self._settled[name] = parcel
        parcel.resettle()

    def _hook(self, plan: OffloadPlan) -> None:
        active = {n: tenant for n, tenant in self._tenants.items() if plan.component(n).placement != "resident"}
        turns = self._turns = Turns(list(active.values()))
        for name, tenant in active.items():
            self._hooks.enter_context(install_hooks(tenant, turns, self.stage, plan.component(name)))
        is_component = any(component.module is self._pipeline for component in self._components)
        if not is_component:  # A lone model is called once a step: its calls are no runs.
            self._hooks.enter_context(hook_pipeline(self._pipeline, HOOK, self))

    def _undo_plan(self) -> None:
        """Everything to the host, and no hooks."""
        self._hooks.close()
        for tenant in self._tenants.values():
            tenant.go_off(keep_changes=True)
        for parcel in self._settled.values():
            parcel.unsettle()
        self._settled = {}

    def _send_home(self, component: Component) -> None:
        home = self._homes[component.name]
        if home.type == "cpu" and component.name in self._tenants:
            self._tenants[component.name].give_back()
        for tensor in component.everything():
            if tensor.device != home:
                tensor.data = tensor.data.to(home)


def _home(component: Component) -> torch.device:
    return next((tensor.device for tensor in component.everything()), torch.device("cpu"))


def _read_activations(given: str | int | Mapping[str, str | int] | None) -> int | dict[str, int] | None:
    if given is None or isinstance(given, (str, int)):
        return None if given is None else parse_bytes(given, "activations")
    return {name: parse_bytes(value, f"activations of {name}") for name, value in given.items()}
