"""What do blocks really carry? One forward of the model, watched.

It gives the order in which stacks run, which modules run between their blocks, and through which parameter each
returned value reaches the next block: by identity of the tensors, and where the model makes a new tensor in between, by
shape.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .. import tree
from ..arch.blocks import Anatomy, BlockStack, Stream, output_values
from ..arch.modules import unwrapped
from ..errors import DeclarationError, ModelError
from .gates import other_modules


@dataclass
class BlockCall:
    """One call of a block."""

    arguments: dict[str, Any]
    """By the stack's parameters."""
    num_positional: int
    """How many of them were not named: other hooks may count on their places."""
    output: Any = None


@dataclass
class _Carry:
    """The parameters through which one returned value may have gone on."""

    by_identity: set[str] = field(default_factory=set)
    by_shape: set[str] | None = None
    by_own_shape: set[str] | None = None
    """Those that had the shape of what their own call returned: models may permute tokens between blocks."""


class Watcher:
    """Notes what a forward does with the blocks.

    `watching` brings it the calls by hooks of its own; those who see the calls anyway report each.
    """

    def __init__(self, model: torch.nn.Module, anatomy: Anatomy, *, keeps_calls: bool = False) -> None:
        """`keeps_calls`: whether the first call of every block is kept, and not only the last one of each stack."""
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
        """Inside, a forward of the model is watched by hooks on its blocks."""

        def before(stack: BlockStack, path: str) -> Callable[..., None]:
            return lambda module, args, kwargs: self.before_block(stack, module, args, kwargs, path)

        def after(stack: BlockStack) -> Callable[..., None]:
            return lambda module, args, output: self.after_block(stack, module, args, output)

        def before_other(path: str) -> Callable[..., None]:
            return lambda module, args: self.before_other(path)

        with contextlib.ExitStack() as removals:
            for stack in self._structure.stacks:
                blocks = zip(stack.block_paths, stack.modules(self._model), strict=True)
                for block, path in {unwrapped(block): path for path, block in reversed(list(blocks))}.items():
                    removals.callback(block.register_forward_pre_hook(before(stack, path), with_kwargs=True).remove)
                    removals.callback(block.register_forward_hook(after(stack)).remove)
            for path, child in other_modules(self._model, self._structure):
                removals.callback(child.register_forward_pre_hook(before_other(path)).remove)
            yield

    def anatomy(self) -> Anatomy:
        """The anatomy as structure and what was seen of the forward give it."""
        return _confirm(self._model, self._structure, self)

    def before_other(self, path: str) -> None:
        """Report that a module is called that is no block, but a member of the container at this path."""
        self.order.append(path)

    def before_block(self, stack: BlockStack, module: torch.nn.Module, args: Any, kwargs: Any, path: str = "") -> None:
        """Report that a block of a stack is called."""
        call = BlockCall(stack.arguments(module, args, kwargs), len(args))
        if stack.path in self._last:
            self._compare(stack.path, self._last[stack.path], call)
        self.order.append(stack.path)
        self.blocks.append(path)
        self._last[stack.path] = call
        if self._keeps_calls:
            self.calls.setdefault(path, call)

    def after_block(self, stack: BlockStack, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Report that it has returned."""
        call = self._last[stack.path]
        call.output = output
        self.returned[unwrapped(module)] = tree.without_data(output)
        for position, value in enumerate(output_values(output)):
            carry = self.carries[stack.path][position]
            if isinstance(value, torch.Tensor):
                alike = _of_form(value, call.arguments)
                carry.by_own_shape = alike if carry.by_own_shape is None else carry.by_own_shape & alike

    def _compare(self, path: str, earlier: BlockCall, later: BlockCall) -> None:
        """Note through which parameters of the later call the earlier one's values may have gone on."""
        tensors = {name: value for name, value in later.arguments.items() if isinstance(value, torch.Tensor)}
        self.changing[path] |= {
            name
            for name, value in tensors.items()
            if not _equal(value, earlier.arguments.get(name)) or _is_returned(value, earlier)
        }
        for position, value in enumerate(output_values(earlier.output)):
            carry = self.carries[path][position]
            if isinstance(value, torch.Tensor):
                carry.by_identity |= {name for name, v in tensors.items() if v is value}
                alike = _of_form(value, tensors)
                carry.by_shape = alike if carry.by_shape is None else carry.by_shape & alike


def _equal(value: torch.Tensor, other: Any) -> bool:
    return value is other or (isinstance(other, torch.Tensor) and torch.equal(value, other))


def _of_form(value: torch.Tensor, among: Mapping[str, Any]) -> set[str]:
    return {
        name
        for name, other in among.items()
        if isinstance(other, torch.Tensor) and (other.shape, other.dtype) == (value.shape, value.dtype)
    }


def _is_returned(value: torch.Tensor, earlier: BlockCall) -> bool:
    """Whether a block returned this very tensor: it may have been given it, and have written into it."""
    return any(value is returned for returned in output_values(earlier.output))


def _confirm(model: torch.nn.Module, anatomy: Anatomy, watcher: Watcher) -> Anatomy:
    """The stacks that ran, in that order, with their streams; what ran between blocks is set aside."""
    known = {stack.path: stack for stack in anatomy.stacks}
    moments: dict[str, list[int]] = defaultdict(list)
    for moment, path in enumerate(watcher.order):
        moments[path].append(moment)

    def runs_inside_another(path: str) -> bool:
        return any(
            other[0] < moments[path][0] < other[-1] for name, other in moments.items() if name in known and name != path
        )

    side = tuple(path for path in moments if path in anatomy.side or runs_inside_another(path))
    ran = [known[path] for path in moments if path in known and path not in side]
    if not ran:
        raise ModelError(
            f"None of the blocks of {anatomy.model_class} ran, in {', '.join(map(repr, known))}; at least those of one "
            "stack were expected to. Probe the model before hooks that skip blocks are attached, with inputs that "
            "reach the blocks."
        )
    return replace(
        anatomy,
        stacks=tuple(_with_streams(stack, _count_returned(model, stack, watcher), watcher) for stack in ran),
        side=side,
        idle=tuple(path for path in known if path not in moments),
    )


def _count_returned(model: torch.nn.Module, stack: BlockStack, watcher: Watcher) -> int:
    """How many values a block of a stack returns."""
    blocks = zip(stack.block_paths, map(unwrapped, stack.modules(model)), strict=True)
    path_by_count = {
        len(output_values(watcher.returned[block])): path for path, block in blocks if block in watcher.returned
    }
    if len(path_by_count) != 1:
        counts = ", ".join(f"{count} by {path!r}" for count, path in path_by_count.items())
        raise ModelError(
            f"The blocks of {stack.path!r} return different numbers of values ({counts}); the same from each was "
            "expected. Such a model needs an extractor of its own."
        )
    return next(iter(path_by_count))


def _with_streams(stack: BlockStack, count: int, watcher: Watcher) -> BlockStack:
    """The stack as the watcher saw it; what was declared stays as declared."""
    if stack.evidence != "declaration":
        return replace(stack, streams=_streams(stack, count, watcher), evidence="probe")
    if count != len(stack.streams):
        raise DeclarationError(
            f"A declaration carries {len(stack.streams)} values through {stack.path!r}, but its blocks return {count}. "
            "Declare one parameter for each value that they return, None for one that is not passed on."
        )
    return stack


def _streams(stack: BlockStack, count: int, watcher: Watcher) -> tuple[Stream, ...]:
    carries, changing = watcher.carries[stack.path], watcher.changing[stack.path]
    ran_once = all(carry.by_shape is None for carry in carries.values())
    if ran_once and count == len(stack.streams):  # One block alone hands nothing on: its return statement tells.
        return stack.streams
    order = {name: place for place, name in enumerate(stack.parameters)}

    def first(names: set[str]) -> str:  # What only `**kwargs` takes has no place of its own.
        return min(names, key=lambda name: (order.get(name, len(order)), name))

    found: dict[int, str] = {}
    for position, carry in carries.items():
        certain = carry.by_identity & changing or carry.by_identity
        if certain:
            found[position] = first(certain)
    for position, carry in carries.items():
        likely = (carry.by_shape or set()) & changing - set(found.values())
        if position not in found and likely:
            named = {stream.parameter for stream in stack.streams[position : position + 1] if stream.parameter}
            found[position] = first(likely & named or likely)
    for position, carry in carries.items():
        own = (carry.by_own_shape or set()) - set(found.values())
        own = own if ran_once else own & changing
        if position not in found and own:
            found[position] = first(own)
    return tuple(Stream(found.get(position)) for position in range(count))
