"""How does a forward that is under way learn of the calls of its blocks?

A gate stands before each block, outside of everything that others put on it. It asks the pass that runs on its thread
what to do: let the block compute, or answer in its place.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..arch import Anatomy, BlockStack
from ..arch.modules import is_container, named_parts
from ..errors import SettingError
from ..hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook


class Pass(Protocol):
    """One forward, as its gates see it."""

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Called before a gated module; an answer in its place, or NOT_BYPASSED."""

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        """Called when a gated module has run."""


class _Active(threading.local):
    running: Pass | None = None


class Gate(ModelHook):
    """Stands before a module and asks the pass that is under way."""

    order = HookOrder.CACHE

    def __init__(self, active: _Active, path: str, stack: BlockStack | None, index: int) -> None:
        self._active = active
        self.path = path
        """Of the list that holds the module, or of the module itself if it is in none."""
        self.stack = stack
        """The stack of a block; None for any other module."""
        self.index = index

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = self._active.running
        return NOT_BYPASSED if running is None else running.enter(self, module, args, kwargs)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        running = self._active.running
        if running is not None:
            running.leave(self, module, output)
        return output


class Gates:
    """The gates of one model: at its blocks, and at what may run between them."""

    def __init__(self, model: torch.nn.Module, structure: Anatomy, hook_name: str) -> None:
        self._hook_name = hook_name
        self._active = _Active()
        self.by_module: dict[torch.nn.Module, Gate] = {}
        try:
            self._install(model, structure)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: torch.nn.Module, structure: Anatomy) -> None:
        holders = tuple(stack.path for stack in structure.stacks)
        for stack in structure.stacks:
            for index, block in enumerate(stack.modules(model)):
                self._put(block, Gate(self._active, stack.path, stack, index))
        for path, module in other_modules(model, structure):
            if not any(holder.startswith(f"{path}.") for holder in holders):
                self._put_if_possible(module, Gate(self._active, path, None, 0))

    def _put(self, module: torch.nn.Module, gate: Gate) -> None:
        registry = HookRegistry.get_or_create(module)
        if self._hook_name not in registry:  # A block that is held twice has one gate.
            registry.register_hook(self._hook_name, gate)
            self.by_module[module] = gate

    def _put_if_possible(self, module: torch.nn.Module, gate: Gate) -> None:
        with contextlib.suppress(SettingError):  # Without a gate it runs at every step: no harm is done.
            self._put(module, gate)

    @contextlib.contextmanager
    def asking(self, running: Pass) -> Iterator[None]:
        """Inside, the gates ask this pass, on this thread."""
        outer, self._active.running = self._active.running, running
        try:
            yield
        finally:
            self._active.running = outer

    @property
    def running(self) -> Pass | None:
        """The pass that is under way on this thread."""
        return self._active.running

    def remove(self) -> None:
        """Take all gates off."""
        for module in self.by_module:
            HookRegistry.get_or_create(module).remove_hook(self._hook_name)
        self.by_module.clear()


def other_modules(model: torch.nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, torch.nn.Module]]:
    """The children of all containers that are not in a block, with their container's path."""
    stacks = tuple(stack.path for stack in anatomy.stacks)
    for path, container in named_parts(model).items():
        inside = path in stacks or path.startswith(tuple(f"{stack}." for stack in stacks))
        if is_container(container) and not inside:
            for child in container.children():
                yield path, child
