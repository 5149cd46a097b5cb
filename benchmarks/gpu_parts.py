"""The parts of a result: those of an earlier run are kept, each new one is written at once, and
none is begun that would not end in time."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpu_models

UNFINISHED = 3
"""The exit code of a run that left something out: run it again with the same file."""
_SAME = ("device", "torch", "diffusers", "tiny")
"""What must be equal for figures to go into one file."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to see that it runs")
    parser.add_argument("--seconds", type=float, metavar="S", help="begin nothing that would end later (no limit)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep results here; what is there is not made again")
    parser.add_argument("--again", action="store_true", help="make what is there again")


class Parts:
    """A result that grows."""

    def __init__(self, options: argparse.Namespace, about: Mapping[str, Any]) -> None:
        self._file: Path | None = options.json
        self._started, self._limit_s = time.monotonic(), options.seconds
        self.about = {**about, "tiny": options.tiny}
        self.rows: dict[str, Any] = {}
        self.left_out: list[str] = []
        self._is_again: bool = options.again
        if self._file is not None and self._file.exists():
            self.rows = json.loads(self._file.read_text(encoding="utf-8"))
            before = self.rows.get("about", {})
            differ = [name for name in _SAME if name in before and before[name] != self.about.get(name)]
            if differ and self._is_again:
                self.rows = {}
            elif differ:
                what = ", ".join(f"{name} {before[name]} instead of {self.about.get(name)}" for name in differ)
                raise SystemExit(f"{self._file} has results of another kind ({what}). Give another file, or --again.")
        self.rows = {"about": self.about} | {name: row for name, row in self.rows.items() if name != "about"}

    def is_due(self, name: str, takes_s: float) -> bool:
        """Whether a part is to be made now; says why not. `takes_s`: how long it may take, beside what is measured."""
        if not self.is_missing(name):
            print(f"{self._clock()} {name}: is there", flush=True)
            return False
        if self._limit_s is not None and self.seconds + takes_s > self._limit_s:
            left = max(0.0, self._limit_s - self.seconds)
            print(
                f"{self._clock()} {name}: left out, it takes about {takes_s:.0f} s and {left:.0f} are left", flush=True
            )
            self.left_out.append(name)
            return False
        print(f"{self._clock()} {name} ...", flush=True)
        return True

    def is_missing(self, name: str) -> bool:
        """Whether a part is not there, or is to be made again."""
        return self._is_again or self.get(name) is None

    def get(self, name: str) -> dict[str, Any] | None:
        """A part by its name, such as "flux256/max_batch_8"."""
        found: Any = self.rows
        for word in name.split("/"):
            found = found.get(word) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else None

    def note(self, name: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """Keep a part."""
        *folders, last = name.split("/")
        place = self.rows
        for word in folders:
            place = place.setdefault(word, {})
        place[last] = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(f"{self._clock()} {name}: {json.dumps(place[last])}", flush=True)
        if self._file is not None:
            gpu_models.write(self._file, self.rows)
        found: dict[str, Any] = place[last]
        return found

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._started

    def end(self) -> int:
        """The exit code, after a word on what is missing."""
        if self.left_out:
            print(f"left out: {', '.join(self.left_out)}. Run it again with the same --json to go on.", flush=True)
        return UNFINISHED if self.left_out else 0

    def _clock(self) -> str:
        return f"[{self.seconds:.0f} s]"
