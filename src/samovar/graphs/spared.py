"""What of a function need not be in its recording? What nobody reads, and what is the same each time.

A skipped step goes through the model's own forward, which prepares much for blocks that do not run, such as positions
and the text's embedding; frequencies of a time are computed from plain numbers; and copies are made that nobody writes
into. Such operations are answered for while the function is recorded. Those that nobody reads give NaN, so that it
shows in the output if somebody does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..other_libraries import memory_of
from ..tensors import is_plain
from .forms import Given


class _Operation(NamedTuple):
    """What was done, and the memory that it may have read. Its output is held, so that nothing else takes its memory,
    which is `made` if another tensor can take its place."""

    func: Any
    reads: set[int]
    output: Any
    made: set[int]
    kind: str
    """`view`, `empty`, `copy` of the same form, or `other`."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all operations, and memory that is written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done, self.written = list[_Operation](), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        seen, name = _tensors((args, kwargs, output)), str(func)
        reads, made = _memories((args, kwargs)), _memories(output)
        is_pure = isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        self.written |= set() if is_pure else reads
        is_apart = is_pure and not made & reads and all(is_plain(one) and one.layout == torch.strided for one in seen)
        kind = "view" if is_pure and made and made <= reads else "empty" if "empty" in name else "other"
        if is_apart and name.startswith("aten.clone.") and output.stride() == args[0].stride():
            kind = "copy"
        self.done.append(_Operation(func, reads, output, made if is_apart else set(), kind))
        return output


class Spared(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a function runs that was watched before, answers for operations that need not run."""

    def __init__(self, function: Callable[[], Any]) -> None:
        """Runs the function once. Unsuitable if its output cannot be looked into."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._function, seen = function, _Operations()
        with seen:
            output = function()
        self.live = set(map(memory_of, Given(output).tensors))
        """Memory that is read, by operations that do run or by whoever gets the output."""
        self._functions, self._position = [one.func for one in seen.done], 0
        self._answers, self._poisons = dict[int, Any](), dict[Any, torch.Tensor]()
        fixed, own, changes = set[int](), set[int](), seen.written | self.live
        self._copies: set[int] = set()
        """Copies of what nobody writes into, neither there nor here."""
        for number, one in enumerate(seen.done):
            if one.made and not one.made & changes and one.kind != "empty":
                if one.reads <= fixed:
                    fixed |= one.made
                    self._answers[number] = one.output
                elif one.kind == "copy" and one.reads <= own - changes:
                    self._copies.add(number)
            own |= one.made
        for number, one in reversed(list(enumerate(seen.done))):
            if one.made and not one.made & self.live:
                self._answers[number] = pytree.tree_map_only(torch.Tensor, self._poison, one.output)
            elif number not in self._answers and one.kind != "view":
                self.live |= one.reads
        self.constants = [one for one in _tensors(list(self._answers.values())) if memory_of(one) in self.live]
        """Results that are the same each time. Whoever replays must keep them."""

    def run(self) -> Any:
        """Run the function, which does the same again."""
        with self:
            return self._function()

    def _poison(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of this form without numbers, or with zeros where there is nothing else: it may be an index."""
        size = 1 + sum((length - 1) * stride for length, stride in zip(like.shape, like.stride(), strict=True))
        key, value = (like.dtype, like.device), torch.nan if like.is_floating_point() or like.is_complex() else 0
        if key not in self._poisons or len(self._poisons[key]) < size:
            self._poisons[key] = torch.full((max(size, 1),), value, dtype=like.dtype, device=like.device)
        return self._poisons[key].as_strided(like.shape, like.stride())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, self._position = self._position, self._position + 1
        if number >= len(self._functions) or func is not self._functions[number]:
            raise RuntimeError(f"{func} was not called here before")
        if number in self._answers:
            return self._answers[number]
        return args[0] if number in self._copies else func(*args, **(kwargs or {}))


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _memories(value: Any) -> set[int]:
    return {memory_of(one) for one in _tensors(value) if is_plain(one)}
