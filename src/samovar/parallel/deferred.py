"""What does a rank return for a branch that another rank computes?

A tensor that is not there yet. The pipeline goes on to its next branch with it in hand; the first operation that
needs its values fetches them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

_STILL_DEFERRED = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
}
"""What pipelines do to one branch before they ask for the next: cutting off what belongs to a reference, if anything
does (cutting off nothing is an alias)."""


class DeferredTensor(torch.Tensor):
    """A tensor of known shape whose values are fetched when they are first needed."""

    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, fetch: Callable[[], torch.Tensor]) -> DeferredTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        deferred: DeferredTensor = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device)
        deferred._fetch = fetch
        deferred._value = None
        return deferred

    def __init__(self, like: torch.Tensor, fetch: Callable[[], torch.Tensor]) -> None:
        super().__init__()

    def value(self) -> torch.Tensor:
        """The tensor itself."""
        if self._value is None:
            self._value = self._fetch()
        return self._value

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.value(), memo)

    def numpy(self, *, force: bool = False) -> Any:
        return self.value().numpy(force=force)

    def tolist(self) -> list[Any]:
        return self.value().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _STILL_DEFERRED and isinstance(first, DeferredTensor) and first._value is None:
            shaped = func(torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta"), *args[1:])
            like = torch.empty_strided(shaped.shape, shaped.stride(), dtype=first.dtype, device="meta")
            return _deferred(like, first.device, lambda: func(first.value(), *args[1:], **kwargs))
        args, kwargs = tree_map(_resolved, (args, kwargs))
        return func(*args, **kwargs)


def _resolved(value: Any) -> Any:
    return value.value() if isinstance(value, DeferredTensor) else value


def _deferred(like: torch.Tensor, device: torch.device, fetch: Callable[[], torch.Tensor]) -> DeferredTensor:
    make: Any = torch.Tensor._make_wrapper_subclass
    deferred: DeferredTensor = make(DeferredTensor, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
    deferred._fetch = fetch
    deferred._value = None
    return deferred
