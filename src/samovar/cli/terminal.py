"""Progress, on a terminal and in a log, and aligned tables."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Sequence

INTERVAL_S = 10.0
"""Seconds between lines in a log."""


class Status:
    """What is going on: one changing line on a terminal, and a line every ten seconds in a log."""

    def __init__(self, text: str, quiet: bool = False) -> None:
        self._text, self._quiet, self._started = text, quiet, time.monotonic()
        self._clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        self._is_over = threading.Event()

    def update(self, text: str) -> None:
        self._text = text
        if self._clear:
            self._print(f"samovar: {text} ..."[: shutil.get_terminal_size().columns - 1], end="")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._print(f"samovar: {text}")

    def _print(self, text: str, end: str = "\n") -> None:
        if not self._quiet:
            print(f"{self._clear}{text}", end=end, file=sys.stderr, flush=True)

    def _log(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            self.note(f"{self._text} ({time.monotonic() - self._started:.0f} s)")

    def __enter__(self) -> Status:
        self.update(self._text)
        if not self._clear:
            threading.Thread(target=self._log, name="samovar status", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._clear:
            self._print("", end="")


def aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    pads = [str.rjust if index in right else str.ljust for index in range(len(widths))]
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(pads, row, widths, strict=True)).rstrip() for row in rows]
