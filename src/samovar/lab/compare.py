"""What do several settings do to the same pictures? Each beside the exact ones, and beside fewer plain steps."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .methods import Method, plain
from .session import Row, Session, save_png
from .studio import Task


@dataclass(frozen=True)
class Comparison:
    """All rows, each with a folder of its pictures; the exact ones come first."""

    tasks: Sequence[Task]
    rows: Sequence[Row]
    folders: Sequence[Path]
    """For each row; a picture's name in it is the number of its task."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tasks": [task._asdict() for task in self.tasks],
            "rows": [
                {**row.to_dict(), "pictures": folder.name} for row, folder in zip(self.rows, self.folders, strict=True)
            ],
        }


def compare(session: Session, methods: Sequence[Method], pictures: Path) -> Comparison:
    """Measure methods, each followed by the plain steps that take as long. Pictures go into folders of `pictures`."""
    keys = [method.key for method in methods]
    for method in methods:
        if keys.count(method.key) > 1:
            raise SettingError(f"{method.name!r} is given twice. Give each setting once.")
    exact = session.exact()
    _save_exact(session, pictures / "exact")
    one = session.measure(plain(1), pictures / "plain-1")
    rows, folders = [exact], [pictures / "exact"]
    for number, method in enumerate(methods, start=1):
        folder = pictures / f"setting-{number}"
        row = session.measure(method, folder)
        steps = same_time_steps(exact, one, row)
        rows.append(row)
        folders.append(folder)
        folder = pictures / f"plain-{steps}"
        if folder not in folders:  # Two settings may be equally fast.
            rows.append(session.measure(plain(steps), folder))
            folders.append(folder)
    if pictures / "plain-1" not in folders:
        shutil.rmtree(pictures / "plain-1", ignore_errors=True)
    return Comparison(session.tasks, rows, folders)


def same_time_steps(exact: Row, one: Row, row: Row) -> int:
    """How many plain steps take as long as a setting. What one step takes is the difference that more of them make:
    text encoders and VAE take their time whatever is skipped. `one` is a run of one plain step."""
    each = (exact.seconds - one.seconds) / max(1, exact.steps - 1)
    if each <= 0:  # Too short to be measured.
        return max(1, min(exact.steps - 1, round(exact.steps / row.speedup)))
    return max(1, min(exact.steps - 1, 1 + round((row.seconds - one.seconds) / each)))


def _save_exact(session: Session, folder: Path) -> None:
    for number, picture in enumerate(session.exact_pictures()):
        save_png(picture, folder / f"{number}.png")
