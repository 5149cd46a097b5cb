"""A video that was asked for is made, whatever happens to the server meanwhile."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.server.job_store import JobStore, VideoJob

from .running import PATIENCE_S, PROMPT, RunningServer, running, until

VIDEOS = "/v1/videos"
LONG = 50_000


def ask(server: RunningServer, **values: Any) -> str:
    answer = httpx.post(f"{server.address}{VIDEOS}", json={"prompt": PROMPT, **values}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def look(server: RunningServer, id: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.address}{VIDEOS}/{id}", timeout=PATIENCE_S).json()
    return found


def kept_job(**values: Any) -> VideoJob:
    samovar: Any = {"request": {}}
    usual = {"model": "films", "size": "48x32", "seconds": "1", "prompt": PROMPT, "samovar": samovar, "num_bytes": 0}
    return VideoJob(**usual | values)


def ended(server: RunningServer, id: str) -> dict[str, Any]:
    until(lambda: look(server, id)["status"] in ("completed", "failed"), f"{id} has ended")
    return look(server, id)


def test_jobs_outlive_their_server(video_folder: Path, tmp_path: Path) -> None:
    """One is done, one runs and one waits when the server is killed; the next one makes those two, and leaves that of
    another model."""
    options = ("--jobs", str(tmp_path), "--max-steps", str(LONG))
    with running(video_folder, *options) as first:
        done = ask(first, seed=1)
        before = ended(first, done)
        content = httpx.get(f"{first.address}{VIDEOS}/{done}/content", timeout=PATIENCE_S).content
        runs, waits = ask(first, seed=2, num_inference_steps=150), ask(first, seed=3)
        until(lambda: look(first, runs)["status"] == "in_progress", "it runs")
        first.end(signal.SIGKILL)
    with closing(JobStore(tmp_path)) as store:
        stranger = kept_job(model="another")
        store.save(stranger)
    with running(video_folder, *options) as second:
        assert look(second, done) == before
        assert httpx.get(f"{second.address}{VIDEOS}/{done}/content", timeout=PATIENCE_S).content == content
        assert [ended(second, id)["status"] for id in (runs, waits)] == ["completed"] * 2
        listed = httpx.get(f"{second.address}{VIDEOS}?order=asc", timeout=PATIENCE_S).json()
        assert [video["id"] for video in listed["data"]] == [done, runs, waits, stranger.id]
        assert look(second, stranger.id)["status"] == "queued", "it waits for a server of its model"
        assert str(tmp_path) in second.text


LONGEST = "\U0001f600" * 32_000
NUM_LONG = 40


@pytest.fixture(scope="module")
def crowded(video_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that found forty failed jobs of the longest prompts, and a damaged one; at most fifty are kept, and
    clients may make it hold little."""
    folder = tmp_path_factory.mktemp("crowded")
    with closing(JobStore(folder)) as store:
        for number in range(NUM_LONG):
            request = {"negative_prompt": LONGEST, "seed": number}
            end = int(time.time()) + 1000 + number
            store.save(kept_job(prompt=LONGEST, samovar={"request": request}, status="failed", expires_at=end))
        store.save(kept_job(id="video_bad"))
        store._database.execute("UPDATE jobs SET record = 'garbage' WHERE id = 'video_bad'")
    options = ("--jobs", str(folder), "--max-memory", "180MiB", "--max-pixels", "16384", "--max-jobs", "50")
    with running(video_folder, *options, "--max-video-pixels", "65536", "--max-steps", str(LONG), "-q") as server:
        yield server


def all_ids(http: httpx.Client) -> list[str]:
    """All videos, page by page."""
    seen: list[str] = []
    has_more = True
    while has_more:
        answer = http.get(VIDEOS, params={"limit": 100, **({"after": seen[-1]} if seen else {})})
        assert len(answer.content) < 1.2 * 2**20
        page = answer.json()
        seen += [video["id"] for video in page["data"]]
        has_more = page["has_more"]
    assert len(set(seen)) == len(seen)
    return seen


def test_pages_of_long_prompts_are_short(crowded: RunningServer) -> None:
    """All jobs are found all the same, without the damaged one."""
    with crowded.client() as http:
        assert len(all_ids(http)) == NUM_LONG
        assert http.get(f"{VIDEOS}/video_bad").status_code == 404
        assert http.delete(f"{VIDEOS}/video_bad").status_code == 404
    assert "video_bad is damaged, or belongs to no job" in crowded.text


def test_pages_that_nobody_reads_take_what_clients_may_take(crowded: RunningServer) -> None:
    """180 MiB are 135 for answers, and as much again for connections and making pages. What the system takes at once is
    no longer ours; above the rest the answer is 503."""
    before, statuses = crowded.resident_bytes(), set()
    host, port = crowded.address.removeprefix("http://").split(":")
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            one = opened.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.settimeout(PATIENCE_S)
            one.connect((host, int(port)))
            one.sendall(b"GET /v1/videos?limit=100 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            statuses.add(one.recv(12).split(b" ")[1])
        grown = crowded.resident_bytes() - before
        assert httpx.get(f"{crowded.address}/live", timeout=PATIENCE_S).status_code == 200
    assert statuses <= {b"200", b"503"}
    assert grown < 2 * 135 * 2**20
    until(lambda: httpx.get(f"{crowded.address}{VIDEOS}", timeout=PATIENCE_S).status_code == 200, "room again")


def test_no_more_jobs_are_kept_than_allowed_and_what_failed_goes_first(crowded: RunningServer) -> None:
    with crowded.client() as http:
        for _ in range(15):
            ended(crowded, ask(crowded, deadline=0.001, num_inference_steps=LONG))
        page = http.get(VIDEOS, params={"limit": 100, "order": "desc"}).json()["data"]
        assert {video["error"]["code"] for video in page[:10]} == {"queue_timeout"}
        assert len(all_ids(http)) == 50


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of three megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_jobs_on_a_full_disk_end_or_wait(video_folder: Path, small_disk: Path) -> None:
    """What runs fails, what waits is made when there is room again, and what is deleted is gone."""
    options = ("--jobs", str(small_disk / "jobs"), "--max-steps", str(LONG))
    with running(video_folder, *options) as server:
        runs = ask(server, num_inference_steps=300)
        until(lambda: look(server, runs)["status"] == "in_progress", "it runs")
        goes, waits = ask(server), ask(server)
        filling = small_disk / "filling"
        with contextlib.suppress(OSError), open(filling, "wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        refused = httpx.post(f"{server.address}{VIDEOS}", json={"prompt": PROMPT}, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        told = httpx.delete(f"{server.address}{VIDEOS}/{goes}", timeout=PATIENCE_S)
        assert told.status_code == 200 or told.json()["error"]["code"] == "disk_full", told.text
        failed = ended(server, runs)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "disk_full")
        assert look(server, waits)["status"] == "queued"
        assert httpx.get(f"{server.address}/ready", timeout=PATIENCE_S).status_code == 200
        filling.unlink()
        assert ended(server, waits)["status"] == "completed"
        httpx.delete(f"{server.address}{VIDEOS}/{goes}", timeout=PATIENCE_S)
        assert look(server, goes)["error"]["code"] == "video_not_found"
        assert server.end() == 0
    with closing(JobStore(small_disk / "jobs")) as store:
        found = {job.id: job.status for job in store.page(None, 9, "asc")[0]}
        assert found == {runs: "failed", waits: "completed"}


@pytest.mark.slow
def test_a_server_that_is_told_to_end_leaves_what_runs_to_the_next(video_folder: Path, tmp_path: Path) -> None:
    options = ("--jobs", str(tmp_path), "--max-steps", str(LONG), "--shutdown-timeout", "0.1")
    with running(video_folder, *options) as server:
        runs = ask(server, num_inference_steps=300)
        until(lambda: look(server, runs)["status"] == "in_progress", "it runs")
        assert server.end(signal.SIGTERM) == 0
    with running(video_folder, *options) as server:
        assert ended(server, runs)["status"] == "completed"


@pytest.mark.slow
def test_a_worker_that_dies_costs_no_video(video_folder: Path, tmp_path: Path) -> None:
    with running(video_folder, "--jobs", str(tmp_path), "--max-steps", str(LONG)) as server:
        id = ask(server, num_inference_steps=300)
        until(lambda: look(server, id)["progress"] > 0, "it runs")
        for worker in server.workers():
            worker.kill()
        assert ended(server, id)["status"] == "completed"
        assert server.status()["restarts"] == 1


@pytest.mark.slow
def test_a_job_that_ends_every_server_fails_at_last(video_folder: Path, tmp_path: Path) -> None:
    options = ("--jobs", str(tmp_path), "--max-steps", str(LONG))
    for _ in range(3):
        with running(video_folder, *options) as server:
            found = httpx.get(f"{server.address}{VIDEOS}", timeout=PATIENCE_S).json()["data"]
            id = found[0]["id"] if found else ask(server, num_inference_steps=LONG)
            until(lambda: look(server, id)["status"] == "in_progress", "it runs")  # noqa: B023
    with running(video_folder, *options) as server:
        failed = ended(server, id)
        assert failed["error"]["message"] == "The server ended 3 times while it made this video."
        with server.client() as http:
            content = http.get(f"/v1/videos/{id}/content")
        assert (content.status_code, content.json()["error"]["code"]) == (404, "video_failed")
        assert content.json()["error"]["message"].endswith("The server ended 3 times while it made this video.")


@pytest.mark.slow
def test_the_disk_has_a_limit_and_videos_expire(video_folder: Path, tmp_path: Path) -> None:
    """Nine frames of 48x32 may take 20,736 bytes, and take fewer."""
    options = ("--jobs", str(tmp_path), "--max-job-disk", "24000B", "--job-expiry", "2")
    with running(video_folder, *options) as server:
        first = ended(server, ask(server))
        assert first["status"] == "completed"
        used = sum(file.stat().st_size for file in (tmp_path / first["id"]).iterdir())
        assert 24_000 - used < 20_736
        refused = httpx.post(f"{server.address}{VIDEOS}", json={"prompt": PROMPT}, timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        found = re.search(r"may take ([\d,]+) bytes on disk", refused.text)
        assert found is not None
        assert 20_736 + 1024 < int(found[1].replace(",", "")) < 20_736 + 2048, "with its record"
        assert "of 24,000 (--max-job-disk)" in refused.text
        until(lambda: look(server, first["id"]).get("error"), "it has expired")
        assert ended(server, ask(server))["status"] == "completed"
        assert not (tmp_path / first["id"]).exists()
