"""What a forward does that a replay would not do again: seen by running it once, operation by operation.

A replay repeats kernels with the addresses that they had. It does not wait for numbers, so nothing may depend on them
in Python; it copies nothing from the host; and what it writes outside of its own memory would be lost or repeated.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.interop import memory_of
from ..core.nested import ATOMS
from ..core.tensor_parts import is_plain

_WAITS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first thing that a replay would not do, and what is read from outside."""

    supports_higher_order_operators = True  # Flex attention is one.

    def __init__(self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self.constants: list[torch.Tensor] = []
        """Tensors that are read and are neither inputs nor weights. Whoever replays must keep them."""
        self._inputs = set(map(memory_of, inputs))
        self._known, self._made = self._inputs.union(map(memory_of, weights)), set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _tensors((args, kwargs))
        for tensor in read:
            if memory_of(tensor) not in self._known | self._made:
                self._known.add(memory_of(tensor))
                self.constants.append(tensor)
        output = func(*args, **(kwargs or {}))
        made = _tensors(output)
        self._made |= set(map(memory_of, made)) - self._known
        if self.problem is None and isinstance(func, torch._ops.OpOverload):
            self.problem = self._problem(func, args, kwargs or {}, [*(t for t in read if t.dim()), *made])
        return output

    def _problem(self, func: Any, args: Any, kwargs: Any, seen: list[torch.Tensor]) -> str | None:
        name = func.__name__.partition(".")[0]
        if name in _INDEXING:
            if any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1])):
                return f"waits for the device ({name} with a mask)"
        elif any(tag in func.tags for tag in _WAITS):
            return f"waits for the device ({name})"
        if len({tensor.device.type for tensor in seen}) > 1:
            return f"copies between devices ({name})"
        arguments = func._schema.arguments
        given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        for one in arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for memory in set(map(memory_of, _tensors(given.get(one.name)))) - self._made:
                    return f"writes into {'its inputs' if memory in self._inputs else 'what outlives it'} ({name})"
        return None


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and is_plain(leaf)]


class Constants(TorchFunctionMode):
    """Tensors made of Python's numbers are made once, and copied by who makes the same again: a graph cannot copy them
    from the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.made: dict[Hashable, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = _key(func, args, kwargs or {})
        if key in self.made:
            return self.made[key].clone()
        made = func(*args, **(kwargs or {}))
        if key is not None and made.device == self._device:
            self.made[key] = made.clone()
        return made


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable:
    """What two calls share that make the same tensor of numbers; None for any other call."""
    like: Any = torch.get_default_dtype()
    if func is torch.Tensor.new_tensor:
        like, args = (args[0].dtype, args[0].device), args[1:]
    elif func not in (torch.tensor, torch.as_tensor):
        return None
    # An array is too long to compare by its text.
    is_plain = all(isinstance(leaf, ATOMS) for leaf in pytree.tree_leaves((args, kwargs)))
    return (func, like, repr(args), repr(kwargs)) if is_plain else None
