"""Jobs are there again after a restart, in order, and what is damaged costs no other."""

from __future__ import annotations

import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.server.job_store import MAX_PAGE_BYTES, JobStore, VideoJob


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with closing(JobStore(tmp_path / "jobs")) as opened:
        yield opened


def job(store: JobStore, **values: Any) -> VideoJob:
    made = VideoJob(**{"model": "wan", "size": "48x32", "seconds": "1", "prompt": "a cat",
                       "samovar": {"request": {"seed": 7}}, "num_bytes": 100} | values)  # fmt: skip
    store.write(made.id, {"image-0.png": made.id.encode()})
    store.save(made)
    return made


def page(store: JobStore, after: str | None = None, limit: int = 100, order: str = "asc") -> tuple[list[str], bool]:
    jobs, has_more = store.page(after, limit, order)
    return [each.id for each in jobs], has_more


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def test_pages_follow_each_other_and_leave_out_what_has_expired(store: JobStore) -> None:
    ids = [job(store, expires_at=int(time.time()) + 1000).id for _ in range(5)]
    job(store, expires_at=int(time.time()) - 1)
    for order, expected in (("asc", ids), ("desc", ids[::-1])):
        found: list[str] = []
        has_more = True
        while has_more:
            more, has_more = page(store, found[-1] if found else None, 2, order)
            found += more
        assert found == expected


def test_a_page_is_bounded_by_its_bytes_but_has_one_job_at_least(store: JobStore) -> None:
    third = MAX_PAGE_BYTES * 3 // 10
    ids = [job(store, prompt="x" * length).id for length in (third, third, third, third, 2 * MAX_PAGE_BYTES, 10)]
    assert page(store) == (ids[:3], True)
    assert page(store, ids[2]) == (ids[3:4], True)
    assert page(store, ids[3]) == (ids[4:5], True)
    assert page(store, ids[4]) == (ids[5:], False)


def test_records_count_and_the_database_shrinks(tmp_path: Path) -> None:
    with closing(JobStore(tmp_path)) as store:
        made = [job(store, prompt="\U0001f600" * 32_000) for _ in range(60)]
        count, used = store.usage()
        assert count == 60
        assert 60 * 128_000 < used < 60 * 130_000
        assert used * 0.9 < size(tmp_path) < used + 2**20
        made[0].num_bytes += 500
        store.save(made[0])
        assert store.usage() == (60, used + 500)
        assert store.delete("id = ?", made[0].id) == 1
        assert store.delete("id = ?", made[0].id) == 0
        assert not store.file(made[0].id).exists()
        assert store.delete("num_bytes > ?", 0) == 59
        assert store.usage() == (0, 0)
    assert size(tmp_path) < 2**16


@pytest.mark.parametrize("record", ["{}", "garbage", '{"model": 5}', b"\xff", "null"])
def test_a_damaged_record_is_set_aside(tmp_path: Path, record: str | bytes, caplog: pytest.LogCaptureFixture) -> None:
    with closing(JobStore(tmp_path)) as store:
        bad, good = job(store), job(store)
        store._database.execute("UPDATE jobs SET record = ? WHERE id = ?", (record, bad.id))
    with closing(JobStore(tmp_path)) as store:
        assert store.find("status = 'queued'") == [good]
        assert page(store) == ([good.id], False)
        assert store.find("id = ?", bad.id) == []
        assert caplog.text.count("is damaged") == 1
        (kept,) = (tmp_path / "aside").glob("*/image-0.png")
        assert kept.read_bytes() == bad.id.encode(), "its files may be all that is left"


@pytest.mark.parametrize("damage", ["a page", "all of it", "another version"])
def test_a_damaged_database_deletes_no_video(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(JobStore(tmp_path)) as store:
        ids = [job(store, prompt="x" * 3000, status="completed").id for _ in range(40)]
    file = tmp_path / "jobs.sqlite"
    if damage == "another version":
        with closing(sqlite3.connect(file)) as database:
            database.execute("PRAGMA user_version = 2")
    else:
        content = bytearray(file.read_bytes())
        content[slice(17 * 4096, 19 * 4096) if damage == "a page" else slice(None)] = b"\xa5" * 2 * 4096
        file.write_bytes(content)
    with closing(JobStore(tmp_path)) as store:
        assert page(store) == ([], False)
        kept = {path.read_text() for path in (tmp_path / "aside").glob("*/image-0.png")}
        assert kept == set(ids)
        assert any(path.name.endswith("jobs.sqlite") for path in (tmp_path / "aside").iterdir())
        assert "is damaged, or belongs to no job: it is kept as" in caplog.text
        assert store.find("id = ?", job(store).id)


def test_a_server_that_was_killed_loses_nothing_that_it_said(tmp_path: Path) -> None:
    """Nor does half of a change stay: the journal of SQLite, or a folder without a row."""
    with closing(JobStore(tmp_path / "jobs")) as store:
        kept = job(store)
        store._database.execute("BEGIN")
        store._database.execute("DELETE FROM jobs")
        store.write("video_0", {"video.mp4": b"x"})
        (store.folder / "mine.txt").write_text("not ours")
        shutil.copytree(tmp_path / "jobs", tmp_path / "copy")
        store._database.execute("ROLLBACK")
    with closing(JobStore(tmp_path / "copy")) as store:
        assert page(store) == ([kept.id], False)
        assert [path.name for path in store.folder.glob("video_*")] == [kept.id]
        assert (store.folder / "mine.txt").exists()
        assert [path.read_bytes() for path in (store.folder / "aside").glob("*-video_0/video.mp4")] == [b"x"]


def test_a_folder_is_for_one_server(store: JobStore) -> None:
    with pytest.raises(
        SettingError, match=r"Another server keeps its jobs in .*/jobs'. Give this one its own: --jobs DIR"
    ):
        JobStore(store.folder)
    with pytest.raises(SettingError, match="cannot be used"):
        JobStore(store.folder / "lock")
