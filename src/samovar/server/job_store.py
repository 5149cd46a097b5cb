"""Where are videos and the requests for them kept? In SQLite and a folder for each, which outlive the server."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import sqlite3
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.errors import SettingError

_VERSION = 1
_TABLE = """CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, status TEXT NOT NULL, priority INTEGER NOT NULL,
    expires_at REAL, num_bytes INTEGER NOT NULL, record TEXT NOT NULL)"""
Status = Literal["queued", "in_progress", "completed", "failed"]


@dataclass
class VideoJob:
    """A video, made or to be made."""

    model: str
    values: dict[str, Any]
    """The request, as it was sent; a seed is drawn if it had none."""
    size: str
    seconds: float
    num_bytes: int
    """Of its files; before they are there, the most that they may take."""
    id: str = field(default_factory=lambda: f"video_{uuid.uuid4().hex}")
    status: Status = "queued"
    created_at: float = field(default_factory=time.time)
    completed_at: float | None = None
    expires_at: float | None = None
    remixed_from: str | None = None
    attempts: int = 0
    """How often it was begun."""
    error: dict[str, str] | None = None
    details: dict[str, Any] = field(default_factory=dict)
    """What is known of a video that was made."""

    @property
    def priority(self) -> int:
        return self.values.get("priority") or 0

    @property
    def is_over(self) -> bool:
        return self.status in ("completed", "failed")


class JobStore:
    """The jobs of one server. Two servers cannot share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as opened:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = opened.enter_context(open(folder / "lock", "a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                database = sqlite3.connect(folder / "jobs.sqlite", isolation_level=None)
                opened.callback(database.close)
                _prepare(database)
            except BlockingIOError as error:
                message = f"Another server keeps its jobs in {str(folder)!r}. Give this one its own: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            except (OSError, sqlite3.Error) as error:
                message = f"The folder of jobs, {str(folder)!r}, cannot be used: {error}. Give another: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            self._database = database
            self._opened = opened.pop_all()
        self._remove_strays()

    def close(self) -> None:
        self._opened.close()

    def add(self, job: VideoJob) -> None:
        record = json.dumps(dataclasses.asdict(job))
        self._database.execute(
            "INSERT INTO jobs (id, status, priority, expires_at, num_bytes, record) VALUES (?, ?, ?, ?, ?, ?)",
            (job.id, job.status, job.priority, job.expires_at, job.num_bytes, record),
        )

    def save(self, job: VideoJob) -> bool:
        """Note what has changed; False if the job was deleted meanwhile."""
        changed = self._database.execute(
            "UPDATE jobs SET status = ?, expires_at = ?, num_bytes = ?, record = ? WHERE id = ?",
            (job.status, job.expires_at, job.num_bytes, json.dumps(dataclasses.asdict(job)), job.id),
        )
        return changed.rowcount == 1

    def get(self, id: str) -> VideoJob | None:
        """A job that has not expired."""
        found = self._read("WHERE id = ? AND (expires_at IS NULL OR expires_at > ?)", id, time.time())
        return found[0] if found else None

    def page(self, after: str | None, limit: int, order: str) -> tuple[list[VideoJob], bool]:
        """Some jobs by age, beginning after one of them, and whether there are more."""
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        found = self._read(
            f"WHERE (expires_at IS NULL OR expires_at > ?) AND (? IS NULL OR number {sign} "
            f"(SELECT number FROM jobs WHERE id = ?)) ORDER BY number {direction} LIMIT ?",
            time.time(), after, after, limit + 1,
        )  # fmt: skip
        return found[:limit], len(found) > limit

    def queued(self) -> list[VideoJob]:
        """What waits, the next one first."""
        return self._read("WHERE status = 'queued' ORDER BY priority DESC, number")

    def begun(self) -> list[VideoJob]:
        """What is being made; after a start, what was being made when the last server ended."""
        return self._read("WHERE status = 'in_progress' ORDER BY number")

    def used_bytes(self) -> int:
        """What all files take, or may take when they are there."""
        (total,) = self._database.execute("SELECT COALESCE(SUM(num_bytes), 0) FROM jobs").fetchone()
        return int(total)

    def remove(self, id: str) -> None:
        self._database.execute("DELETE FROM jobs WHERE id = ?", (id,))
        shutil.rmtree(self.folder / id, ignore_errors=True)

    def remove_expired(self) -> None:
        for job in self._read("WHERE expires_at <= ?", time.time()):
            self.remove(job.id)

    def file(self, id: str, name: str) -> Path:
        """Where a file of a job is. The id must be one of ours: it becomes a path."""
        return self.folder / id / name

    def write(self, id: str, files: dict[str, bytes]) -> int:
        """Write files of a job, each as a whole, and return the bytes of all its files. Slow: use a thread."""
        folder = self.folder / id
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            path = folder / f".{name}"
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            path.rename(folder / name)
        return sum(file.stat().st_size for file in folder.iterdir())

    def _read(self, where: str, *values: Any) -> list[VideoJob]:
        rows = self._database.execute(f"SELECT record FROM jobs {where}", values)
        return [VideoJob(**json.loads(record)) for (record,) in rows]

    def _remove_strays(self) -> None:
        """Remove folders of no job: a server may end while it deletes or makes one."""
        known = {id for (id,) in self._database.execute("SELECT id FROM jobs")}
        for folder in self.folder.glob("video_*"):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)


def _prepare(database: sqlite3.Connection) -> None:
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"its version is {version}, not {_VERSION}")
    database.execute(f"PRAGMA user_version = {_VERSION}")
    database.execute(_TABLE)
