"""Videos and the requests for them, in SQLite and a folder for each. They outlive the server.

What a client was told survives a loss of power: a change is on the disk before it is answered. Where the disk is full,
a change is kept in memory and tried again. What is damaged is logged and set aside, in the folder `aside`.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from ..core.errors import SettingError

_VERSION = 2
_SCHEMA = """CREATE TABLE jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, model TEXT NOT NULL, status TEXT NOT NULL,
    priority INTEGER NOT NULL, begin_by REAL, expires_at REAL, num_bytes INTEGER NOT NULL, record BLOB NOT NULL);
    CREATE INDEX waiting ON jobs (status, model, priority DESC, number);
    CREATE INDEX ended ON jobs (status, expires_at);
    CREATE INDEX expiring ON jobs (expires_at);"""
_INSERT = """INSERT OR IGNORE INTO jobs (id, model, status, priority, begin_by, expires_at, num_bytes, record)
    VALUES (:id, :model, :status, :priority, :begin_by, :expires_at, :num_bytes, :record)"""
_UPDATE = """UPDATE jobs SET status = :status, expires_at = :expires_at, num_bytes = :num_bytes, record = :record
    WHERE id = :id"""
_ROW_BYTES = 1024
"""On disk, of a job besides its record and its files: its row, its entries in the indexes and its folder."""
_KEEP_DAMAGED_S = 86_400.0
_DELETED = "deleted_"
"""Begins the name of the folder of a job that is deleted."""

log = logging.getLogger("samovar.server")


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
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
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
    def begin_by(self) -> float | None:
        """When its client no longer waits for it to begin."""
        deadline: float | None = self.values.get("deadline")
        return None if deadline is None else self.created_at + deadline


_RECORD = TypeAdapter(VideoJob)


class JobStore:
    """The jobs of one server. Two servers cannot share a folder. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as opened:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = opened.enter_context(open(folder / "lock", "a"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._database = opened.enter_context(contextlib.closing(_open(folder / "jobs.sqlite")))
                self._sizes: dict[str, int] = dict(self._database.execute("SELECT id, num_bytes FROM jobs"))
            except BlockingIOError as error:
                message = f"Another server keeps its jobs in {str(folder)!r}. Give this one its own: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            except (OSError, sqlite3.Error) as error:
                message = f"The folder of jobs, {str(folder)!r}, cannot be used: {error}. Give another: --jobs DIR."
                raise SettingError(message, param="jobs") from error
            self._opened = opened.pop_all()
        self.used_bytes = sum(self._sizes.values())
        """What all files and records take, or may take when they are there."""
        self._unsaved: dict[str, VideoJob | None] = {}
        """Changes that could not be stored; None is a deletion."""
        self._sort_folders()

    def __len__(self) -> int:
        return len(self._sizes)

    def close(self) -> None:
        self._opened.close()

    def add(self, job: VideoJob) -> None:
        """Keep a job; sqlite3.Error if there is no room."""
        self.file(job.id, "").mkdir(mode=0o700, exist_ok=True)
        row = _row(job)
        self._database.execute(_INSERT, row)
        self._note(job.id, row["num_bytes"])

    def save(self, job: VideoJob) -> bool:
        """Note what has changed; False if the job was deleted meanwhile."""
        if job.id not in self._sizes:
            return False
        self._store(job.id, job)
        return True

    def remove(self, id: str) -> bool:
        """Delete a job and its files; False if there is none. Where the disk is full, its row goes later."""
        if id not in self._sizes:
            return False
        with contextlib.suppress(OSError):  # The folder may be gone.
            self.file(id, "").rename(self._doomed(id))
            for file in self._doomed(id).iterdir():
                file.unlink()
        self.used_bytes -= self._sizes.pop(id)
        self._store(id, None)
        return True

    def retry(self) -> bool:
        """Store what could not be stored; whether all of it is."""
        for id, job in list(self._unsaved.items()):
            self._store(id, job)
        return not self._unsaved

    def get(self, id: str) -> VideoJob | None:
        """A job that has not expired."""
        return next(self._jobs("id = ? AND (expires_at IS NULL OR expires_at > ?)", id, time.time()), None)

    def page(self, after: str | None, limit: int, order: str, max_bytes: int) -> tuple[list[VideoJob], bool]:
        """Some jobs by age, beginning after one of them, and whether there are more. Together they are no longer than
        `max_bytes`, unless a single one is."""
        sign, direction = (">", "ASC") if order == "asc" else ("<", "DESC")
        behind = f"(? IS NULL OR number {sign} (SELECT number FROM jobs WHERE id = ?)) ORDER BY number {direction}"
        found: list[VideoJob] = []
        left = max_bytes
        for job in self._jobs(f"(expires_at IS NULL OR expires_at > ?) AND {behind}", time.time(), after, after):
            left -= len(_RECORD.dump_json(job))
            if len(found) == limit or (found and left < 0):
                return found, True
            found.append(job)
        return found, False

    def waiting(self, model: str, most: int) -> list[VideoJob]:
        """What waits for a server of this model, the next one first."""
        found = self._jobs("status = 'queued' AND model = ? ORDER BY priority DESC, number", model)
        return list(itertools.islice((job for job in found if job.status == "queued"), most))

    def num_waiting(self, model: str) -> int:
        where = "WHERE status = 'queued' AND model = ?"
        return int(self._database.execute(f"SELECT COUNT(*) FROM jobs {where}", (model,)).fetchone()[0])

    def begun(self, model: str) -> list[VideoJob]:
        """What is being made; after a start, what was being made when the last server ended."""
        return list(self._jobs("status = 'in_progress' AND model = ? ORDER BY number", model))

    def remove_expired(self) -> None:
        for (id,) in self._database.execute("SELECT id FROM jobs WHERE expires_at <= ?", (time.time(),)).fetchall():
            self.remove(id)
        with contextlib.suppress(sqlite3.OperationalError):  # A full disk.
            self._database.executescript("PRAGMA incremental_vacuum")

    def remove_oldest_failure(self) -> bool:
        """Make room for others; False if there is no failed job."""
        found = self._database.execute("SELECT id FROM jobs WHERE status = 'failed' ORDER BY expires_at").fetchone()
        return found is not None and self.remove(found[0])

    def file(self, id: str, name: str) -> Path:
        """Where a file of a job is. The id must be one of ours: it becomes a path."""
        return self.folder / id / name

    def write(self, id: str, files: dict[str, bytes]) -> int:
        """Write files of a job, each as a whole, and return the bytes of all its files. Any thread may."""
        folder = self.folder / id
        folder.mkdir(mode=0o700, exist_ok=True)
        for name, content in files.items():
            path = folder / f".{name}"
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            path.rename(folder / name)
        for path in (folder, self.folder):
            _sync_folder(path)
        return sum(file.stat().st_size for file in folder.iterdir())

    # ------------------------------------------------------------------------------------------ rows

    def _jobs(self, where: str, *values: Any) -> Iterator[VideoJob]:
        """Jobs of the database, with changes that are not stored yet."""
        statement = f"SELECT id, record FROM jobs WHERE status != 'damaged' AND {where}"
        for id, record in self._database.execute(statement, values):
            job = self._unsaved.get(id)
            if job is None and id in self._sizes:
                try:
                    job = _RECORD.validate_json(record)
                except ValidationError:
                    self._set_damaged(id)
            if job is not None:
                yield job

    def _set_damaged(self, id: str) -> None:
        log.error("the record of %s is damaged: the job is skipped, and its folder stays for a day", id)
        change = "UPDATE jobs SET status = 'damaged', expires_at = COALESCE(expires_at, ?) WHERE id = ?"
        with contextlib.suppress(sqlite3.OperationalError):  # A full disk: it is found again.
            self._database.execute(change, (time.time() + _KEEP_DAMAGED_S, id))

    def _store(self, id: str, job: VideoJob | None) -> None:
        try:
            if job is None:
                self._database.execute("DELETE FROM jobs WHERE id = ?", (id,))
                shutil.rmtree(self._doomed(id), ignore_errors=True)  # Until now it told the next server.
            else:
                row = _row(job)
                self._database.execute(_UPDATE, row)
                self._note(id, row["num_bytes"])
            self._unsaved.pop(id, None)
        except sqlite3.OperationalError as error:
            if id not in self._unsaved:
                log.error("a change of %s cannot be stored, and is tried again: %s", id, error)
            self._unsaved[id] = job

    def _note(self, id: str, num_bytes: int) -> None:
        self.used_bytes += num_bytes - self._sizes.get(id, 0)
        self._sizes[id] = num_bytes

    # ------------------------------------------------------------------------------------------ folders

    def _doomed(self, id: str) -> Path:
        """The folder of a job that is deleted."""
        return self.folder / f"{_DELETED}{id}"

    def _sort_folders(self) -> None:
        """Finish deletions, and set aside folders of no job: a server may have ended while it made or deleted one."""
        for folder in self.folder.glob(f"{_DELETED}*"):
            id = folder.name.removeprefix(_DELETED)
            if not self.remove(id):
                shutil.rmtree(folder, ignore_errors=True)
        for folder in self.folder.glob("video_*"):
            if folder.name not in self._sizes:
                _set_aside(folder)


def _row(job: VideoJob) -> dict[str, Any]:
    record = _RECORD.dump_json(job)
    columns = {name: getattr(job, name) for name in ("id", "model", "status", "begin_by", "expires_at")}
    num_bytes = job.num_bytes + len(record) + _ROW_BYTES
    return columns | {"priority": job.values.get("priority") or 0, "num_bytes": num_bytes, "record": record}


def _open(file: Path) -> sqlite3.Connection:
    """The database. One that is damaged, or of an older version, is set aside, and what can be read of it is copied."""
    database = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, 1, _VERSION):
        raise sqlite3.DatabaseError(f"its version is {version}, not {_VERSION}")
    if version == 0 or (version == _VERSION and _is_whole(database)):
        return _prepared(database, is_new=version == 0)
    database.close()
    aside = _set_aside(file)
    for end in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            file.with_name(f"{file.name}{end}").rename(f"{aside}{end}")
    database = _prepared(sqlite3.connect(file, isolation_level=None, check_same_thread=False), is_new=True)
    with contextlib.closing(sqlite3.connect(aside)) as old:
        for job in _readable(old):
            database.execute(_INSERT, _row(job))
    return database


def _prepared(database: sqlite3.Connection, *, is_new: bool) -> sqlite3.Connection:
    for setting in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = FULL",
                    f"journal_size_limit = {2**20}", "wal_autocheckpoint = 250"):  # fmt: skip
        database.execute(f"PRAGMA {setting}")
    if is_new:
        database.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
    return database


def _is_whole(database: sqlite3.Connection) -> bool:
    try:
        return bool(database.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
    except sqlite3.DatabaseError:
        return False


def _readable(database: sqlite3.Connection) -> Iterator[VideoJob]:
    """The jobs of a damaged database, from its first to the damage, then from its last."""
    for direction in ("ASC", "DESC"):
        with contextlib.suppress(sqlite3.DatabaseError):
            for (record,) in database.execute(f"SELECT record FROM jobs ORDER BY number {direction}"):
                with contextlib.suppress(ValidationError):
                    yield _RECORD.validate_json(record)


def _set_aside(path: Path) -> Path:
    """Move a file or folder that is damaged, or belongs to no job, where nothing is read or deleted."""
    aside = path.parent / "aside" / f"{time.time_ns()}-{path.name}"
    aside.parent.mkdir(mode=0o700, exist_ok=True)
    path.rename(aside)
    log.error("%s is damaged, or belongs to no job: it is kept as %s", path, aside)
    return aside


def _sync_folder(folder: Path) -> None:
    """Let the names of new files survive a loss of power."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
