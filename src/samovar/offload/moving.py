"""When do a component's weights come and go? Hooks load them when it is called.

A component has many entry points: `forward`, but also `decode`, `encode`, `get_text_features` or `generate`, and a
pipeline may even call one of its layers. So there are hooks on the component, on each of its blocks, and on every other
module in it that holds weights. The first one called loads the component, and unloads those that take turns with it.

The hook of a streamed block brings its weights in for the call. Between calls they are on the host, so `state_dict`,
adapters and everything else that looks at them outside a call sees the one true copy. A block that is bypassed, by a
cache for instance, moves nothing.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..hooks import HookOrder, HookRegistry, ModelHook, Run, current_run
from .host import HostMemory
from .planner import ComponentPlan
from .ring import Ring
from .sizes import Component
from .staging import Stage
from .tiers import TierPlan
from .weight_groups import WeightGroup
from .weights import owners_of

HOOK = "samovar_offload"
"""The name of our hooks."""


class OffloadedComponent:
    """A component whose weights are on the device always, while it is used, or block by block, as planned."""

    def __init__(self, component: Component, stage: Stage, host: HostMemory) -> None:
        self.component, self.stage = component, stage
        self.is_loaded = self._is_pinned = False
        self.ring: Ring | None = None
        self.others: Sequence[OffloadedComponent] = ()
        """Components that are unloaded before this one is loaded."""
        self._host = host
        self._last_run: weakref.ref[Run] | None = None
        self._home = next((tensor.device for tensor in component.tensors()), torch.device("cpu"))
        rest = WeightGroup(component.name, component.rest, stage, host)
        self.blocks = {
            path: WeightGroup(f"{component.name}.{path}", functools.partial(component.block, path), stage, host)
            for path in component.blocks
        }
        self._groups = [rest, *self.blocks.values()]
        self._kept: list[WeightGroup] = []

    def anonymous_bytes(self, block: str) -> int:
        """Bytes of a block, or of what is outside the blocks, that are in memory alone."""
        return (self.blocks[block] if block else self._groups[0]).anonymous_bytes()

    def follow(self, plan: ComponentPlan, tiers: TierPlan) -> None:
        """Decide what stays while the component is loaded and what streams, and pin it unless it is resident."""
        assert not self.is_loaded
        if plan.placement != "resident":
            self._is_pinned = True
            self.stage.stats.component_loads.setdefault(plan.name, 0)
        for path, group in zip(("", *self.blocks), self._groups, strict=True):
            group.keeps_host = self._is_pinned
            before, group.tier = group.tier, tiers.tier((plan.name, path))
            if self._is_pinned and not (before == group.tier and group.is_current()):
                group.adopt()
        self._host.pin(source for group in self._groups for source in group.sources)
        streamed = [group for path, group in self.blocks.items() if path in plan.streamed]
        self._kept = [group for group in self._groups if group not in streamed]
        is_repeated = self.component.role == "denoiser"  # An encoder runs once, so nothing is sent ahead.
        self.ring = None
        if streamed:
            has_next_pass = lambda: is_repeated and current_run() is not None  # noqa: E731
            self.ring = Ring(self.stage, plan.ring_bytes, streamed, has_next_pass=has_next_pass)

    def load(self) -> None:
        """Bring in what stays while it is loaded, and allocate the ring. If that fails, everything is off again."""
        if self.is_loaded:
            return
        for other in self.others:
            other.unload()
        try:
            for group in self._kept:
                group.prepare()
                group.load()
            if self.ring is not None:
                self.ring.open()
        except BaseException:
            self._drop_copies(keep_changes=False)
            raise
        self.stage.compute_waits(self.stage.mark_copied())
        self.is_loaded = True
        if self._is_pinned:
            self.stage.stats.component_loads[self.component.name] += 1

    def unload(self, *, keep_changes: bool = False) -> None:
        """Drop the device copies. Nothing is copied back, unless weights may have been changed on the device."""
        if self.is_loaded:
            self.is_loaded = False
            self._drop_copies(keep_changes=keep_changes)

    def _drop_copies(self, *, keep_changes: bool) -> None:
        if self.ring is not None:
            self.ring.close()
        for group in self._kept:
            group.unload(keep_changes=keep_changes)

    def restore(self) -> None:
        """Put the weights where they were before."""
        for group in self._groups if self._home.type == "cpu" else ():
            group.restore()
        for tensor in self.component.tensors():
            if tensor.device != self._home:
                tensor.data = tensor.data.to(self._home)

    def refresh(self) -> None:
        """Reload weights that stay on the device if an adapter, or anybody else, has changed them."""
        if self.is_loaded and not all(group.is_current() for group in self._kept):
            self.unload(keep_changes=True)
            self.load()

    def begin_pass(self) -> None:
        """The component is called. Weights sent ahead in another run may be out of date."""
        if self.ring is not None:
            run = current_run()
            if run is None or self._last_run is None or self._last_run() is not run:
                self.ring.drop()
                self._last_run = None if run is None else weakref.ref(run)
            self.ring.begin_pass()


class LoadHook(ModelHook):
    """Loads its component."""

    order = HookOrder.OFFLOAD

    def __init__(self, component: OffloadedComponent) -> None:
        self._component, self._stage = component, component.stage

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._component.is_loaded:
            self._component.load()
        return self._stage.to_device(args), self._stage.to_device(kwargs)


class PassHook(LoadHook):
    """The same on the component itself, whose calls are passes through the blocks."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        arguments = super().pre_forward(module, *args, **kwargs)
        self._component.begin_pass()
        return arguments

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self._component.ring is not None:
            self._component.ring.end_pass()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        if self._component.ring is not None:
            self._component.ring.drop()


class StreamHook(ModelHook):
    """Brings a block's weights in before its call and lets them go after it."""

    order = HookOrder.OFFLOAD

    def __init__(self, component: OffloadedComponent, ring: Ring, block: WeightGroup) -> None:
        self._component, self._stage, self._ring, self._block = component, component.stage, ring, block

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not self._component.is_loaded:
            self._component.load()
        self._stage.check_call()
        offsets = self._ring.acquire(self._block)
        self._block.use_device(offsets, self._ring.memory)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._block.use_host()
        self._ring.release()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        self.post_forward(module, None)


def hooks_for(offloaded: OffloadedComponent, plan: ComponentPlan) -> Iterator[tuple[torch.nn.Module, ModelHook]]:
    """The hooks of a component, with the modules that they go on."""
    component = offloaded.component
    yield component.module, PassHook(offloaded)
    for path, block in component.blocks.items():
        if path in plan.streamed and offloaded.ring is not None:
            yield block, StreamHook(offloaded, offloaded.ring, offloaded.blocks[path])
        elif offloaded.others:
            yield block, LoadHook(offloaded)
    for owner in owners_of(component.module, component.skip_with_blocks) if offloaded.others else ():
        if owner is not component.module:
            yield owner, LoadHook(offloaded)


def install_hooks(undo: contextlib.ExitStack, name: str, hooks: Iterable[tuple[torch.nn.Module, ModelHook]]) -> None:
    """Register hooks on modules; `undo` removes them."""
    for module, hook in hooks:
        registry = HookRegistry.get_or_create(module)
        registry.register_hook(name, hook)
        undo.callback(registry.remove_hook, name)
