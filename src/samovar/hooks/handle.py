"""Handles of what was attached: `handle.detach()`, or leave the `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Self


class Handle:
    """Returned by everything that attaches to a pipeline or a module. Detaching twice does nothing."""

    def __init__(self, undo: contextlib.ExitStack | None = None) -> None:
        self._undo = undo or contextlib.ExitStack()

    def detach(self) -> None:
        """Take it off: the pipeline or module is what it was before."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


@contextlib.contextmanager
def for_now(owner: Any, **attributes: Any) -> Iterator[None]:
    """Inside, an object has these attributes; afterwards those that it had."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
