"""Jobs are there again after a restart, in order, and go when their time is over."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.server.job_store import JobStore, VideoJob


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with closing(JobStore(tmp_path / "jobs")) as opened:
        yield opened


def job(store: JobStore, **values: Any) -> VideoJob:
    fields = {name: values.pop(name) for name in ("status", "expires_at") if name in values}
    made = VideoJob("wan", {"prompt": "a cat", **values}, "48x32", 1.0, 100, **fields)
    store.add(made)
    return made


def test_a_job_is_there_again(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path)) as store:
        kept = job(store, seed=7)
        kept.status, kept.attempts, kept.error = "failed", 2, {"code": "x", "message": "y"}
        assert store.save(kept)
        assert store.write(kept.id, {"image-0.png": b"123"}) == 3
    with closing(JobStore(tmp_path)) as store:
        assert store.get(kept.id) == kept
        assert store.file(kept.id, "image-0.png").read_bytes() == b"123"


def test_the_next_one_has_the_highest_priority_and_waited_longest(store: JobStore) -> None:
    one, two, first = job(store), job(store), job(store, priority=5)
    job(store, status="completed")
    running = job(store, status="in_progress")
    assert [each.id for each in store.queued()] == [first.id, one.id, two.id]
    assert [each.id for each in store.begun()] == [running.id]


def test_pages_follow_each_other(store: JobStore) -> None:
    ids = [job(store).id for _ in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        found: list[str] = []
        has_more = True
        while has_more:
            page, has_more = store.page(found[-1] if found else None, 2, order)
            found += [each.id for each in page]
        assert found == expected


def test_what_has_expired_is_not_found_and_goes(store: JobStore) -> None:
    old, new = job(store, expires_at=time.time() - 1), job(store, expires_at=time.time() + 1000)
    store.write(old.id, {"video.mp4": b"x"})
    assert store.get(old.id) is None
    assert [each.id for each in store.page(None, 9, "asc")[0]] == [new.id]
    assert store.used_bytes() == 200
    store.remove_expired()
    assert store.used_bytes() == 100
    assert not store.file(old.id, "").exists()


def test_what_was_deleted_cannot_be_saved(store: JobStore) -> None:
    gone = job(store)
    store.write(gone.id, {"video.mp4": b"x"})
    store.remove(gone.id)
    assert not store.save(gone)
    assert store.get(gone.id) is None
    assert list(store.folder.glob("video_*")) == []


def test_folders_of_no_job_are_removed_at_the_start(tmp_path: Path) -> None:
    """A server may end between writing files and noting them."""
    with closing(JobStore(tmp_path)) as store:
        kept = job(store)
        for id in (kept.id, "video_0"):
            store.write(id, {"video.mp4": b"x"})
    (tmp_path / "mine.txt").write_text("not ours")
    with closing(JobStore(tmp_path)):
        assert sorted(path.name for path in tmp_path.glob("video_*")) == [kept.id]
        assert (tmp_path / "mine.txt").exists()


def test_a_folder_is_for_one_server(store: JobStore) -> None:
    with pytest.raises(
        SettingError, match=r"Another server keeps its jobs in .*/jobs'. Give this one its own: --jobs DIR"
    ):
        JobStore(store.folder)


def test_what_is_no_database_of_ours_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite"
    file.write_bytes(b"something else" * 1000)
    with pytest.raises(SettingError, match=r"cannot be used: file is not a database. Give another: --jobs DIR"):
        JobStore(tmp_path)
    assert file.read_bytes() == b"something else" * 1000
    file.unlink()
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(SettingError, match="its version is 9, not 1"):
        JobStore(tmp_path)
    with pytest.raises(SettingError, match="cannot be used"):
        JobStore(file)
