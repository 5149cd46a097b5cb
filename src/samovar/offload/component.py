"""A component whose weights come and go as planned, and the phases in which components take the budget in turns.

What stays while a component is called has device memory of its own, what streams passes through a ring. When another
component is called, a phase begins: what is on the device leaves as far as the new phase needs the room, and no
further, those first that are needed last. What is missing of the component that is called comes in the order in which
its blocks are called, while the blocks before them compute.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ..core.tensor_parts import plainly, take_apart
from ..hooks import Run, current_run
from .device import Buffer, Stage
from .host_tiers import TIME_LAYERS, TierPlan
from .layout import held_by, move, move_to_host, spans_of, tensors_of
from .measured import Timer
from .pinned import HostMemory
from .planner import ComponentPlan
from .ring import Ring, StreamedBlock
from .sizes import Component
from .weight_group import WeightGroup


class Phases:
    """Which component has the device, and in which order they are called."""

    def __init__(self) -> None:
        self.components: Sequence[OffloadedComponent] = ()
        """Those that come and go."""
        self.current: OffloadedComponent | None = None
        self.calls: list[tuple[OffloadedComponent, int]] = []
        """Of this run: components, each with how often it was called in a row."""
        self._usual: list[tuple[OffloadedComponent, int]] = []
        """Those of the last run."""

    def begin_run(self) -> None:
        """A run begins."""
        self._usual, self.calls = self.calls or self._usual, []

    def change_to(self, component: OffloadedComponent) -> None:
        """A component is called: have others leave that are in its way."""
        self.current = None
        others = [other for other in self.components if other is not component and not other.is_busy]
        for other in others:
            other.close_ring()
        excess = sum(other.held_bytes for other in others) - component.beside_bytes
        for other in sorted(others, key=self._distance(component), reverse=True):
            excess -= other.shrink(excess) if excess > 0 else 0
        self.current = component

    def _distance(self, component: OffloadedComponent) -> Callable[[OffloadedComponent], int]:
        """How far off the next call of others is."""
        order = [*dict.fromkeys(part for part, _ in (*self._usual, *self.calls)), *self.components]
        start = order.index(component)
        return lambda other: (order.index(other) - start) % len(order)

    def note_call(self, component: OffloadedComponent) -> OffloadedComponent | None:
        """A component is called as a whole; returns the one that will follow this call, if that is known."""
        count = self.calls[-1][1] + 1 if self.calls and self.calls[-1][0] is component else 1
        self.calls[-1 if count > 1 else len(self.calls) :] = [(component, count)]
        at = len(self.calls) - 1
        is_last = at + 1 < len(self._usual) and self._usual[at] == (component, count)
        return self._usual[at + 1][0] if is_last else None


class OffloadedComponent:
    """A component whose weights are on the device always, while it is called, or block by block, as planned."""

    def __init__(
        self, component: Component, stage: Stage, host: HostMemory, lock: threading.RLock, phases: Phases
    ) -> None:
        self.whole = self.component = component
        """`component` is without its time-only layers, if they are computed ahead."""
        self.stage, self.lock, self.phases = stage, lock, phases
        self.beside_bytes = 0
        """Device memory that others may keep while it is called."""
        self.ring: Ring | None = None
        self.calls = 0
        """How many calls of it as a whole are running."""
        self.timer: Timer | None = None
        self.host = host
        self._home = next((tensor.device for tensor in component.tensors()), torch.device("cpu"))
        outside = lambda: self.component.skip_with_blocks  # noqa: E731
        self.rest = WeightGroup(component.module, stage, host, outside)
        self.blocks = {
            path: WeightGroup(block, stage, host, lambda: self.component.skip)
            for path, block in component.blocks.items()
        }
        self._groups = [self.rest, *self.blocks.values()]
        self._kept: list[WeightGroup] = []
        """What stays while it is called, in the order in which that is needed."""
        self._missing: deque[WeightGroup] = deque()
        """What of it is not on its way yet."""
        self._is_coded = self._is_ready = self._lends_all = False
        self._last_run: weakref.ref[Run] | None = None
        self._settled: list[Buffer] = []
        """Device memory of weights that stay for good."""

    # ------------------------------------------------------------------------------------------------ plans

    def anonymous_bytes(self, block: str) -> int:
        """Bytes of a block, or of what is outside the blocks, that are in memory alone."""
        if block == TIME_LAYERS:
            return self.host.anonymous_bytes(tensors_of(torch.nn.ModuleList(self.whole.time_layers.values())))
        return (self.blocks[block] if block else self.rest).anonymous_bytes()

    def follow(self, plan: ComponentPlan, tiers: TierPlan, *, graphs: bool) -> None:
        """Decide what stays while the component is called and what streams, and bring the host copy in order.
        `graphs`: whether its forwards are recorded."""
        self.component = self.whole.with_layers_ahead if plan.ahead_bytes else self.whole
        self._kept, self._missing, self.ring = [], deque(), None
        if plan.placement == "resident":
            return
        self.beside_bytes, self._is_coded = plan.beside_bytes, plan.is_coded
        self.stage.stats.component_loads.setdefault(plan.name, 0)
        with self.host.adopting():
            for path, group in zip(("", *self.blocks), self._groups, strict=True):
                key = plan.name, path
                group.tier = tiers.tier(key)
                group.is_coded = key in tiers.coded
                group.prepare()
        streamed = [group for path, group in self.blocks.items() if path in plan.streamed]
        self._kept = [group for group in self._groups if group not in streamed]
        self._lends_all = graphs and not streamed
        is_repeated = plan.role != "encoder"  # An encoder is called once, so nothing is sent ahead.
        if streamed:
            has_next_pass = lambda: is_repeated and current_run() is not None  # noqa: E731
            before = self._send_before
            self.ring = Ring(self.stage, plan.ring_bytes, streamed, has_next_pass=has_next_pass, before=before)

    @plainly
    def settle(self) -> None:
        """Move to the device for good what is not there yet."""
        plain, wrappers = take_apart(held_by(self.component.module, self.component.skip))
        elsewhere = [tensor for tensor in plain if not self.stage.is_here(tensor)]
        self.host.note_phases(elsewhere)
        for span in spans_of(elsewhere):
            phase = span.phase if self.stage.keeps_phase or span.needs_phase else 0
            memory = self.stage.allocate(phase + span.num_bytes)
            self._settled.append(memory)
            move(span, memory.flat[phase:])
        for wrapper in wrappers:
            wrapper.follow()

    def restore(self) -> None:
        """Put the weights where they were before."""
        self.unload()
        for group in self._groups if self._home.type == "cpu" else ():
            group.restore()
        self._go_home()

    @plainly
    def _go_home(self) -> None:
        plain, wrappers = take_apart(held_by(self.whole.module, self.whole.skip))
        is_host = self._home.type == "cpu"
        for span in spans_of(t for t in plain if t.device != self._home or (is_host and self.stage.is_here(t))):
            if is_host:
                move_to_host(span, self.host.phase_before(span))
            else:
                move(span, torch.empty(span.num_bytes, dtype=torch.uint8, device=self._home))
        for wrapper in wrappers:
            wrapper.follow()
        settled, self._settled = self._settled, []
        for memory in settled:
            self.stage.free(memory)

    def refresh(self) -> None:
        """A run begins: weights may have changed in a way that torch does not count."""
        for group in self._groups:
            group.is_due = True
        if self._settled:
            self.settle()

    # ------------------------------------------------------------------------------------------------ on the device

    @property
    def held_bytes(self) -> int:
        """Device memory of its weights while it comes and goes."""
        ring = 0 if self.ring is None or self.ring.memory is None else self.ring.memory.num_bytes
        area = self.stage.area_bytes if ring and self._is_coded else 0
        return ring + area + sum(group.held_bytes for group in self._kept)

    @property
    def is_busy(self) -> bool:
        """Whether a call of it is running."""
        return self.calls > 0 or any(group.is_lent for group in self._groups)

    def enter(self) -> None:
        """It, or a part of it, is called."""
        if self.phases.current is not self:
            self.phases.change_to(self)
        if not self._is_ready:
            self._begin_phase()

    def _begin_phase(self) -> None:
        """Open the ring, and begin to send what is missing of what stays. If that fails, everything is off again."""
        try:
            if self.ring is not None and self.ring.memory is None:
                if self._is_coded:
                    self.stage.open_area(max(group.largest_coded for group in self._groups))
                self.ring.open()
            self._missing = deque(group for group in self._kept if not group.is_sent)
            self.stage.stats.component_loads[self.component.name] += bool(self._missing)
            if not self.rest.is_sent:
                self.rest.load()
            if self.ring is None:
                self._send_before(None)
        except BaseException:
            self.unload()
            raise
        self._is_ready = True

    def load_alone(self) -> None:
        """Have all of it on the device, and nothing else."""
        if self not in self.phases.components:
            return
        self.enter()
        for other in self.phases.components:
            if other is not self and not other.is_busy:
                other.unload()
        self._send_before(None)

    def _send_before(self, block: StreamedBlock | None) -> None:
        """Send what is missing of what is called before a block, or all of it."""
        if not self._missing:
            return
        order = {id(group): at for at, group in enumerate(self._groups)}
        end = len(order) if block is None else order[id(block)]
        while self._missing and order[id(self._missing[0])] < end:
            if not self._missing[0].is_sent:
                self._missing[0].load()
            self._missing.popleft()

    def lend(self, group: WeightGroup) -> bool:
        """Point the tensors of a part that stays at the device. False if they are already."""
        if group.is_lent:
            return False
        if not group.is_fresh():
            group.load()
        group.lend_own()
        return True

    def lend_whole(self) -> list[WeightGroup]:
        """Lend what is outside the blocks, and the blocks too if a graph may replay them. Those that were not yet."""
        return [group for group in (self._kept if self._lends_all else [self.rest]) if self.lend(group)]

    def room_beside(self) -> int:
        """Device memory that others may still take while it is called."""
        others = (other for other in self.phases.components if other is not self)
        return self.beside_bytes - sum(other.held_bytes for other in others)

    def reserve(self, room: int) -> None:
        """Allocate memory for what is missing, as far as there is room: it will be called next."""
        for group in self._kept if not self.is_busy else ():
            if not group.held_bytes:
                room -= group.num_bytes
                if room < 0:
                    return
                group.reserve()

    def send_reserved(self) -> None:
        """Begin to send what memory was reserved for."""
        for group in self._kept:
            if group.held_bytes and not group.is_sent:
                group.load()

    def shrink(self, num_bytes: int | None) -> int:
        """Drop device copies, from the last one on, until this many bytes are free; None for all. Returns how many
        bytes that has freed."""
        freed = 0
        self._is_ready = False
        for group in reversed(self._kept):
            if num_bytes is None or freed < num_bytes:
                freed += group.held_bytes
                group.unload()
        return freed

    def close_ring(self) -> None:
        """Free the ring and the area where compressed weights arrive."""
        if self.ring is not None and self.ring.memory is not None:
            self._is_ready = False
            for group in self._groups:
                group.give_back()  # If its call is not over.
            self.ring.close()
            if self._is_coded:
                self.stage.close_area()

    def unload(self) -> None:
        """Drop everything that is on the device."""
        self.close_ring()
        self.shrink(None)

    # ------------------------------------------------------------------------------------------------ passes

    def begin_pass(self) -> None:
        """The component is called as a whole. Weights sent ahead in another run may be out of date."""
        if self.ring is not None:
            if self.ring.is_interrupted:
                for group in self._groups:
                    group.give_back()
                self.ring.drop()
            run = current_run()
            if run is None or self._last_run is None or self._last_run() is not run:
                self.ring.drop()
                self._last_run = None if run is None else weakref.ref(run)
            self.ring.begin_pass()

    def end_pass(self) -> None:
        """The call returns."""
        if self.ring is not None:
            self.ring.end_pass()
