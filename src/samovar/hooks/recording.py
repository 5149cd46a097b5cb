"""May a forward be replayed instead of run? By a recorder, which a room above gives to the registry of a module.

A forward that somebody watches, or answers parts of, must run: its Python code is what is watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, Protocol

import torch


class Steady(tuple[Any, ...]):
    """Tensors among what a function is given that nobody ever writes into: they need be copied once."""

    __slots__ = ()


class _Every(frozenset[Any]):
    def __contains__(self, module: object) -> bool:
        return True


EVERY_MODULE: Collection[torch.nn.Module] = _Every()
"""For a function that calls no module."""


class Recorder(Protocol):
    """Runs functions of tensors, or replays what they did."""

    def __call__(
        self, what: Hashable, function: Callable[[Any], Any], given: Any, idle: Collection[torch.nn.Module] = ()
    ) -> Any:
        """What the function returns for what is given: tensors, numbers and strings in any containers. `what` names the
        function: one of the same name does the same for inputs of the same form. `idle`: modules that it does not
        call."""

    def ahead(self, what: Hashable, given: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, such a function needs only be launched: for those who first wait for the device."""

    def refuses(self, what: Hashable) -> bool:
        """Whether such a function is known to run each time, so that it need not be asked for."""


class _Watched(threading.local):
    depth = 0


_watched = _Watched()


def is_watched() -> bool:
    """Whether forwards on this thread must run."""
    return _watched.depth > 0


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, forwards on this thread run."""
    _watched.depth += 1
    try:
        yield
    finally:
        _watched.depth -= 1
