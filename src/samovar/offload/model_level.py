"""Who is on the device? Components that take turns, each coming in when it is called.

A component is called through many doors: `forward`, but `decode`, `encode`, `get_text_features` or `generate` as
well, and a pipeline may even call a layer of it. So there is a hook on the component, on each of its blocks, and
on whatever else in it holds weights: the first to be called brings the whole component in, and sends off those that
take turns with it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..hooks import HookOrder, HookRegistry, ModelHook, Run, current_run
from .host import HostMemory
from .layerwise import BlockStream, StreamHook
from .parcels import Parcel
from .planner import ComponentPlan
from .ring import RingStats
from .sizes import Component
from .staging import Stage
from .weights import owners_of

HOOK = "samovar_offload"
"""The name of our hooks."""


class Tenant:
    """A component that is not on the device all the time, or not all of it."""

    def __init__(self, component: Component, stage: Stage, host: HostMemory) -> None:
        self.name, self.component = component.name, component
        self.is_in = False
        self.entries = 0
        """How often it came in."""
        self._stage, self._host = stage, host
        self._last_run: Callable[[], Run | None] = _no_run
        self._rest = Parcel(component.name, component.rest, stage, host)
        self._blocks = {path: self._block_parcel(path) for path in component.blocks}
        self._kept: list[Parcel] = []
        self.stream: BlockStream | None = None
        self.ring_stats = RingStats()

    def _block_parcel(self, path: str) -> Parcel:
        return Parcel(f"{self.name}.{path}", lambda: self.component.block(path), self._stage, self._host)

    def block(self, path: str) -> Parcel:
        """The weights of one block."""
        return self._blocks[path]

    def adopt(self, plan: ComponentPlan) -> None:
        """Follow a plan: what is kept while the component is in, and what streams."""
        assert not self.is_in
        self._kept = [self._rest, *(parcel for path, parcel in self._blocks.items() if path not in plan.streamed)]
        streamed = [self._blocks[path] for path in self._blocks if path in plan.streamed]
        self._host.look_around()
        parcels = [self._rest, *self._blocks.values()]
        for parcel in parcels:
            if not parcel.is_current():
                parcel.adopt(pinned=True)
        self._host.pin(source for parcel in parcels for source in parcel.sources)
        # Encoders run once, so that what would be sent ahead for their next pass is not sent.
        goes_round = _in_any_run if self.component.role == "denoiser" else _never
        self.stream = None
        if streamed:
            self.stream = BlockStream(self._stage, streamed, plan.ring_bytes, goes_round, self.ring_stats)

    def come_in(self) -> None:
        """Bring in what is kept and take the ring's memory; on failure, everything is off again."""
        if self.is_in:
            return
        try:
            for parcel in self._kept:
                parcel.prepare()
                parcel.load()
            if self.stream is not None:
                self.stream.open()
        except BaseException:
            self._clear_out(keep_changes=False)
            raise
        self._stage.compute_waits(self._stage.mark_copied())
        self.is_in = True
        self.entries += 1

    def go_off(self, *, keep_changes: bool = False) -> None:
        """Drop the device copies. Nothing is copied back, unless weights may have been changed on the device."""
        if self.is_in:
            self.is_in = False
            self._clear_out(keep_changes=keep_changes)

    def give_back(self) -> None:
        """Leave its weights on the host as they were found there."""
        for parcel in (self._rest, *self._blocks.values()):
            parcel.give_back()

    def _clear_out(self, *, keep_changes: bool) -> None:
        if self.stream is not None:
            self.stream.close()
        for parcel in self._kept:
            parcel.unload(keep_changes=keep_changes)

    def refresh(self) -> None:
        """Look again at weights that stay in: adapters may have come, or somebody may have moved them."""
        if self.is_in and not all(parcel.is_current() for parcel in self._kept):
            self.go_off(keep_changes=True)
            self.come_in()

    def begin_pass(self) -> None:
        """It is called: what was sent ahead in another run may not be what its weights are now."""
        if self.stream is not None:
            run = current_run()
            if run is None or self._last_run() is not run:
                self.stream.drop()
                self._last_run = _no_run if run is None else weakref.ref(run)
            self.stream.begin_pass()


def _in_any_run() -> bool:
    return current_run() is not None


def _never() -> bool:
    return False


def _no_run() -> Run | None:
    return None


class Turns:
    """Lets one tenant in at a time."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._tenants = tuple(tenants)

    @property
    def are_taken(self) -> bool:
        """Whether there is anybody to take turns with."""
        return len(self._tenants) > 1

    def enter(self, tenant: Tenant) -> None:
        """Let a tenant in, and the others off first."""
        if not tenant.is_in:
            for other in self._tenants:
                if other is not tenant:
                    other.go_off()
            tenant.come_in()


class DoorHook(ModelHook):
    """Brings its component in."""

    order = HookOrder.OFFLOAD

    def __init__(self, tenant: Tenant, turns: Turns, stage: Stage) -> None:
        self._tenant, self._turns, self._stage = tenant, turns, stage

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._tenant.is_in:
            self._turns.enter(self._tenant)
        return self._stage.bring(args), self._stage.bring(kwargs)


class PassHook(DoorHook):
    """The same at the front door, where passes through the blocks begin and end."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        arguments = super().pre_forward(module, *args, **kwargs)
        self._tenant.begin_pass()
        return arguments

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self._tenant.stream is not None:
            self._tenant.stream.end_pass()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        if self._tenant.stream is not None:
            self._tenant.stream.drop()


def install_hooks(tenant: Tenant, turns: Turns, stage: Stage, plan: ComponentPlan) -> contextlib.ExitStack:
    """Put hooks on a tenant; closing what is returned takes them off, as does a failure half-way."""
    with contextlib.ExitStack() as undo:
        for module, hook in _hooks(tenant, turns, stage, plan):
            registry = HookRegistry.get_or_create(module)
            registry.register_hook(HOOK, hook)
            undo.callback(registry.remove_hook, HOOK)
        return undo.pop_all()


def _hooks(
    tenant: Tenant, turns: Turns, stage: Stage, plan: ComponentPlan
) -> Iterator[tuple[torch.nn.Module, ModelHook]]:
    component = tenant.component
    yield component.module, PassHook(tenant, turns, stage)
    for path, block in component.blocks.items():
        if path in plan.streamed:
            assert tenant.stream is not None
            yield block, StreamHook(tenant.stream, tenant.block(path), lambda: turns.enter(tenant))
        elif turns.are_taken:
            yield block, DoorHook(tenant, turns, stage)
    if turns.are_taken:
        skip = component.skip | {id(block) for block in component.blocks.values()}
        for owner in owners_of(component.module, skip):
            if owner is not component.module:
                yield owner, DoorHook(tenant, turns, stage)
