"""A video that was asked for is made, whatever happens to the server meanwhile."""

from __future__ import annotations

import signal
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
        stranger = VideoJob("another", {"prompt": PROMPT}, "48x32", 1.0, 100)
        store.add(stranger)
    with running(video_folder, *options) as second:
        assert look(second, done) == before
        assert httpx.get(f"{second.address}{VIDEOS}/{done}/content", timeout=PATIENCE_S).content == content
        assert [ended(second, id)["status"] for id in (runs, waits)] == ["completed"] * 2
        listed = httpx.get(f"{second.address}{VIDEOS}?order=asc", timeout=PATIENCE_S).json()
        assert [video["id"] for video in listed["data"]] == [done, runs, waits, stranger.id]
        assert look(second, stranger.id)["status"] == "queued", "it waits for a server of its model"
        assert str(tmp_path) in second.text


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
        assert f"may take 20,736 bytes on disk, where others take {used:,} of 24,000 (--max-job-disk)" in refused.text
        until(lambda: look(server, first["id"]).get("error"), "it has expired")
        assert ended(server, ask(server))["status"] == "completed"
        assert not (tmp_path / first["id"]).exists()


@pytest.mark.slow
def test_only_one_server_keeps_jobs_in_a_folder(video_folder: Path, tmp_path: Path) -> None:
    with running(video_folder, "--jobs", str(tmp_path)):
        other = RunningServer(video_folder, "--jobs", str(tmp_path))
        assert other.process.wait(PATIENCE_S) == 2
        other.end()
        assert "Another server keeps its jobs in" in other.text
