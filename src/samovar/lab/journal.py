"""Results of an interrupted run, from which it resumes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.errors import SettingError
from ..core.files import brief, reading


class Journal(dict[str, Any]):
    """Values by name, one a line of a file, and images, each in a file of its own. A journal belongs to one set of
    settings and refuses any other, whose values would be different."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about` is everything that the values depend on, as plain JSON values."""
        self.folder, self._file = folder, folder / "journal.jsonl"
        about = json.loads(json.dumps(about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"Cannot create {str(folder)!r} ({error.strerror}). Choose another output.") from error
        lines = self._read()
        if lines:
            self._check(lines.pop(0)[1], about)
        else:
            self._append("about", about)
        self.update(lines)

    def _read(self) -> list[tuple[str, Any]]:
        """What was written; a line that a kill has cut off is dropped."""
        if not self._file.is_file():
            return []
        text = self._file.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:
            self._file.write_bytes(whole)
        with reading(str(self._file)):
            return [tuple(json.loads(line)) for line in whole.splitlines()]

    def _append(self, name: str, value: Any) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([name, value]) + "\n")

    def record(self, name: str, value: Any) -> None:
        self._append(name, value)
        self[name] = json.loads(json.dumps(value))  # As after an interruption.

    def save_images(self, name: str, images: torch.Tensor) -> None:
        """Save images, not rounded. `record` the values that belong to them afterwards."""
        from safetensors.torch import save_file

        part = self.folder / f"{name}.part"
        save_file({"images": images.detach().cpu().contiguous()}, part)
        part.replace(self.folder / f"{name}.safetensors")

    def has_images(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

    def load_images(self, name: str) -> torch.Tensor:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")["images"]

    def delete(self) -> None:
        """Everything is done and written elsewhere."""
        shutil.rmtree(self.folder)

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            shown = "; ".join(f"{name}{_change(before.get(name), now.get(name))}" for name in changed)
            raise SettingError(
                f"{str(self.folder)!r} holds an unfinished run with other settings ({shown}). Finish that run with its "
                "settings, delete the folder, or choose another output."
            )


def _change(before: Any, now: Any) -> str:
    if isinstance(before, list) and isinstance(now, list):
        return f": {len(before)} before, {len(now)} now" if len(before) != len(now) else ""
    return f": was {brief(before)}, is {brief(now)}"
