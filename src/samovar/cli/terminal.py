"""How does text look on a terminal, and how in a file?"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO


class Status:
    """A line that says what is going on, for as long as it does. Only a terminal sees it."""

    def __init__(self, text: str, quiet: bool = False) -> None:
        self._text = f"samovar: {text} ..."
        self._is_shown = self.is_shown(quiet)

    @staticmethod
    def is_shown(quiet: bool) -> bool:
        return sys.stderr.isatty() and not quiet

    def __enter__(self) -> None:
        if self._is_shown:
            print(self._text, end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            print("\r" + " " * len(self._text) + "\r", end="", file=sys.stderr, flush=True)


class Paint:
    """Colours for a terminal, none for a file, and none where NO_COLOR is set."""

    def __init__(self, stream: TextIO) -> None:
        self._is_on = stream.isatty() and "NO_COLOR" not in os.environ

    def __call__(self, text: str, code: int) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_on else text

    def bold(self, text: str) -> str:
        return self(text, 1)

    def dim(self, text: str) -> str:
        return self(text, 2)

    def yes_or_no(self, yes: bool | None) -> str:
        return self("yes", 32) if yes else self("?  ", 33) if yes is None else self("no ", 31)


def gib(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines, column under column."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(pads, row, widths, strict=True)).rstrip() for row in rows]
