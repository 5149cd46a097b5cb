"""What a forward does that a replay would not do again: seen by running it once, operation by operation.

A replay repeats kernels with the addresses that they had. It does not wait for numbers, so nothing may depend on them
in Python; it copies nothing from the host; what it writes outside of its own memory would be lost or repeated; and what
is added up in no fixed order has other bits each time, so that nothing could be compared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.interop import memory_of
from ..core.nested import ATOMS
from ..core.tensor_parts import is_plain

_WAITS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_INDEXING = ("index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put", "_index_put_impl_")
_UNORDERED = ("scatter_add", "scatter_add_", "index_add", "index_add_")
"""On a GPU these add in whatever order threads arrive."""

_MAKERS = (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)


class Audit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the first thing that a replay would not do, and what is read from outside."""

    supports_higher_order_operators = True  # Flex attention is one.

    def __init__(self, inputs: Iterable[torch.Tensor], weights: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.problem: str | None = None
        self.constants: list[torch.Tensor] = []
        """Tensors that are read and are neither inputs nor weights. Whoever replays must keep them."""
        self._inputs, self._made = set(map(memory_of, inputs)), set[int]()
        self._known = self._inputs.union(map(memory_of, weights))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = _tensors((args, kwargs))
        outside = {memory_of(tensor): tensor for tensor in read if memory_of(tensor) not in self._known | self._made}
        self._known |= outside.keys()
        self.constants += outside.values()
        output = func(*args, **(kwargs or {}))
        made = _tensors(output)
        self._made |= set(map(memory_of, made)) - self._known
        if self.problem is None and isinstance(func, torch._ops.OpOverload):
            seen = [*(tensor for tensor in read if tensor.dim()), *made]
            self.problem = next(self._problems(func, args, kwargs or {}, seen), None)
        return output

    def _problems(self, func: Any, args: Any, kwargs: Any, seen: list[torch.Tensor]) -> Iterator[str]:
        name, arguments = func.__name__.partition(".")[0], func._schema.arguments
        if name in _INDEXING:
            if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1])):
                yield f"waits for the device ({name} with a mask)"
        elif _WAITS.intersection(func.tags):
            yield f"waits for the device ({name})"
        if name in _UNORDERED:
            yield f"adds up in no fixed order ({name}), so that its bits differ from run to run"
        if len({tensor.device.type for tensor in seen}) > 1:
            yield f"copies between devices ({name})"
        given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
        written = [given.get(one.name) for one in arguments if one.alias_info is not None and one.alias_info.is_write]
        for memory in set(map(memory_of, _tensors(written))) - self._made:
            yield f"writes into {'its inputs' if memory in self._inputs else 'what outlives it'} ({name})"


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
        like: Any = torch.get_default_dtype()
        values, named = args, kwargs or {}
        if func is torch.Tensor.new_tensor:
            like, values = (args[0].dtype, args[0].device), args[1:]
        is_known = func in _MAKERS and all(isinstance(leaf, ATOMS) for leaf in pytree.tree_leaves((values, named)))
        # Compared by their text: an array is too long for that.
        key = (func, like, repr(values), repr(named)) if is_known else None
        if key in self.made:
            return self.made[key].clone()
        made = func(*args, **named)
        if key is not None and made.device == self._device:
            self.made[key] = made.clone()
        return made
