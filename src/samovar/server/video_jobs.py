"""Who makes the videos that were asked for? Two jobs at a time: one is computed while another is encoded.

A job is in its folder before the client hears of it, and is made from there: by this server, or by the next one if this
one ends. It ends as completed or failed, or is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import shutil
import sqlite3
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from PIL import Image
from pydantic_core import to_json

from ..core.errors import SamovarError
from ..core.settings import parse_bytes
from ..engine import Done, Failed, GenerationResult, Job, Preview, Progress, Started
from ..media import Video, check_suffix, encode, spritesheet, thumbnail, webp
from .api_errors import ApiError
from .asking import Asked, check_asked, read_values
from .bodies import VideoBody
from .job_store import JobStore, VideoJob
from .memory import BYTES_PER_PIXEL
from .responses import details_of

if TYPE_CHECKING:
    from .app_state import AppState

_AT_ONCE = 1
"""Jobs in hand beside one for each worker: it is encoded while others are computed."""
_MAX_ATTEMPTS = 3
"""How often a job is begun, if servers or workers end while they make it."""
_DISK_BYTES_PER_PIXEL = 1.5
"""Of a file at most: as many as in uncompressed video."""
_SWEEP_S = 30.0
_PAUSE_S = 0.5
"""Until another try, when there is no room or no worker."""
_AGAIN = ("worker_restarted", "queue_full", "engine_down", "memory_full")
VARIANTS = {"video": ("video.mp4", "video/mp4"), "thumbnail": ("thumbnail.webp", "image/webp"),
            "spritesheet": ("spritesheet.jpg", "image/jpeg")}  # fmt: skip

log = logging.getLogger("samovar.server")


class VideoJobs:
    """The jobs of a server, from its start to its end."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._most_bytes = parse_bytes(state.config.max_job_disk, "max_job_disk") or 0
        self._changed, self._creating = asyncio.Event(), asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, Job] = {}
        self.progress: dict[str, int] = {}
        """In percent, of the jobs that run."""
        self.previews: dict[str, bytes] = {}

    def open(self) -> None:
        """Take up what the last server left."""
        check_suffix("video.mp4", "video")
        self.store = JobStore(self._state.config.jobs_folder(self._state.model_name))
        for job in self._own(self.store.begun()):
            if job.attempts < _MAX_ATTEMPTS:
                job.status = "queued"
                self.store.save(job)
            else:
                message = f"The server ended {job.attempts} times while it made this video."
                self._fail(job, ApiError(500, message, code="worker_restarted"))
        self._turning = asyncio.create_task(self._turn())

    def _own(self, jobs: list[VideoJob]) -> list[VideoJob]:
        """Those of this model; others wait for a server of theirs."""
        return [job for job in jobs if job.model == self._state.model_name]

    async def close(self) -> None:
        """Store what was made. The engine has ended, so nothing runs any more."""
        self._turning.cancel()
        await asyncio.gather(self._turning, *self._tasks.values(), return_exceptions=True)
        self.store.close()

    async def create(self, asked: Asked[VideoBody], remixed_from: str | None = None) -> VideoJob:
        """Keep a request; ApiError if it cannot be served or kept."""
        if self._state.phase == "draining":
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
        extent = check_asked(self._state, asked)
        asked.num_bytes(self._state)
        files = {f"{name}.png": image for name, image in asked.inputs.items()}
        files |= {f"image-{number}.png": image for number, image in enumerate(asked.image)}
        sent = sum(image.width * image.height for image in files.values())
        job = VideoJob(
            self._state.model_name,
            {"seed": random.randrange(2**32), **asked.body.values()},
            f"{extent.width}x{extent.height}" if extent.width else "auto",
            extent.seconds or 0.0,
            int(_DISK_BYTES_PER_PIXEL * extent.pixels) + 4 * sent,
            remixed_from=remixed_from,
        )
        with self._state.images.hold() as hold:
            hold.add(BYTES_PER_PIXEL * sent)
            async with self._creating:  # One at a time, or many could find the same room.
                self._check_room(job.num_bytes)
                if files:
                    await self._write(job.id, await asyncio.to_thread(_as_png, files))
                self.store.add(job)
        self._changed.set()
        return job

    def _check_room(self, num_bytes: int) -> None:
        self.store.remove_expired()
        most = self._state.omni.config.max_queue
        if len(self._own(self.store.queued())) >= most:
            message = f"{most} videos are already waiting (--max-queue). Try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        used, free = self.store.used_bytes(), shutil.disk_usage(self.store.folder).free
        if used + num_bytes > self._most_bytes or num_bytes > free:
            is_ours = used + num_bytes > self._most_bytes
            limit = f"{self._most_bytes:,} (--max-job-disk)" if is_ours else f"{free:,} free"
            message = f"This video may take {num_bytes:,} bytes on disk, where others take {used:,} of {limit}."
            remedy = "Delete some videos, wait until they expire, or ask for less."
            raise ApiError(507, f"{message} {remedy}", code="disk_full", headers={"x-should-retry": "false"})

    async def _write(self, id: str, files: dict[str, bytes]) -> int:
        try:
            return await asyncio.to_thread(self.store.write, id, files)
        except OSError as error:
            shutil.rmtree(self.store.folder / id, ignore_errors=True)
            raise ApiError(507, f"The files cannot be written: {error.strerror}.", code="disk_full") from error

    def find(self, id: str, param: str = "id") -> VideoJob:
        job = self.store.get(id)
        if job is None:
            message = f"There is no video {id[:80]!r}. It may have expired."
            raise ApiError(404, message, param=param, code="video_not_found")
        return job

    def delete(self, id: str) -> None:
        """Forget a job. If it runs, the worker stops at its next step."""
        self.store.remove(self.find(id).id)
        if id in self._running:
            self._running[id].cancel()
        elif id in self._tasks:
            self._tasks[id].cancel()

    def load(self, job: VideoJob) -> Asked[VideoBody]:
        """The request of a job, from its folder. Slow: use a thread."""
        images: dict[str, Image.Image] = {}
        for file in sorted(self.store.file(job.id, "").glob("*.png"), key=lambda file: (len(file.name), file.name)):
            with Image.open(file) as image:
                image.load()
                images[file.stem] = image
        body = read_values(self._state, VideoBody, job.values)
        several = [image for name, image in images.items() if name.startswith("image-")]
        return Asked(body, several, {name: image for name, image in images.items() if not name.startswith("image-")})

    # ------------------------------------------------------------------------------------------ making

    async def _turn(self) -> None:
        """Begin what waits, as soon as there is a place."""
        while True:
            self._changed.clear()
            pause_s = _SWEEP_S
            try:
                self.store.remove_expired()
                for job in [job for job in self._own(self.store.queued()) if job.id not in self._tasks]:
                    left_s = self._deadline_s(job)
                    if left_s is not None and left_s <= 0:
                        message = "The video was not begun before its deadline. Allow more time, or try again later."
                        self._fail(job, ApiError(503, message, code="queue_timeout"))
                    elif (
                        len(self._tasks) < _AT_ONCE + self._state.omni.config.num_replicas
                        and self._state.phase == "serving"
                    ):
                        self._tasks[job.id] = asyncio.create_task(self._make(job))
                    else:
                        pause_s = min(pause_s, left_s or pause_s)
            except sqlite3.Error:  # Such as a full disk, which may have room again.
                log.exception("the jobs cannot be read")
                await asyncio.sleep(_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)

    async def _make(self, job: VideoJob) -> None:
        try:
            asked = await asyncio.to_thread(self.load, job)
            check_asked(self._state, asked)  # The model or the limits may be others now.
            async with self._room(asked.num_bytes(self._state)):
                await self._run(job, asked)
        except ApiError as error:
            await self._give_up(job, error)
        except SamovarError as error:
            await self._give_up(job, self._state.api_error(error))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise  # It was deleted before it ran.
            log.exception("the video %s failed", job.id)
            self._fail(job, ApiError(500, "The server failed. Its log says why.", code="internal_error"))
            if not isinstance(error, Exception):
                raise
        finally:
            for kept in (self._tasks, self._running, self.progress, self.previews):
                kept.pop(job.id, None)
            self._changed.set()

    async def _run(self, job: VideoJob, asked: Asked[VideoBody]) -> None:
        left_s = self._deadline_s(job)
        running = asked.submit(self._state, None if left_s is None else max(0.001, left_s))
        self._running[job.id] = running
        async for event in running:
            if isinstance(event, Started):
                job.status, job.attempts = "in_progress", job.attempts + 1
                self.store.save(job)
            elif isinstance(event, Progress):
                done = min(99, 100 * event.step // event.num_steps)
                self.progress[job.id] = max(done, self.progress.get(job.id, 0))  # There may be several passes.
            elif isinstance(event, Preview):
                self.previews[job.id] = await asyncio.to_thread(webp, event.image)
            elif isinstance(event, Failed):
                raise event.error
            elif isinstance(event, Done):
                await self._complete(job, event.result)

    async def _complete(self, job: VideoJob, result: GenerationResult) -> None:
        (video,) = result.videos
        files = await asyncio.to_thread(_files_of, video)
        job.num_bytes = await self._write(job.id, files)
        job.status, job.size, job.seconds = "completed", f"{video.width}x{video.height}", video.seconds
        details = details_of(result) | {"num_frames": len(video), "fps": video.fps}
        job.details = json.loads(to_json(details, inf_nan_mode="null"))
        self._end(job)
        if not self.store.save(job):  # Deleted meanwhile.
            self.store.remove(job.id)
        log.info("video %s made in %.1f s", job.id, result.seconds, extra={"job": job.id, "generate_s": result.seconds})

    def _end(self, job: VideoJob) -> None:
        job.completed_at = time.time()
        job.expires_at = job.completed_at + self._state.config.job_expiry_s

    def _fail(self, job: VideoJob, error: ApiError) -> None:
        job.status, job.error = "failed", {"code": error.code or "internal_error", "message": error.message}
        job.num_bytes = len(json.dumps(job.values))  # What fails takes room too, until it expires.
        self._end(job)
        self.store.save(job)
        shutil.rmtree(self.store.folder / job.id, ignore_errors=True)

    async def _give_up(self, job: VideoJob, error: ApiError) -> None:
        """Let a job wait for another try if the server or the worker is to blame; else it has failed."""
        is_ending = error.code == "shutting_down"
        if is_ending or (error.code in _AGAIN and job.attempts < _MAX_ATTEMPTS):
            job.attempts -= is_ending and job.status == "in_progress"
            job.status = "queued"
            self.store.save(job)
            if not is_ending:
                await asyncio.sleep(_PAUSE_S)
        else:
            self._fail(job, error)

    def _deadline_s(self, job: VideoJob) -> float | None:
        """What is left of its time to wait."""
        deadline: float | None = job.values.get("deadline")
        return None if deadline is None else job.created_at + deadline - time.time()

    @contextlib.asynccontextmanager
    async def _room(self, amount: int) -> AsyncIterator[None]:
        """Wait for memory, which others may need for a moment."""
        with self._state.images.hold() as hold:
            while True:
                try:
                    hold.add(amount)
                    break
                except ApiError:
                    await asyncio.sleep(_PAUSE_S)
            yield


def _as_png(images: dict[str, Image.Image]) -> dict[str, bytes]:
    return {name: encode(image, ".png") for name, image in images.items()}


def _files_of(video: Video) -> dict[str, bytes]:
    contents: dict[str, Any] = {"video": encode(video, ".mp4"), "thumbnail": webp(thumbnail(video)),
                                "spritesheet": encode(spritesheet(video), ".jpg")}  # fmt: skip
    return {VARIANTS[name][0]: content for name, content in contents.items()}
