"""Gates at a model's blocks, and at modules that may run between them.

A gate stands before each block, outside everything that others put on it. It asks the pass that runs on its thread
whether the block computes or is answered for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from ..arch.blocks import Anatomy, BlockStack
from ..arch.modules import is_container, named_parts
from ..core.errors import SettingError
from ..hooks import NOT_BYPASSED, Handle, HookOrder, ModelHook, install_hook, watched
from ..hooks.handle import for_now


class Pass(Protocol):
    """One forward, as its gates see it."""

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Called before a gated module runs; return an answer in its place, or NOT_BYPASSED."""

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        """Called after a gated module ran."""


class _Active(threading.local):
    running: Pass | None = None


class Gate(ModelHook):
    """Asks the running pass before and after its module."""

    order = HookOrder.CACHE
    may_be_left_out = True  # Without a pass it does nothing, and with one the forward is not replayed.

    def __init__(self, gates: Gates, path: str, stack: BlockStack | None = None, index: int = 0) -> None:
        self._gates = gates
        self.path = path
        """Path of the list that holds the module, or of the module itself outside a list."""
        self.stack = stack
        """The block's stack; None if the module is not a block."""
        self.index = index

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = self._gates.running
        return NOT_BYPASSED if running is None else running.enter(self, module, args, kwargs)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if running := self._gates.running:
            running.leave(self, module, output)
        return output


class Gates(Handle):
    """The gates of one model: at its blocks, and at modules that may run between them."""

    def __init__(self, model: torch.nn.Module, structure: Anatomy, hook_name: str) -> None:
        super().__init__()
        self._active = _Active()
        self._hook_name = hook_name
        self.by_module: dict[torch.nn.Module, Gate] = {}
        with self._undo:
            self._undo.callback(self.by_module.clear)
            for stack in structure.stacks:
                for index, block in enumerate(stack.modules(model)):
                    self._put(block, Gate(self, stack.path, stack, index))
            for path, module in _other_modules(model, structure):
                with contextlib.suppress(SettingError):  # Without a gate it runs at every step, which is harmless.
                    self._put(module, Gate(self, path))
            self._undo = self._undo.pop_all()

    def _put(self, module: torch.nn.Module, gate: Gate) -> None:
        if module not in self.by_module:  # A block that is held twice has one gate.
            install_hook(self._undo, module, self._hook_name, gate)
            self.by_module[module] = gate

    @contextlib.contextmanager
    def asking(self, running: Pass) -> Iterator[None]:
        """Inside, the gates ask this pass on this thread."""
        with for_now(self._active, running=running), watched():
            yield

    @property
    def running(self) -> Pass | None:
        """The pass that runs on this thread."""
        return self._active.running


def _other_modules(model: torch.nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, torch.nn.Module]]:
    """The children of all containers that hold no blocks and are in none, with their container's path."""
    stacks = [f"{stack.path}." for stack in anatomy.stacks]
    for path, container in named_parts(model).items():
        place = f"{path}."
        if is_container(container) and not any(one.startswith(place) or place.startswith(one) for one in stacks):
            for child in container.children():
                yield path, child
