"""What of the numbers that a forward makes tensors of in Python? A graph cannot copy them from the host.

`torch.tensor(3, device="cuda")` copies from the host and waits for that. The numbers are the same at each call of a
form, so the tensor is made once, when the forward is tried, and a recording copies that one.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Constants(TorchFunctionMode):
    """Remembers tensors made of numbers, and gives copies of them to those who make the same again."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._made: dict[Hashable, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._made)

    def tensors(self) -> list[torch.Tensor]:
        """Those that are remembered; a recording reads them."""
        return list(self._made.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key in self._made:
            return self._made[key].clone()
        made = func(*args, **kwargs)
        if made.device == self._device:
            self._made[key] = made.clone()
        return made


def _key(func: Any, args: Any, kwargs: dict[str, Any]) -> Hashable:
    """What two calls share that make the same tensor of numbers; None for any other call."""
    if func is torch.Tensor.new_tensor:
        like, *rest = args
        return None if _holds_tensors(rest) else (func, like.dtype, like.device, repr(rest), repr(kwargs))
    if func not in (torch.tensor, torch.as_tensor) or _holds_tensors((*args, *kwargs.values())):
        return None
    return func, torch.get_default_dtype(), repr(args), repr(kwargs)


def _holds_tensors(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_holds_tensors, values))
    plain = (type(None), bool, int, float, complex, str, torch.dtype, torch.device)
    return not isinstance(values, plain)  # An array is too long to compare by its text.
