"""Videos and the requests for them, in SQLite and a folder for each. They outlive the server.

An answered change survives a loss of power: it is on the disk before the answer. What is damaged is
logged and moved into the folder `aside`; no video is deleted for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import math
import os
import shutil
import sqlite3
import time
import uuid
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from ..core.errors import SettingError

_VERSION = 3
_SCHEMA = f"""PRAGMA auto_vacuum = FULL; PRAGMA synchronous = FULL; PRAGMA temp_store = MEMORY;
    PRAGMA user_version = {_VERSION};
    CREATE TABLE IF NOT EXISTS jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL,
        model TEXT NOT NULL, status TEXT NOT NULL, expires_at REAL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL);
    CREATE INDEX IF NOT EXISTS ended ON jobs (status, expires_at);
    CREATE INDEX IF NOT EXISTS expiring ON jobs (expires_at);
    CREATE TEMP TABLE totals AS SELECT COUNT(*) AS count, CAST(TOTAL(num_bytes) AS INTEGER) AS bytes FROM jobs;
    CREATE TEMP TRIGGER added AFTER INSERT ON jobs
        BEGIN UPDATE totals SET count = count + 1, bytes = bytes + NEW.num_bytes; END;
    CREATE TEMP TRIGGER changed AFTER UPDATE ON jobs
        BEGIN UPDATE totals SET bytes = bytes + NEW.num_bytes - OLD.num_bytes; END;
    CREATE TEMP TRIGGER removed AFTER DELETE ON jobs
        BEGIN UPDATE totals SET count = count - 1, bytes = bytes - OLD.num_bytes; END;"""
"""Totals are kept in memory, by triggers: counting would read the whole index at each new job."""
_SAVE = """INSERT INTO jobs (id, model, status, expires_at, num_bytes, record) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT (id) DO UPDATE SET status = excluded.status, expires_at = excluded.expires_at,
    num_bytes = excluded.num_bytes, record = excluded.record"""
_ROW_BYTES = 1024
"""On disk, of a job besides its record and its files: its row, its entries in the indexes and its folder."""
MAX_PAGE_BYTES = 2**20

log = logging.getLogger("samovar.server")


class VideoData(BaseModel):
    """A video, made or to be made."""

    id: str = Field(default_factory=lambda: f"video_{uuid.uuid4().hex}")
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = 0
    created_at: int = Field(default_factory=lambda: int(time.time()))
    completed_at: int | None = None
    expires_at: int | None = None
    size: str
    seconds: str
    prompt: str
    remixed_from_video_id: str | None = None
    error: dict[str, str] | None = None
    samovar: dict[str, Any]


class VideoJob(VideoData):
    """The same with what only the server knows. The request is in `samovar`, with a seed that is drawn if it had
    none."""

    num_bytes: int
    """Of its files; before they are there, the most that they may take."""
    begin_by: float | None = None
    """When its client no longer waits for it to begin."""
    attempts: int = 0
    """How often it was begun."""
    turn: tuple[float, int] = Field(default=(0.0, 0), exclude=True)
    """While it waits: the lowest is next. The highest priority, then whoever waits for longest."""
    running: Any = Field(default=None, exclude=True)
    """The engine's job, from when it has been submitted."""
    preview: bytes | None = Field(default=None, exclude=True)

    @property
    def left_s(self) -> float:
        """What is left of the time in which it must begin."""
        return math.inf if self.begin_by is None else self.begin_by - time.time()


class JobStore:
    """The jobs of one server: two servers cannot share a folder. For one thread at a time, but for `write`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unfinished: dict[str, VideoJob] = {}
        """Jobs that are waited for, as they are now: the database is behind where the disk is full."""
        with contextlib.ExitStack() as opened:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                fcntl.flock(opened.enter_context(open(folder / "lock", "a")), fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._database = opened.enter_context(contextlib.closing(_open(folder / "jobs.sqlite")))
            except BlockingIOError as error:
                message = f"Another server keeps its jobs in {str(folder)!r}. Give this one its own: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            except (OSError, sqlite3.Error) as error:
                message = f"The folder of jobs, {str(folder)!r}, cannot be used: {error}. Give another: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            self.close = opened.pop_all().close
        known = {id for (id,) in self._database.execute("SELECT id FROM jobs")}
        for path in folder.glob("video_*"):  # A server may end between writing files and noting them.
            if path.name not in known:
                _set_aside(path)

    def file(self, id: str, name: str = "") -> Path:
        """Where a file of a job is. The id must be one of ours: it becomes a path."""
        return self.folder / id / name

    def find(self, where: str, *values: Any) -> list[VideoJob]:
        """Jobs by a condition. A damaged one is set aside."""
        found = []
        for id, record in self._database.execute(f"SELECT id, record FROM jobs WHERE {where}", values).fetchall():
            try:
                found.append(self.unfinished.get(id) or VideoJob.model_validate_json(record))
            except ValidationError:
                _set_aside(self.file(id))
                self.delete("id = ?", id)
        return found

    def page(self, after: str | None, limit: int, order: str) -> tuple[list[VideoJob], bool]:
        """Some jobs by age, of `MAX_PAGE_BYTES` together or a single one, and whether there are more."""
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        statement = f"""SELECT id, LENGTH(record) FROM jobs WHERE (expires_at IS NULL OR expires_at > ?)
            AND (? IS NULL OR number {sign} (SELECT number FROM jobs WHERE id = ?))
            ORDER BY number {direction} LIMIT ?"""
        sizes = self._database.execute(statement, (time.time(), after, after, limit + 1)).fetchall()
        upto = itertools.accumulate(size for _, size in sizes[:limit])
        ids = [id for (id, size), total in zip(sizes, upto, strict=False) if total <= max(size, MAX_PAGE_BYTES)]
        marks = ", ".join("?" * len(ids))
        return self.find(f"id IN ({marks}) ORDER BY number {direction}", *ids), len(ids) < len(sizes)

    def usage(self) -> tuple[int, int]:
        """How many jobs are kept, and the bytes that their files and records take, or may take when they are there."""
        found: tuple[int, int] = self._database.execute("SELECT count, bytes FROM totals").fetchone()
        return found

    def save(self, job: VideoJob) -> None:
        """Add a job or store its changes; sqlite3.OperationalError on a full disk."""
        record, num_bytes = row_of(job)
        self._database.execute(_SAVE, (job.id, job.model, job.status, job.expires_at, num_bytes, record))

    def delete(self, where: str, *values: Any) -> int:
        """Delete jobs and their files, and return how many; sqlite3.OperationalError on a full disk."""
        ids = self._database.execute(f"DELETE FROM jobs WHERE {where} RETURNING id", values).fetchall()
        for (id,) in ids:
            shutil.rmtree(self.file(id), ignore_errors=True)
        return len(ids)

    def write(self, id: str, files: dict[str, bytes]) -> int:
        """Write files of a job, each as a whole, and return the bytes of all its files."""
        folder = self.file(id)
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            with open(folder / f".{name}", "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            (folder / f".{name}").rename(folder / name)
        for path in (folder, self.folder):  # Let new names survive a loss of power.
            opened = os.open(path, os.O_RDONLY)
            os.fsync(opened)
            os.close(opened)
        return sum(file.stat().st_size for file in folder.iterdir())


def row_of(job: VideoJob) -> tuple[bytes, int]:
    """The record of a job, and the bytes that it takes on disk with its files."""
    record = job.model_dump_json().encode()
    return record, job.num_bytes + len(record) + _ROW_BYTES


def _open(file: Path) -> sqlite3.Connection:
    """The database. One that is damaged, or of another version, is set aside."""
    if file.exists() and not _is_whole(file):
        _set_aside(file)
    database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    database.executescript(_SCHEMA)
    return database


def _is_whole(file: Path) -> bool:
    with contextlib.closing(sqlite3.connect(file)) as database:
        try:
            found = [database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("user_version", "quick_check")]
        except sqlite3.DatabaseError:
            return False
    return found == [_VERSION, "ok"]


def _set_aside(path: Path) -> None:
    """Move a file or folder that is damaged, or belongs to no job, where nothing is read or deleted."""
    aside = path.parent / "aside" / f"{time.time_ns()}-{path.name}"
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
    log.error("%s is damaged, or belongs to no job: it is kept as %s", path, aside)
