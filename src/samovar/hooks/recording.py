"""Forwards that are replayed instead of run: by a recorder, which a room above gives to the registry of a module.

A forward that somebody watches, or answers parts of, must run: its Python code is what is watched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

Recorder = Callable[[Callable[[Any], Any], Any], Any]
"""Runs a module's forward, or replays what it did: returns what the function returns for what is given, which are
tensors, numbers and strings in any containers. For inputs of one form it always does the same."""


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
