"""What runs show of a pipeline on a card: the memory that components need, and the time of blocks.

All of it is kept in a file, found by the model, the card and the size of the request, so that the next process plans
with it from the start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from .device import Stage
from .history import History
from .sizes import ComponentSize
from .streaming import Timing

_VERSION = 2
_MARGIN, _SPARE = 0.02, 256 * 2**20
"""What is added to what a component was seen to need, since inputs vary and torch's allocator leaves holes."""
_Span = tuple[Any, Any]
"""Two points in the work of a device."""


class Timer:
    """Takes the times of a component's forwards on the device, without waits for weights."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._blocks: dict[str, list[_Span]] = defaultdict(list)
        self._rest: list[_Span] = []
        self._forwards = 0
        self._last: Any = None
        """The last point that was taken in a forward."""

    def begin(self, path: str) -> None:
        """A block, or with no path the whole, is about to compute."""
        now = self._stage.mark_time()
        if path and self._last is not None:
            self._rest.append((self._last, now))
        self._last = now

    def end(self, path: str) -> None:
        """It has computed."""
        begun, now = self._last, self._stage.mark_time()
        if begun is not None:
            (self._blocks[path] if path else self._rest).append((begun, now))
        self._last = now if path else None
        self._forwards += not path

    def timing(self, name: str, known: Timing, decoding_s: float) -> Timing:
        """What is known, with the times of a component of that name, of which decoding took some in each forward."""

        def seconds(spans: Sequence[_Span]) -> list[float]:
            return [self._stage.seconds_between(*span) for span in spans]

        blocks = {f"{name}.{path}": statistics.median(seconds(spans)) for path, spans in self._blocks.items()}
        rest = {name: sum(seconds(self._rest)) / self._forwards} if self._forwards else {}
        whole = sum(blocks.values()) + sum(rest.values())
        share = max(whole - decoding_s, whole / 2) / whole if whole else 1.0
        blocks, rest = ({name: share * taken for name, taken in times.items()} for times in (blocks, rest))
        return replace(known, block_s={**known.block_s, **blocks}, rest_s={**known.rest_s, **rest})


def with_margin(num_bytes: int) -> int:
    """What is planned for a component that was seen to need this."""
    return int(num_bytes * (1 + _MARGIN)) + _SPARE


# ------------------------------------------------------------------------------------------------ files


def file_of(folder: Path, card: str, sizes: Sequence[ComponentSize], counted: Mapping[str, int], size: object) -> Path:
    """Where the figures of a model are kept. What was `counted` without weights depends on the size of the request,
    and on how a VAE decodes."""
    model = [(part.name, part.class_name, part.rest_bytes, [b.pieces for b in part.blocks]) for part in sizes]
    key = repr((_VERSION, card, model, sorted(counted.items()), size))
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def kept_folder(given: str | Path | None) -> Path | None:
    """The folder for files of figures: as given, none for "none", else the user's folder for what may be lost."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return None if given == "none" else Path(given or Path(root, "samovar", "offload"))


def read_history(file: Path) -> History:
    """The figures in a file; none if there is none. What is damaged is said, and measured again."""
    try:
        return History.read(file) if file.is_file() else History()
    except SettingError as error:
        warnings.warn(f"The figures in {file} cannot be used, and are measured again: {error}", stacklevel=2)
        return History()


def write_history(file: Path, history: History) -> None:
    """Keep figures in a file. Where that is impossible they are measured again by the next process."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as made:
            json.dump(asdict(history), made)
        os.replace(made.name, file)
