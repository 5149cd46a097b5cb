"""A value as it was at a call, for comparison with that of a later one."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..core import nested

MAX_COMPARED = 4096
"""Elements that are copied of a tensor whose changes torch does not count, which are those of inference mode."""


class Snapshot:
    """A value as it was. One that is not held is known as long as it lives."""

    def __init__(self, value: Any, *, hold: bool = True) -> None:
        self._value, self._version, self._some = value, None, None
        if not isinstance(value, torch.Tensor):
            self._value = nested.map_tensors(lambda tensor: tensor, value)  # A model may fill an empty container.
            return
        self._version = nested.version(value)
        if not hold:
            self._value = weakref.ref(value)
        elif self._version is None and _is_comparable(value):
            self._some = nested.spread(value, MAX_COMPARED).clone()

    @property
    def value(self) -> Any:
        """The value, unless it is gone or a container."""
        return self._value() if isinstance(self._value, weakref.ref) else self._value

    def is_same(self, value: Any, *, looks: bool = True) -> bool:
        """Whether a value is this one. Unless it `looks` into tensors, which may wait for the device, it is the object
        that counts."""
        held = self._value() if isinstance(self._value, weakref.ref) else self._value
        if not isinstance(value, torch.Tensor) or not isinstance(held, torch.Tensor):
            return (held is value and isinstance(held, (bool, int, str, type(None)))) or nested.equal(held, value)
        is_kept = nested.version(held) == self._version
        if held is value and (self._some is None or not looks):
            return is_kept
        if not (looks and is_kept and _is_comparable(value) and nested.signature(held) == nested.signature(value)):
            return False
        if self._some is None:
            return torch.equal(held, value)
        return torch.equal(self._some, nested.spread(value, MAX_COMPARED))


def _is_comparable(tensor: torch.Tensor) -> bool:
    """Whether a look into a tensor has no side effects: that of a subclass may wait for other ranks."""
    return nested.is_comparable(tensor) and type(tensor) in (torch.Tensor, torch.nn.Parameter)
