"""Hooks that bring weights in for a call.

A component has many entry points: `forward`, but also `decode`, `encode`, `get_text_features` or `generate`, and a
pipeline may even call one of its layers. So there are hooks on the component, on each of its blocks, and on every other
module in it that holds weights. Each lends what its module holds for the time of the call.

A block that is bypassed, by a cache for instance, moves nothing. Weights move while they are called, so one call at a
time: the hooks hold a lock from the start of a call to its end. Other threads wait, and may load another component
between two calls of this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..core.errors import SettingError
from ..hooks import HookOrder, ModelHook
from .component import OffloadedComponent
from .layout import owners_of, tensors_of
from .planner import ComponentPlan
from .sizes import Component
from .weight_group import WeightGroup

HOOK = "samovar_offload"
"""The name of our hooks."""


class LoadHook(ModelHook):
    """Lends what stays while its component is called: a block, or what is outside the blocks, for the call of a module
    that holds some of it."""

    order = HookOrder.OFFLOAD
    may_be_left_out = True  # The component's own hook has lent it.

    def __init__(self, component: OffloadedComponent, group: WeightGroup, path: str | None = None) -> None:
        """`path`: that of the block that is called, or "" for the component as a whole."""
        self._component, self._stage, self._group, self._path = component, component.stage, group, path
        self._is_detached = False
        self._lent: list[list[WeightGroup]] = []
        """What each call that is running has lent."""

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._is_detached = True
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._component.lock.acquire()
        self._lent.append([])
        try:
            if self._is_detached:
                raise SettingError(
                    f"The offload of {self._component.component.name} was changed or taken off while another thread "
                    "was about to call it. Wait for running calls to end before you do so."
                )
            self._stage.begin_call()
            self._begin(self._lent[-1])
            args, kwargs = self._stage.to_device(args), self._stage.to_device(kwargs)
            if self._component.timer is not None and self._path is not None:
                self._component.timer.begin(self._path)
            return args, kwargs
        except BaseException as error:
            self.failed_forward(module, error)
            raise

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if self._component.timer is not None and self._path is not None:
            self._component.timer.end(self._path)
        self._give_back()
        self._end()
        self._leave()
        return output

    def failed_forward(self, module: torch.nn.Module, error: BaseException) -> None:
        with contextlib.ExitStack() as ends:  # One that raises stops no other.
            ends.callback(self._leave)
            ends.callback(self._fail)
            self._give_back()

    def _leave(self) -> None:
        # Once, also if `post_forward` raised or was interrupted.
        if self._lent and self._lent.pop() is not None:
            self._component.lock.release()

    def _give_back(self) -> None:
        for group in self._lent[-1] if self._lent else ():
            group.give_back()

    def _begin(self, lent: list[WeightGroup]) -> None:
        """Lend what is needed."""
        self._component.enter()
        lent += [self._group] if self._component.lend(self._group) else []

    def _end(self) -> None:
        """The call returns."""

    def _fail(self) -> None:
        """The call raised."""


class PassHook(LoadHook):
    """The same for a component as a whole, or half of a VAE. Its calls are passes through the blocks."""

    def __init__(self, component: OffloadedComponent) -> None:
        super().__init__(component, component.rest, "")
        self._following: OffloadedComponent | None = None

    def _begin(self, lent: list[WeightGroup]) -> None:
        component = self._component
        component.enter()
        component.calls += 1
        component.begin_pass()
        lent += component.lend_whole()
        self._following = component.phases.note_call(component)
        if self._following is not None:
            self._following.reserve(component.room_beside())

    def _end(self) -> None:
        self._component.end_pass()
        if self._following is not None:
            self._following.send_reserved()
        self._component.calls -= 1

    def _fail(self) -> None:
        self._component.calls = 0
        if self._component.ring is not None:
            self._component.ring.drop()


class StreamHook(LoadHook):
    """Brings a block in through the ring before its call and lets it go after it."""

    may_be_left_out = False

    def _begin(self, lent: list[WeightGroup]) -> None:
        self._component.enter()
        ring = self._component.ring
        assert ring is not None
        self._stage.check_call()
        lent.append(self._group)
        self._group.lend(ring.acquire(self._group), ring.memory)

    def _end(self) -> None:
        if self._component.ring is not None:
            self._component.ring.release()

    def _fail(self) -> None:
        if self._component.ring is not None:
            self._component.ring.drop()


def entries_of(component: Component) -> list[torch.nn.Module]:
    """The modules by which a component is entered: itself, and the halves of a VAE."""
    children = component.module.children() if component.role == "vae" else ()
    return [component.module, *(child for child in children if tensors_of(child, component.skip))]


def hooks_for(offloaded: OffloadedComponent, plan: ComponentPlan) -> Iterator[tuple[torch.nn.Module, ModelHook]]:
    """The hooks of a component, with the modules that they go on."""
    component = offloaded.component
    entries = entries_of(component)
    for entry in entries:
        yield entry, PassHook(offloaded)
    for path, block in component.blocks.items():
        kind = StreamHook if path in plan.streamed else LoadHook
        yield block, kind(offloaded, offloaded.blocks[path], path)
    for owner in owners_of(component.module, component.skip_with_blocks):
        if all(owner is not entry for entry in entries):
            yield owner, LoadHook(offloaded, offloaded.rest)
