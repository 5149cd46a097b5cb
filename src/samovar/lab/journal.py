"""What was measured before an interruption? A journal beside the output, from which the next run resumes.

A journal belongs to one set of settings and refuses any other, whose values would be different.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError
from ..files import read_json


class Journal:
    """Values by name, and images by name, each in its own file."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about` is everything that the values depend on, as plain JSON values."""
        self.folder = folder
        about = json.loads(json.dumps(about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"Cannot create {str(folder)!r} ({error.strerror}). Choose another output.") from error
        if (folder / "about.json").is_file():
            self._check(read_json(folder / "about.json"), about)
        else:
            self._write(folder / "about.json", about)

    def __len__(self) -> int:
        return len(list(self.folder.glob("value-*.json")))

    def __contains__(self, name: str) -> bool:
        return self._file(name).is_file()

    def __getitem__(self, name: str) -> Any:
        return read_json(self._file(name))["value"]

    def record(self, name: str, value: Any) -> None:
        self._write(self._file(name), {"name": name, "value": value})

    def _file(self, name: str) -> Path:
        return self.folder / f"value-{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"

    def _write(self, file: Path, content: Mapping[str, Any]) -> None:
        """A file is there whole or not at all, whenever the process is killed."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(file)

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

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            shown = "; ".join(f"{name}: {_change(before.get(name), now.get(name))}" for name in changed)
            raise SettingError(
                f"{str(self.folder)!r} holds an unfinished run with other settings ({shown}). Finish that run with its "
                "settings, delete the folder, or choose another output."
            )


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
