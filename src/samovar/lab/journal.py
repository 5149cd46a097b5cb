"""What was measured before an interruption? A journal beside the output, from which the next run goes on.

A line is written when something is known, and is on the disk before the next begins. A journal belongs to one
wish: with another one it is refused, as its figures would be of something else.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError


class Journal:
    """Values by name, and pictures by name."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about` is what all values depend on, as plain JSON values."""
        self.folder = folder
        self._file = folder / "journal.jsonl"
        self._values: dict[str, Any] = {}
        wish = json.loads(json.dumps(about))
        if self._file.is_file():
            self._read(wish)
        else:
            self._make_folder()
            self._append({"about": wish})

    @property
    def num_known(self) -> int:
        """How much was known when it was opened, or became known since."""
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def record(self, name: str, value: Any) -> None:
        """Write a value down for good."""
        self._append({"name": name, "value": value})
        self._values[name] = json.loads(json.dumps(value))

    def keep_pictures(self, name: str, pictures: torch.Tensor) -> None:
        """Pictures as they are, not rounded. `record` what belongs to them afterwards."""
        from safetensors.torch import save_file

        part = self.folder / f"{name}.part"
        save_file({"pictures": pictures.detach().cpu().contiguous()}, part)
        part.replace(self.folder / f"{name}.safetensors")

    def pictures(self, name: str) -> torch.Tensor:
        """Pictures that were kept."""
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")["pictures"]

    def close(self) -> None:
        """Everything is done and written elsewhere: nothing is left to go on with."""
        shutil.rmtree(self.folder)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(
                f"{str(self.folder)!r} cannot be made ({error.strerror}). Give another place."
            ) from error

    def _read(self, wish: Any) -> None:
        lines = self._file.read_text(encoding="utf-8").split("\n")
        if lines[-1]:  # Torn off by the interruption; what it would have said is measured again.
            text = "\n".join(lines[:-1]) + "\n"
            self._file.write_text(text if lines[:-1] else "", encoding="utf-8")
        entries = [json.loads(line) for line in lines[:-1]]
        if not entries:
            self._append({"about": wish})
            return
        before = entries[0]["about"]
        names = sorted(name for name in {*wish, *before} if wish.get(name) != before.get(name))
        if names:
            shown = ", ".join(f"{name} was {before.get(name)!r:.60} and is {wish.get(name)!r:.60}" for name in names)
            raise SettingError(
                f"{str(self.folder)!r} holds an unfinished run of another wish: {shown}. Finish that one with its "
                "settings, remove the folder, or give another output."
            )
        self._values = {entry["name"]: entry["value"] for entry in entries[1:]}

    def _append(self, entry: Mapping[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
