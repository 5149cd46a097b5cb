"""What does a rank return for a branch that another rank computes?

A tensor without values yet. The pipeline goes on to its next branch with it in hand; the first operation that needs the
values fetches them.
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
"""What pipelines do to one branch before they compute the next: they cut off the tokens of a reference image, if there
are any (cutting off nothing is an alias)."""


class DeferredTensor(torch.Tensor):
    """A tensor of known shape whose values are fetched when they are first needed."""

    _fetch: Callable[[], torch.Tensor]
    _value: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, like: torch.Tensor, fetch: Callable[[], torch.Tensor], device: torch.device | None = None
    ) -> DeferredTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        device = device or like.device
        deferred: DeferredTensor = make(cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device)
        deferred._fetch = fetch
        deferred._value = None
        return deferred

    def __init__(
        self, like: torch.Tensor, fetch: Callable[[], torch.Tensor], device: torch.device | None = None
    ) -> None:
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
            form = torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device="meta")
            return cls(func(form, *args[1:]), lambda: func(first.value(), *args[1:], **kwargs), first.device)
        args, kwargs = tree_map(lambda part: part.value() if isinstance(part, cls) else part, (args, kwargs))
        return func(*args, **kwargs)
