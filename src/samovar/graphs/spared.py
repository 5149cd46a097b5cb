"""What of a function need not be in its recording? What nobody reads, and what is the same each time.

A skipped step goes through the model's own forward, which prepares much for blocks that do not run, such as positions
and the text's embedding; frequencies of a time are computed from plain numbers; and copies are made that nobody writes
into. Such operations are answered for while the function is recorded. Those that nobody reads give NaN, so that it
shows in the output if somebody does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.interop import memory_of, weak_memory
from ..core.tensor_parts import is_plain
from ..trace.tape import tensors_in
from .forms import Given

_DETACH = torch.ops.aten.detach.default  # torch calls it by itself for a new tensor if somebody else holds that.


class _Operation(NamedTuple):
    func: Any
    reads: set[int]
    """Memory that it may have read."""
    made: set[int]
    """Memory of its output, if another tensor can take its place."""
    output: Any
    """Held if it is the same each time; or else what makes tensors of the same forms without numbers."""
    kind: str
    """`view`, `empty`, `fixed`, `copy` of the same form, or `other`."""


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes all operations, and memory that is written."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done, self.written, self._fixed = list[_Operation](), set[int](), set[int]()
        self._poisons = dict[Any, torch.Tensor]()
        self._memories = list[Any]()  # Held weakly, so that none is taken for another.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, name = func(*args, **(kwargs or {})), str(func)
        if func is _DETACH:
            return output
        seen, reads, made = tensors_in((args, kwargs, output)), _memories((args, kwargs)), _memories(output)
        self._memories += [weak_memory(one) for one in tensors_in(output) if is_plain(one)]
        is_pure = isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        if not is_pure:
            self.written, self._fixed = self.written | reads, self._fixed - reads
        is_apart = is_pure and not made & reads and all(is_plain(one) and one.layout == torch.strided for one in seen)
        kind = "view" if is_pure and made and made <= reads else "empty" if "empty" in name else "other"
        if is_apart and kind == "other" and reads <= self._fixed:
            kind, self._fixed = "fixed", self._fixed | made
        elif is_apart and name.startswith("aten.clone.") and output.stride() == args[0].stride():
            kind = "copy"
        held = output if kind == "fixed" else pytree.tree_map_only(torch.Tensor, self._poisoned, output)
        self.done.append(_Operation(func, reads, made if is_apart else set(), held, kind))
        return output

    def _poisoned(self, like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Makes a tensor of this form with NaN, or with zeros where there is no NaN: it may be an index."""
        has_nan, key, strides = like.is_floating_point() or like.is_complex(), (like.dtype, like.device), like.stride()
        size = 1 + sum((length - 1) * stride for length, stride in zip(like.shape, strides, strict=True))
        if len(self._poisons.get(key, ())) < size:
            self._poisons[key] = torch.full((size,), torch.nan if has_nan else 0, dtype=like.dtype, device=like.device)
        return partial(self._poisons[key].as_strided, like.shape, strides)


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
        self._functions = [one.func for one in seen.done]
        self._answers, self._copies = dict[int, Any](), set[int]()  # The latter of what nobody writes into.
        own, fixed, changes = set[int](), set[int](), seen.written | self.live
        for number, one in enumerate(seen.done):
            if one.kind == "fixed" and one.reads <= fixed and not one.made & changes:
                fixed |= one.made
                self._answers[number] = one.output
            elif one.kind == "copy" and one.reads <= own - changes and not one.made & changes:
                self._copies.add(number)
            own |= one.made
        for number, one in reversed(list(enumerate(seen.done))):
            if one.made and not one.made & self.live and number not in self._answers:
                self._answers[number] = pytree.tree_map_only(partial, operator.call, one.output)
            elif number not in self._answers and one.kind != "view":
                self.live |= one.reads
        self.constants = [one for one in tensors_in(list(self._answers.values())) if memory_of(one) in self.live]
        """Results that are the same each time. Whoever replays must keep them."""

    def run(self) -> Any:
        """Run the function, which does the same again."""
        self._position = 0
        with self:
            return self._function()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH:
            return func(*args, **(kwargs or {}))
        number, self._position = self._position, self._position + 1
        if number >= len(self._functions) or func is not self._functions[number]:
            raise RuntimeError(f"{func} was not called here before")
        if number in self._answers:
            return self._answers[number]
        return args[0] if number in self._copies else func(*args, **(kwargs or {}))


def _memories(value: Any) -> set[int]:
    return {memory_of(one) for one in tensors_in(value) if is_plain(one)}
