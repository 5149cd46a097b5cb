"""What was measured before an interruption? A journal beside the output, from which the next run resumes.

Each value is on the disk before the next one is measured. A journal belongs to one set of settings and refuses any
other, whose values would be different.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError


class Journal:
    """Values by name, and images by name."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about` is everything that the values depend on, as plain JSON values."""
        self.folder = folder
        self._file = folder / "journal.jsonl"
        self._values: dict[str, Any] = {}
        about = json.loads(json.dumps(about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"Cannot create {str(folder)!r} ({error.strerror}). Choose another output.") from error
        entries = self._read()
        if not entries:
            self._append({"about": about})
        else:
            self._check(entries[0]["about"], about)
            self._values = {entry["name"]: entry["value"] for entry in entries[1:]}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def record(self, name: str, value: Any) -> None:
        """Write a value to the disk."""
        self._append({"name": name, "value": value})
        self._values[name] = json.loads(json.dumps(value))

    def save_images(self, name: str, images: torch.Tensor) -> None:
        """Save images, not rounded. `record` the values that belong to them afterwards."""
        from safetensors.torch import save_file

        part = self.folder / f"{name}.part"
        save_file({"images": images.detach().cpu().contiguous()}, part)
        part.replace(self.folder / f"{name}.safetensors")

    def load_images(self, name: str) -> torch.Tensor:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")["images"]

    def delete(self) -> None:
        """Everything is done and written elsewhere."""
        shutil.rmtree(self.folder)

    def _read(self) -> list[Any]:
        lines = self._file.read_text(encoding="utf-8").split("\n") if self._file.is_file() else [""]
        if lines[-1]:  # Cut off by the interruption; its value is measured again.
            self._file.write_text("".join(f"{line}\n" for line in lines[:-1]), encoding="utf-8")
        return [json.loads(line) for line in lines[:-1]]

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            shown = "; ".join(f"{name}: {_change(before.get(name), now.get(name))}" for name in changed)
            raise SettingError(
                f"{str(self.folder)!r} holds an unfinished run with other settings ({shown}). Finish that run with its "
                "settings, delete the folder, or choose another output."
            )

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _change(before: Any, now: Any) -> str:
    """A changed setting in a few words: of lists and mappings, their sizes and the first difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        before, now = list(before.items()), list(now.items())
    if isinstance(before, list) and isinstance(now, list):
        sizes = f"{len(before)} before, {len(now)} now"
        pair = next(((a, b) for a, b in zip(before, now, strict=False) if a != b), None)
        return sizes if pair is None else f"{sizes}, {_change(*map(repr, pair))}"
    old, new = (textwrap.shorten(str(value), 80, placeholder=" ...") for value in (before, now))
    return f"was {old}, is {new}"
