"""Weights that come and go: hooks load them when a component is called, and make room for it.

A component has many entry points: `forward`, but also `decode`, `encode`, `get_text_features` or `generate`, and a
pipeline may even call one of its layers. So there are hooks on the component, on each of its blocks, and on every other
module in it that holds weights. The first one called begins the component's phase: others leave as far as it needs
room, and what is missing of it is loaded.

The hook of a streamed block brings its weights in for the call. Between calls they are on the host, so `state_dict`,
adapters and everything else that looks at them outside a call sees the one true copy. A block that is bypassed, by a
cache for instance, moves nothing.

Weights move while they are called, so one call at a time: the hooks hold a lock from the start of a call to its end.
Other threads wait, and may load another component between two calls of this one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.errors import SettingError
from ..core.tensor_parts import plainly, take_apart
from ..hooks import HookOrder, ModelHook, Run, current_run
from .coded import CodedFile
from .host import HostMemory, move
from .planner import ComponentPlan
from .ring import Ring
from .sizes import Component
from .staging import Stage
from .tiers import TIME_LAYERS, TierPlan
from .weight_groups import WeightGroup
from .weights import TensorFinder, cast_for_calls, held_by, owners_of, spans_of, tensors_of

HOOK = "samovar_offload"
"""The name of our hooks."""


class OffloadedComponent:
    """A component whose weights are on the device always, while it is used, or block by block, as planned."""

    def __init__(self, component: Component, stage: Stage, host: HostMemory, lock: threading.RLock) -> None:
        self.whole = self.component = component
        """`component` is without its time-only layers, if they are computed ahead."""
        self.stage, self.lock = stage, lock
        self.ring: Ring | None = None
        self.others: Sequence[OffloadedComponent] = ()
        """Components that leave when this one needs room, the one that is needed last first."""
        self.has_neighbours = False
        """Whether one of its parts may be called while it is not loaded, or has no room."""
        self.held_bytes = 0
        """Device memory of its weights, if they have a host copy."""
        self.is_loaded = False
        self._is_moving = False
        """Whether weights are coming or going, or an interrupt cut that off."""
        self._is_pinned = self._is_coded = self._in_groups = False
        self._beside_bytes = 0
        self._host = host
        self._last_run: weakref.ref[Run] | None = None
        self._home = next((tensor.device for tensor in component.tensors()), torch.device("cpu"))
        rest = WeightGroup(component.name, lambda: self.component.rest(), stage, host)
        self.blocks = {
            path: WeightGroup(
                f"{component.name}.{path}",
                TensorFinder(block, self._skipped),
                stage,
                host,
                partial(cast_for_calls, block),
            )
            for path, block in component.blocks.items()
        }
        self._groups = [rest, *self.blocks.values()]
        self._kept: list[WeightGroup] = []

    def _skipped(self) -> frozenset[int]:
        return self.component.skip

    def anonymous_bytes(self, block: str) -> int:
        """Bytes of a block, or of what is outside the blocks, that are in memory alone."""
        if block == TIME_LAYERS:
            return self._host.anonymous_bytes(tensors_of(torch.nn.ModuleList(self.whole.time_layers.values())))
        return (self.blocks[block] if block else self._groups[0]).anonymous_bytes()

    def follow(self, plan: ComponentPlan, tiers: TierPlan, *, cache: Path | None = None) -> None:
        """Decide what stays while the component is loaded and what streams, and pin it unless it is resident or in
        another tier. `cache` is a folder that keeps what was coded."""
        assert not self.held_bytes
        self._is_coded, self._in_groups, self._beside_bytes = plan.is_coded, plan.in_groups, plan.beside_bytes
        file = CodedFile(cache / f"{plan.name}.coded") if plan.is_coded and cache is not None else None
        self.component = self.whole.with_layers_ahead if plan.ahead_bytes else self.whole
        if plan.placement != "resident":
            self._is_pinned = True
            self.stage.stats.component_loads.setdefault(plan.name, 0)
        streamed = [group for path, group in self.blocks.items() if path in plan.streamed]
        with self._host.adopting():
            for path, group in zip(("", *self.blocks), self._groups, strict=True):
                group.tier = tiers.tier((plan.name, path))
                is_coded = plan.is_coded and group in streamed and (plan.name, path) not in tiers.plain
                group.keeps_host, group.is_coded = self._is_pinned, is_coded
                group.file = file
                if self._is_pinned:
                    group.update()
                group.file = None  # Only what comes with the model is kept.
        if file is not None:
            file.close()
        self._host.pin(wire for group in self._groups for wire in group.wires)
        self._kept = [group for group in self._groups if group not in streamed]
        is_repeated = self.component.role == "denoiser"  # An encoder runs once, so nothing is sent ahead.
        self.ring = None
        if streamed:
            has_next_pass = lambda: is_repeated and current_run() is not None  # noqa: E731
            self.ring = Ring(self.stage, plan.ring_bytes, streamed, has_next_pass=has_next_pass)

    def enter(self) -> None:
        """It is called: have others leave that are in its way, and load what is missing.

        What torch's allocator holds in reserve for those that leave is given back: which kernels compute a convolution
        depends on how much is free.
        """
        excess = sum(other.held_bytes for other in self.others) - self._beside_bytes
        if excess > 0:
            for other in self.others:
                excess -= other.shrink(max(excess, 0))
            self.stage.release_unused()
        if not self.is_loaded:
            for other in self.others if self.ring is not None else ():
                other.close_ring()  # There is one area where compressed weights arrive.
            self.load()

    def load(self) -> None:
        """Bring in what is missing of what stays while it is loaded, and allocate the ring. If that fails, everything
        is off again."""
        if self.is_loaded:
            return
        if self._is_moving:
            self.unload()
        self._is_moving = True
        try:
            missing = [group for group in self._kept if not group.is_loaded]
            for group in missing:
                group.prepare()
            copies = [copy.data.numel() for group in self._groups for copy in group.copies if copy is not None]
            if self.ring is not None and self.ring.memory is None:
                if self._is_coded:
                    self.stage.open_area(max(copies, default=0))
                self.stage.in_groups = self._in_groups
            for group in missing:
                group.load()
            if self.ring is not None:
                self.ring.open()
            self.stage.compute_waits(self.stage.mark_copied())
            for group in missing if self._is_pinned else ():
                group.note_loaded()
        except BaseException:
            self.unload()
            raise
        self._count_held()
        self._is_moving, self.is_loaded = False, True
        if self._is_pinned:
            self.stage.stats.component_loads[self.component.name] += bool(missing)

    def _count_held(self) -> None:
        ring = 0 if self.ring is None or self.ring.memory is None else self.ring.memory.flat.numel()
        kept = sum(group.held_bytes for group in self._kept) if self._is_pinned else 0
        self.held_bytes = kept + ring + (self.stage.area_bytes if ring and self._is_coded else 0)

    def unload(self) -> None:
        """Drop the device copies. Nothing is copied back but what was changed on the device."""
        self.shrink(None)

    def shrink(self, num_bytes: int | None) -> int:
        """Drop the ring and as many device copies, from the last one on, as free so many bytes; None for all. How many
        bytes that has freed."""
        loaded = [group for group in self._kept if group.is_loaded]
        leaving, left = [], num_bytes
        ring = 0 if self.ring is None or self.ring.memory is None else self.ring.memory.flat.numel()
        for group in reversed(loaded):
            if left is None or left > ring:
                leaving.append(group)
                left = None if left is None else left - group.held_bytes
        before = self.held_bytes
        self.close_ring()
        self._keep_changes(leaving)
        self._is_moving, self.is_loaded = True, False
        for group in leaving:
            group.unload()
        self._count_held()
        self._is_moving = False
        return before - self.held_bytes

    def close_ring(self) -> None:
        """Free the ring and the area where compressed weights arrive."""
        if self.ring is not None:
            self.is_loaded = False
            for group in self._groups:
                group.use_host()  # If its call is not over.
                group.forget_views()
            has_area = self._is_coded and self.ring.memory is not None
            self.ring.close()
            if has_area:
                self.stage.close_area()
            self._count_held()

    def _keep_changes(self, groups: Sequence[WeightGroup]) -> None:
        """Copy back what was changed on the device, in one wait for all."""
        known = [(group, group.loaded_sum) for group in groups if group.loaded_sum is not None]
        if known:
            before = torch.stack([loaded_sum for _, loaded_sum in known])
            is_changed = before != torch.stack([group.checksum() for group, _ in known])
            for (group, _), is_other in zip(known, is_changed.tolist(), strict=True):
                if is_other:
                    group.keep_changes()

    def restore(self) -> None:
        """Put the weights where they were before."""
        for group in self._groups if self._home.type == "cpu" else ():
            group.restore()
        self._go_home()

    @plainly
    def _go_home(self) -> None:
        plain, wrappers, _ = take_apart(held_by(self.whole.module, self.whole.skip))
        for span in spans_of(tensor for tensor in plain if tensor.device != self._home):
            move(span, torch.empty(span.num_bytes, dtype=torch.uint8, device=self._home))
        for wrapper in wrappers:
            wrapper.follow()

    def refresh(self) -> None:
        """Reload weights that stay on the device if an adapter, or anybody else, has changed them."""
        if not all(group.is_current() for group in self._kept if group.is_loaded):
            was_loaded = self.is_loaded
            self.unload()
            if was_loaded:
                self.load()

    def begin_pass(self) -> None:
        """The component is called. Weights sent ahead in another run may be out of date."""
        if self.ring is not None:
            if self.ring.is_interrupted:
                for group in self._groups:
                    group.use_host()
                self.ring.drop()
            run = current_run()
            if run is None or self._last_run is None or self._last_run() is not run:
                self.ring.drop()
                self._last_run = None if run is None else weakref.ref(run)
            self.ring.begin_pass()


class LoadHook(ModelHook):
    """Loads its component, and holds the lock while it is called."""

    order = HookOrder.OFFLOAD
    may_be_left_out = True  # The component's own hook has loaded it.

    def __init__(self, component: OffloadedComponent) -> None:
        self._component, self._stage = component, component.stage
        self._is_detached = False

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._is_detached = True
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        lock = self._component.lock
        lock.acquire()
        try:
            if self._is_detached:
                raise SettingError(
                    f"The offload of {self._component.component.name} was changed or taken off while another thread "
                    "was about to call it. Wait for running calls to end before you do so."
                )
            self._stage.begin_call()
            self._component.enter()
            return self._begin(args, kwargs)
        except BaseException:
            try:
                self._fail()
            finally:
                lock.release()
            raise

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._end()
        self._component.lock.release()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        # Also if `_end` raised: the lock is released last, and once.
        try:
            self._fail()
        finally:
            self._component.lock.release()

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._stage.to_device(args), self._stage.to_device(kwargs)

    def _end(self) -> None:
        """The call returns."""

    def _fail(self) -> None:
        """The call raised."""


class PassHook(LoadHook):
    """The same on the component itself, whose calls are passes through the blocks."""

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._component.begin_pass()
        return super()._begin(args, kwargs)

    def _end(self) -> None:
        if self._component.ring is not None:
            self._component.ring.end_pass()

    def _fail(self) -> None:
        if self._component.ring is not None:
            self._component.ring.drop()


class StreamHook(LoadHook):
    """Brings a block's weights in before its call and lets them go after it."""

    may_be_left_out = False

    def __init__(self, component: OffloadedComponent, ring: Ring, block: WeightGroup) -> None:
        super().__init__(component)
        self._ring, self._block = ring, block

    def _begin(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._stage.check_call()
        offsets = self._ring.acquire(self._block)
        self._block.use_device(offsets, self._ring.memory)
        return args, kwargs

    def _end(self) -> None:
        self._block.use_host()
        self._ring.release()

    def _fail(self) -> None:
        self._block.use_host()
        self._ring.drop()


def hooks_for(offloaded: OffloadedComponent, plan: ComponentPlan) -> Iterator[tuple[torch.nn.Module, ModelHook]]:
    """The hooks of a component, with the modules that they go on."""
    component = offloaded.component
    parts_load = offloaded.has_neighbours
    yield component.module, PassHook(offloaded)
    for path, block in component.blocks.items():
        if path in plan.streamed and offloaded.ring is not None:
            yield block, StreamHook(offloaded, offloaded.ring, offloaded.blocks[path])
        elif parts_load:
            yield block, LoadHook(offloaded)
    for owner in owners_of(component.module, component.skip_with_blocks) if parts_load else ():
        if owner is not component.module:
            yield owner, LoadHook(offloaded)
