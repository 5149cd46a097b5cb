"""Gates at a model's blocks, and the pass that watches what blocks carry.

A gate stands before each block, outside everything that others put on it. It asks the pass that runs on its thread
whether the block computes or is answered for. A watcher is a pass that lets every block compute, and learns the order
of the stacks, the modules that run between blocks, and the parameter through which each returned value reaches the next
block: by identity of the tensors or, where the model makes a new tensor in between, by shape.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..arch.blocks import Anatomy, BlockStack, Stream, output_values
from ..arch.modules import is_container, named_parts, unwrapped
from ..core import nested
from ..core.errors import DeclarationError, ModelError, SettingError
from ..hooks import NOT_BYPASSED, Handle, HookOrder, HookRegistry, ModelHook, watched
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

    def __init__(self, active: _Active, path: str, stack: BlockStack | None, index: int) -> None:
        self._active = active
        self.path = path
        """Path of the list that holds the module, or of the module itself outside a list."""
        self.stack = stack
        """The block's stack; None if the module is not a block."""
        self.index = index

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = self._active.running
        return NOT_BYPASSED if running is None else running.enter(self, module, args, kwargs)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        running = self._active.running
        if running is not None:
            running.leave(self, module, output)
        return output


class Gates(Handle):
    """The gates of one model: at its blocks, and at modules that may run between them."""

    def __init__(self, model: torch.nn.Module, structure: Anatomy, hook_name: str) -> None:
        super().__init__()
        self._active = _Active()
        self._hook_name = hook_name
        self.by_module: dict[torch.nn.Module, Gate] = {}
        self._undo.callback(self.by_module.clear)
        holders = tuple(stack.path for stack in structure.stacks)
        try:
            for stack in structure.stacks:
                for index, block in enumerate(stack.modules(model)):
                    self._put(block, Gate(self._active, stack.path, stack, index))
            for path, module in other_modules(model, structure):
                if not any(holder.startswith(f"{path}.") for holder in holders):
                    with contextlib.suppress(SettingError):  # Without a gate it runs at every step, which is harmless.
                        self._put(module, Gate(self._active, path, None, 0))
        except BaseException:
            self.detach()
            raise

    def _put(self, module: torch.nn.Module, gate: Gate) -> None:
        registry = HookRegistry.get_or_create(module)
        if self._hook_name not in registry:  # A block that is held twice has one gate.
            registry.register_hook(self._hook_name, gate)
            self._undo.callback(registry.remove_hook, self._hook_name)
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


def other_modules(model: torch.nn.Module, anatomy: Anatomy) -> Iterator[tuple[str, torch.nn.Module]]:
    """The children of all containers outside blocks, with their container's path."""
    stacks = tuple(stack.path for stack in anatomy.stacks)
    for path, container in named_parts(model).items():
        inside = path in stacks or path.startswith(tuple(f"{stack}." for stack in stacks))
        if is_container(container) and not inside:
            for child in container.children():
                yield path, child


@dataclass
class BlockCall:
    """One call of a block."""

    arguments: dict[str, Any]
    """By the stack's parameters."""
    num_positional: int
    """How many of them were positional: other hooks may rely on their places."""
    output: Any = None


@dataclass
class _Carry:
    """The parameters through which one returned value may have reached the next block."""

    by_identity: set[str] = field(default_factory=set)
    by_shape: set[str] | None = None
    by_own_shape: set[str] | None = None
    """Those with the shape of their own call's output: models may permute tokens between blocks."""


class Watcher:
    """A pass that lets every block compute, and notes what the blocks are given and return."""

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy, *, keeps_calls: bool = False) -> None:
        """`keeps_calls`: keep the first call of every block, not only the last one of each stack."""
        self._model = model
        self._structure = anatomy
        self._keeps_calls = keeps_calls
        self._last: dict[str, BlockCall] = {}
        self.calls: dict[str, BlockCall] = {}
        """By the path of the block, if they are kept."""
        self.blocks: list[str] = []
        """The paths of the blocks in the order in which they ran."""
        self.order: list[str] = []
        """The container of each call, one after the other."""
        self.carries: dict[str, dict[int, _Carry]] = defaultdict(lambda: defaultdict(_Carry))
        """By stack and position in the output."""
        self.changing: dict[str, set[str]] = defaultdict(set)
        """By stack: the parameters that did not get the same value at every call."""
        self.returned: dict[torch.nn.Module, Any] = {}
        """By block: the form of its output, as tensors without data."""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, forwards of the model on this thread are watched."""
        with Gates(self._model, self._structure, "watch") as gates, gates.asking(self):
            yield

    def enter(self, gate: Gate, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self.order.append(gate.path)
        if gate.stack is None:
            return NOT_BYPASSED
        call = BlockCall(gate.stack.arguments(module, args, kwargs), len(args))
        if gate.path in self._last:
            self._compare(gate.path, self._last[gate.path], call)
        self._last[gate.path] = call
        path = gate.stack.block_paths[gate.index]
        self.blocks.append(path)
        if self._keeps_calls:
            self.calls.setdefault(path, call)
        return NOT_BYPASSED

    def leave(self, gate: Gate, module: torch.nn.Module, output: Any) -> None:
        if gate.stack is None:
            return
        call = self._last[gate.path]
        call.output = output
        self.returned[unwrapped(module)] = nested.without_data(output)
        for position, value in enumerate(output_values(output)):
            carry = self.carries[gate.path][position]
            if isinstance(value, torch.Tensor):
                alike = _of_form(value, call.arguments)
                carry.by_own_shape = alike if carry.by_own_shape is None else carry.by_own_shape & alike

    def _compare(self, path: str, earlier: BlockCall, later: BlockCall) -> None:
        """Note through which parameters of the later call the earlier one's values may have come."""
        tensors = {name: value for name, value in later.arguments.items() if isinstance(value, torch.Tensor)}
        returned = output_values(earlier.output)
        for name, value in tensors.items():
            before = earlier.arguments.get(name)
            is_equal = value is before or (isinstance(before, torch.Tensor) and torch.equal(value, before))
            if not is_equal or any(value is other for other in returned):  # A block may write into what it is given.
                self.changing[path].add(name)
        for position, value in enumerate(returned):
            carry = self.carries[path][position]
            if isinstance(value, torch.Tensor):
                carry.by_identity |= {name for name, v in tensors.items() if v is value}
                alike = _of_form(value, tensors)
                carry.by_shape = alike if carry.by_shape is None else carry.by_shape & alike

    def anatomy(self) -> Anatomy:
        """The stacks that ran, in that order, with their streams; what ran between blocks is set aside."""
        known = {stack.path: stack for stack in self._structure.stacks}
        moments: dict[str, list[int]] = defaultdict(list)
        for moment, path in enumerate(self.order):
            moments[path].append(moment)

        def runs_inside_another(path: str) -> bool:
            others = (other for name, other in moments.items() if name in known and name != path)
            return any(other[0] < moments[path][0] < other[-1] for other in others)

        side = tuple(path for path in moments if path in self._structure.side or runs_inside_another(path))
        ran = [known[path] for path in moments if path in known and path not in side]
        if not ran:
            raise ModelError(
                f"No block of {self._structure.model_class} ran, in {', '.join(map(repr, known))}; expected at "
                "least one stack to run. Probe the model before attaching hooks that skip blocks, with inputs that "
                "reach the blocks."
            )
        idle = tuple(path for path in known if path not in moments)
        return replace(self._structure, stacks=tuple(map(self._with_streams, ran)), side=side, idle=idle)

    def _with_streams(self, stack: BlockStack) -> BlockStack:
        """The stack as its blocks ran; what was declared stays as declared."""
        count = self._count_returned(stack)
        if stack.evidence != "declaration":
            return replace(stack, streams=self._streams(stack, count), evidence="probe")
        if count != len(stack.streams):
            raise DeclarationError(
                f"A declaration carries {len(stack.streams)} values through {stack.path!r}, but its blocks return "
                f"{count}. Declare one parameter for each returned value, None for one that is not passed on."
            )
        return stack

    def _count_returned(self, stack: BlockStack) -> int:
        """How many values each block of a stack returns."""
        blocks = zip(stack.block_paths, map(unwrapped, stack.modules(self._model)), strict=True)
        path_by_count = {
            len(output_values(self.returned[block])): path for path, block in blocks if block in self.returned
        }
        if len(path_by_count) != 1:
            counts = ", ".join(f"{count} by {path!r}" for count, path in path_by_count.items())
            raise ModelError(
                f"The blocks of {stack.path!r} return different numbers of values ({counts}); expected the same "
                "number from each. Register an extractor for such a model: samovar.cache.register_extractor."
            )
        return next(iter(path_by_count))

    def _streams(self, stack: BlockStack, count: int) -> tuple[Stream, ...]:
        carries, changing = self.carries[stack.path], self.changing[stack.path]
        ran_once = all(carry.by_shape is None for carry in carries.values())
        if ran_once and count == len(stack.streams):  # A single block hands nothing on; its return statement decides.
            return stack.streams
        order = {name: place for place, name in enumerate(stack.parameters)}

        def first(names: set[str]) -> str:  # What only `**kwargs` takes has no place.
            return min(names, key=lambda name: (order.get(name, len(order)), name))

        found: dict[int, str] = {}

        def choose(position: int, names: set[str]) -> None:
            if names and position not in found:
                found[position] = first(names)

        for position, carry in carries.items():
            choose(position, carry.by_identity & changing or carry.by_identity)
        for position, carry in carries.items():
            likely = (carry.by_shape or set()) & changing - set(found.values())
            named = {stream.parameter for stream in stack.streams[position : position + 1] if stream.parameter}
            choose(position, likely & named or likely)
        for position, carry in carries.items():
            own = (carry.by_own_shape or set()) - set(found.values())
            choose(position, own if ran_once else own & changing)
        return tuple(Stream(found.get(position)) for position in range(count))


def _of_form(value: torch.Tensor, among: Mapping[str, Any]) -> set[str]:
    """The names of the tensors that have the shape and dtype of a value."""
    return {
        name
        for name, other in among.items()
        if isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
    }
