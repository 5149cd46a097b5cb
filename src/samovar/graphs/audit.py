"""What does a function do that a replay would not do again? Seen by running it once, operation by operation.

A replay repeats the kernels with the addresses that they had. It does not wait for numbers, so nothing may depend on
them in Python; it copies nothing from the host; it would draw the same random numbers again; and what it writes outside
of its own memory would be lost or repeated.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.interop import memory_of, weak_memory
from ..core.tensor_parts import is_plain

_WAITS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
_COPIES = ("copy_", "_to_copy")


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first thing that a replay would not do, and what is read from outside."""

    supports_higher_order_operators = True  # Flex attention is one.

    def __init__(self, given: Sequence[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self.constants: list[torch.Tensor] = []
        """Tensors that are read and are neither inputs nor weights. Whoever replays must keep them."""
        self._is_on_host = given[0].device.type == "cpu"
        self._inputs = {memory_of(tensor) for tensor in given}
        self._known = self._inputs | {memory_of(tensor) for tensor in weights}
        self._made: dict[Any, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [*_plain(args), *_plain(list(kwargs.values()))]
        if self.problem is None:
            problem = self._problem(func, args, kwargs, read)
            self.problem = None if problem is None else f"{_where()}{problem}"
        for tensor in read:
            memory = memory_of(tensor)
            if memory not in self._known and memory not in self._made:
                self._known.add(memory)
                self.constants.append(tensor)
        output = func(*args, **kwargs)
        for tensor in _plain(output):
            memory = memory_of(tensor)
            if memory not in self._known and memory not in self._made:
                self._made[memory] = weak_memory(tensor)
        return output

    def _problem(self, func: Any, args: Any, kwargs: Any, read: list[torch.Tensor]) -> str | None:
        if not isinstance(func, torch._ops.OpOverload):
            return None
        name = func.__name__.partition(".")[0]
        if name in _INDEXING:
            if any(leaf.dtype in (torch.bool, torch.uint8) for leaf in pytree.tree_leaves(args[1]) if leaf is not None):
                return f"waits for the device ({name} with a mask)"
        elif any(tag in func.tags for tag in _WAITS):
            return f"waits for the device ({name})"
        given = {**dict(zip(_names(func)[0], args, strict=False)), **kwargs}
        if torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, given):
            return f"draws random numbers ({name})"
        devices = {tensor.device.type for tensor in read if tensor.dim() or name in _COPIES}
        target = kwargs.get("device") if name in _COPIES else None
        if len(devices if target is None else devices | {torch.device(target).type}) > 1:
            return f"copies between devices ({name})"
        if not self._is_on_host and any(t.device.type == "cpu" and memory_of(t) in self._inputs for t in read):
            return "takes an argument that is on the CPU"
        for tensor in _written(func, given):
            if memory_of(tensor) not in self._made:
                what = "its inputs" if memory_of(tensor) in self._inputs else "a tensor that outlives it"
                return f"writes into {what} ({name})"
        return None


def _plain(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments or results of an operation, and in their lists. There are thousands of them."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            if is_plain(value):
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _plain(value)


@functools.cache
def _names(func: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters of an operation, and those that it writes into."""
    arguments = func._schema.arguments
    written = [one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    return tuple(one.name for one in arguments), tuple(written)


def _written(func: Any, given: dict[str, Any]) -> Iterator[torch.Tensor]:
    for name in _names(func)[1]:
        yield from _plain(given.get(name))


def _drops_nothing(func: Any, given: dict[str, Any]) -> bool:
    """Whether an operation with dropout drops nothing, as attention does in a model that is not trained."""
    parameters = _names(func)[0]
    if "dropout_p" in parameters:
        return bool(given.get("dropout_p", 0.0) == 0.0)
    return "train" in parameters and (given.get("train") is False or given.get("p") == 0.0)


def _where() -> str:
    """The module whose code is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module):
            return f"{type(module).__name__} "
        frame = frame.f_back
    return "it "
