"""Jobs are there again after a restart, in order, and go when their time is over."""

from __future__ import annotations

import dataclasses
import json
import shutil
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


def page(store: JobStore, after: str | None = None, limit: int = 100, order: str = "asc") -> tuple[list[str], bool]:
    jobs, has_more = store.page(after, limit, order, max_bytes=10_000)
    return [each.id for each in jobs], has_more


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


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
    assert [each.id for each in store.waiting("wan", 9)] == [first.id, one.id, two.id]
    assert [each.id for each in store.waiting("wan", 2)] == [first.id, one.id]
    assert (store.waiting("flux", 9), store.num_waiting("wan"), store.num_waiting("flux")) == ([], 3, 0)
    assert [each.id for each in store.begun("wan")] == [running.id]


def test_pages_follow_each_other(store: JobStore) -> None:
    ids = [job(store).id for _ in range(5)]
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        found: list[str] = []
        has_more = True
        while has_more:
            more, has_more = page(store, found[-1] if found else None, 2, order)
            found += more
        assert found == expected


def test_a_page_is_bounded_by_its_bytes_but_has_one_job_at_least(store: JobStore) -> None:
    ids = [job(store, negative_prompt="x" * length).id for length in (3000, 3000, 3000, 3000, 20_000, 10)]
    assert page(store) == (ids[:3], True)
    assert page(store, ids[2]) == (ids[3:4], True)
    assert page(store, ids[3]) == (ids[4:5], True)
    assert page(store, ids[4]) == (ids[5:], False)


def test_what_has_expired_is_not_found_and_goes(store: JobStore) -> None:
    old, new = job(store, expires_at=time.time() - 1), job(store, expires_at=time.time() + 1000)
    store.write(old.id, {"video.mp4": b"x"})
    assert store.get(old.id) is None
    assert page(store) == ([new.id], False)
    both = store.used_bytes
    store.remove_expired()
    assert len(store) == 1
    assert store.used_bytes == pytest.approx(both / 2, abs=20)
    assert not store.file(old.id, "").exists()


def test_records_count_and_the_database_shrinks(tmp_path: Path) -> None:
    """What is kept is counted; what was deleted leaves no more than the log of SQLite."""
    with closing(JobStore(tmp_path)) as store:
        made = [job(store, negative_prompt="\U0001f600" * 32_000) for _ in range(60)]
        assert 60 * 128_000 < store.used_bytes < 60 * 130_000
        assert store.used_bytes * 0.9 < size(tmp_path) < store.used_bytes + 2**22
        used = store.used_bytes
        made[0].num_bytes += 500
        assert store.save(made[0])
        assert store.used_bytes == used + 500
    with closing(JobStore(tmp_path)) as store:
        assert store.used_bytes == used + 500
        for each in made:
            assert store.remove(each.id)
        store.remove_expired()
        assert (len(store), store.used_bytes) == (0, 0)
    assert size(tmp_path) < 2**20


def test_what_failed_first_makes_room(store: JobStore) -> None:
    now = time.time()
    done = job(store, status="completed", expires_at=now + 1)
    late, early = (job(store, status="failed", expires_at=now + left) for left in (20, 10))
    assert store.remove_oldest_failure()
    assert page(store)[0] == [done.id, late.id]
    assert store.remove_oldest_failure()
    assert not store.remove_oldest_failure()
    assert store.get(early.id) is None


def full(store: JobStore, is_full: bool) -> None:
    """Let the database grow no further, as on a full disk, or again."""
    (count,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {count if is_full else 2**20}").fetchone()


def test_an_end_that_cannot_be_stored_is_seen_and_stored_later(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path)) as store:
        runs, waits = job(store, status="in_progress"), job(store)
        full(store, True)
        with pytest.raises(sqlite3.OperationalError, match="full"):
            job(store, negative_prompt="x" * 100_000)
        runs.status, runs.error = "failed", {"code": "x", "message": "y" * 100_000}
        assert store.save(runs)
        found = store.get(runs.id)
        assert found is not None
        assert found.status == "failed"
        assert [each.status for each in store.page(None, 9, "asc", 10**6)[0]] == ["failed", "queued"]
        assert store.remove(waits.id)
        assert store.get(waits.id) is None
        assert store.waiting("wan", 9) == []
        assert not store.retry()
        full(store, False)
        assert store.retry()
    with closing(JobStore(tmp_path)) as store:
        assert page(store)[0] == [runs.id]
        assert store.get(runs.id) == runs


def test_what_was_deleted_on_a_full_disk_is_not_made_by_the_next_server(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path)) as store:
        gone, kept = job(store), job(store)
        store.write(gone.id, {"image-0.png": b"x"})
        store._database.execute("PRAGMA query_only = ON")  # No row can be written at all.
        assert store.remove(gone.id)
        assert not store.retry()
    with closing(JobStore(tmp_path)) as store:
        assert [each.id for each in store.waiting("wan", 9)] == [kept.id]
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {kept.id}


@pytest.mark.parametrize("record", ["{}", "garbage", '{"model": 5}', b"\xff", "null"])
def test_a_damaged_record_is_skipped(tmp_path: Path, record: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    with closing(JobStore(tmp_path)) as store:
        bad, good = job(store), job(store)
        store._database.execute("UPDATE jobs SET record = ? WHERE id = ?", (record, bad.id))
    with closing(JobStore(tmp_path)) as store:
        assert [each.id for each in store.waiting("wan", 9)] == page(store)[0] == [good.id]
        assert store.get(bad.id) is None
        assert caplog.text.count("is damaged") == 1
        assert store.file(bad.id, "").exists(), "its files may be all that is left"
        assert store.remove(bad.id)
        assert (len(store), store.file(bad.id, "").exists()) == (1, False)


def test_a_damaged_log_of_sqlite_deletes_no_video(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SQLite forgets what it cannot read of it without a word."""
    with closing(JobStore(tmp_path / "jobs")) as store:
        done = job(store, status="completed")
        store.write(done.id, {"video.mp4": b"a video"})
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "jobs", copy)  # As if the server were killed now.
    wal = copy / "jobs.sqlite-wal"
    content = wal.read_bytes()
    wal.write_bytes(content[:100] + bytes(5000) + content[5100:])
    with closing(JobStore(copy)) as store:
        assert page(store) == ([], False)
        (kept,) = (copy / "aside").iterdir()
        assert kept.name.endswith(done.id)
        assert (kept / "video.mp4").read_bytes() == b"a video"
        assert "belongs to no job: it is kept as" in caplog.text


def test_a_damaged_database_is_set_aside_and_read_as_far_as_possible(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path)) as store:
        ids = [job(store, negative_prompt="x" * 3000, status="completed").id for _ in range(40)]
        for id in ids:
            store.write(id, {"video.mp4": id.encode()})
    file = tmp_path / "jobs.sqlite"
    content = bytearray(file.read_bytes())
    content[17 * 4096 : 19 * 4096] = b"\xa5" * 2 * 4096
    file.write_bytes(content)
    with closing(JobStore(tmp_path)) as store:
        found = page(store, limit=1000)[0]
        everything = {path.read_text() for path in tmp_path.rglob("video.mp4")}
        assert found
        assert set(found) < set(ids)
        assert everything == set(ids), "those that are not found are set aside"
        assert any(path.name.endswith("jobs.sqlite") for path in (tmp_path / "aside").iterdir())
        assert store.get(job(store).id) is not None


def test_the_jobs_of_the_first_version_are_taken_over(tmp_path: Path) -> None:
    made = VideoJob("wan", {"prompt": "a cat", "priority": 3, "deadline": 9.0}, "48x32", 1.0, 100)
    with closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as database, database:
        database.execute("CREATE TABLE jobs (number INTEGER PRIMARY KEY AUTOINCREMENT, id, status, record TEXT)")
        rows = [(made.id, "queued", json.dumps(dataclasses.asdict(made))), ("video_1", "queued", "{}")]
        database.executemany("INSERT INTO jobs (id, status, record) VALUES (?, ?, ?)", rows)
        database.execute("PRAGMA user_version = 1")
    with closing(JobStore(tmp_path)) as store:
        assert store.waiting("wan", 9) == [made]
        assert len(store) == 1


def test_what_was_deleted_cannot_be_saved(store: JobStore) -> None:
    gone = job(store)
    store.write(gone.id, {"video.mp4": b"x"})
    store.remove(gone.id)
    assert not store.save(gone)
    assert store.get(gone.id) is None
    assert [path for path in store.folder.iterdir() if path.is_dir()] == []


def test_folders_of_no_job_are_set_aside_at_the_start(tmp_path: Path) -> None:
    """A server may end between writing files and noting them."""
    with closing(JobStore(tmp_path)) as store:
        kept = job(store)
        for id in (kept.id, "video_0"):
            store.write(id, {"video.mp4": b"x"})
    (tmp_path / "mine.txt").write_text("not ours")
    with closing(JobStore(tmp_path)):
        assert sorted(path.name for path in tmp_path.glob("video_*")) == [kept.id]
        assert (tmp_path / "mine.txt").exists()
        assert [path.read_bytes() for path in (tmp_path / "aside").glob("*-video_0/video.mp4")] == [b"x"]


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
    with pytest.raises(SettingError, match="its version is 9, not 2"):
        JobStore(tmp_path)
    with pytest.raises(SettingError, match="cannot be used"):
        JobStore(file)
