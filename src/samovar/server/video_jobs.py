"""Makes the videos that were asked for, one more at a time than there are workers: one is encoded meanwhile.

A job is in its folder before its client hears of it, and is made from there: by this server, or by the next one if this
one ends. It ends as completed or failed, or is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import random
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from PIL import Image
from pydantic_core import to_json

from ..core.errors import QueueFullError, QueueTimeoutError, SamovarError, ShuttingDownError, WorkerLostError
from ..core.settings import parse_bytes
from ..engine import Done, Failed, GenerationResult, Preview, Progress, Started
from ..media import Video, check_suffix, encode, spritesheet, thumbnail, webp
from .errors import ApiError, api_error
from .job_store import JobStore, VideoJob, row_of
from .request import ClientRequest, client_request
from .respond import details_of
from .schemas import VideoBody
from .settings import BYTES_PER_PIXEL

if TYPE_CHECKING:
    from .state import AppState

_AT_ONCE = 1
"""Jobs in hand beside one for each worker: it is encoded while others are computed."""
_MAX_ATTEMPTS = 3
"""How often a job is begun, if servers or workers end while they make it."""
_DISK_BYTES_PER_PIXEL = 1.5
"""Of a file at most: as many as in uncompressed video."""
_TICK_S = 0.5
_PAUSE_S, _FULL_PAUSE_S = 0.5, 5.0
"""Until another try, when there is no room or no worker; and when the disk is full."""
_TOO_LATE = "The video was not begun before its deadline. Allow more time, or try again later."
_AGAIN = ("worker_restarted", "queue_full", "engine_down", "memory_full")
FILES = {"video": ("video.mp4", "video/mp4"), "thumbnail": ("thumbnail.webp", "image/webp"),
         "spritesheet": ("spritesheet.jpg", "image/jpeg")}  # fmt: skip
"""By variant: the name, and the type."""

log = logging.getLogger("samovar.server")


class VideoJobs:
    """The jobs of a server, from its start to its end."""

    def __init__(self, state: AppState) -> None:
        """Take up what the last server left."""
        check_suffix("video.mp4", "video")
        self._state = state
        self._max_bytes = parse_bytes(state.config.max_job_disk, "max_job_disk") or 0
        self.store = JobStore(state.config.jobs_folder(state.model_name))
        self._thread = ThreadPoolExecutor(1, "samovar jobs")
        """Where the store is used: a disk may be slow."""
        self._numbers = itertools.count()
        self._queue = asyncio.PriorityQueue[tuple[float, int, VideoJob | None]]()
        is_unfinished = "model = ? AND status IN ('queued', 'in_progress') ORDER BY number"
        for job in self.store.find(is_unfinished, state.model_name):
            job.status, job.progress = "queued", 0
            self._begin(job)
        self._makers = [asyncio.create_task(self._make_all()) for _ in range(_AT_ONCE + state.omni.config.num_replicas)]
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Let what was made be stored. The engine has ended, so nothing runs any more."""
        for _ in self._makers:
            self._queue.put_nowait((-math.inf, next(self._numbers), None))
        await asyncio.gather(*self._makers)
        self._ticking.cancel()
        self._thread.shutdown()
        self.store.close()

    async def in_thread(self, do: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, *args)

    def _make_room(self, num_bytes: int) -> None:
        """Let failed jobs go for a new one, the oldest first; ApiError if that is not enough."""
        store, max_jobs = self.store, self._state.config.max_jobs
        store.delete("expires_at <= ?", time.time())
        while True:
            free, (count, used) = shutil.disk_usage(store.folder).free, store.usage()
            if num_bytes <= free and count < max_jobs and used + num_bytes <= self._max_bytes:
                return
            if not store.delete("id = (SELECT id FROM jobs WHERE status = 'failed' ORDER BY expires_at LIMIT 1)"):
                break
        message = (
            f"This video may take {num_bytes:,} bytes on disk, where {free:,} are free, and others take {used:,} of "
            f"{self._max_bytes:,} (--max-job-disk); {count:,} of at most {max_jobs:,} are kept (--max-jobs). Delete "
            "some videos, wait until they expire, or ask for less."
        )
        raise ApiError(message, None, "disk_full", 507, {"x-should-retry": "false"})

    async def create(self, wanted: ClientRequest, remixed_from: str | None = None) -> VideoJob:
        """Keep a request; an error if it cannot be served or kept."""
        body, request, size, most = wanted.body, wanted.request, wanted.size, self._state.omni.config.max_queue
        if self._state.phase == "draining":
            raise ShuttingDownError("The server is shutting down.")
        if sum(job.status == "queued" for job in self.store.unfinished.values()) >= most:
            raise QueueFullError(f"{most} videos are already waiting (--max-queue). Try again later.", 5.0)
        images = {f"{name}.png": image for name, image in request.inputs.items()}
        images |= {f"image-{number}.png": image for number, image in enumerate(request.images)}
        sent = sum(image.width * image.height for image in images.values())
        values = body.model_dump(exclude_none=True, exclude={"prompt", "user"})
        job = VideoJob(
            model=self._state.model_name,
            size=f"{size.width}x{size.height}" if size.width else "auto",
            seconds=f"{size.seconds or 0.0:g}",
            prompt=body.prompt,
            remixed_from_video_id=remixed_from,
            samovar={"request": {"seed": random.randrange(2**32)} | values},
            num_bytes=int(_DISK_BYTES_PER_PIXEL * size.pixels) + 4 * sent,
            begin_by=None if body.deadline is None else time.time() + body.deadline,
        )

        def keep() -> None:
            self._make_room(row_of(job)[1])
            self.store.write(job.id, {name: encode(image, ".png") for name, image in images.items()})
            self.store.save(job)

        with self._state.images.hold(BYTES_PER_PIXEL * sent):
            try:
                await self.in_thread(keep)
            except (OSError, sqlite3.OperationalError) as error:
                shutil.rmtree(self.store.file(job.id), ignore_errors=True)
                raise _full_disk(error) from error
        self._begin(job)
        return job

    async def find(self, id: str, param: str = "id") -> VideoJob:
        """A job that has not expired."""
        is_wanted = "id = ? AND (expires_at IS NULL OR expires_at > ?)"
        for job in await self.in_thread(self.store.find, is_wanted, id, time.time()):
            found: VideoJob = job
            return found
        raise _unknown(id, param)

    async def delete(self, id: str) -> None:
        """Forget a job. If it runs, the worker stops at its next step."""
        try:
            if not await self.in_thread(self.store.delete, "id = ?", id):
                raise _unknown(id)
        except sqlite3.OperationalError as error:
            raise _full_disk(error) from error
        job = self.store.unfinished.pop(id, None)
        if job is not None and job.running is not None:
            job.running.cancel()

    def load(self, job: VideoJob, prompt: str | None = None) -> ClientRequest:
        """The request of a job, from its folder, or the same for another prompt. Slow: use a thread."""
        images: dict[str, list[Image.Image]] = {}
        for file in sorted(self.store.file(job.id).glob("*.png"), key=lambda file: (len(file.name), file.name)):
            with Image.open(file) as image:
                image.load()
                images.setdefault(file.stem.partition("-")[0], []).append(image)
        values = {**job.samovar["request"], "prompt": job.prompt if prompt is None else prompt}
        return client_request(self._state, VideoBody, values, images)

    # ------------------------------------------------------------------------------------------ making

    def _begin(self, job: VideoJob) -> None:
        job.turn = (-job.samovar["request"].get("priority", 0), next(self._numbers))
        self.store.unfinished[job.id] = job
        self._queue.put_nowait((*job.turn, job))

    async def _tick(self) -> None:
        """Give up what has waited for too long, and delete what has expired."""
        while True:
            await asyncio.sleep(_TICK_S)
            for job in list(self.store.unfinished.values()):
                if job.running is None and job.left_s < 0:
                    await self._end(job, QueueTimeoutError(_TOO_LATE))
            with contextlib.suppress(sqlite3.OperationalError):  # A full disk.
                await self.in_thread(self.store.delete, "expires_at <= ?", time.time())

    async def _make_all(self) -> None:
        """Make what is next, again and again."""
        while (job := (await self._queue.get())[-1]) is not None:
            if job.id in self.store.unfinished and self._state.phase != "draining":
                (error,) = await asyncio.gather(self._make(job), return_exceptions=True)
                if error is not None:
                    await self._give_up(job, error)

    async def _make(self, job: VideoJob) -> None:
        if job.attempts >= _MAX_ATTEMPTS:
            raise WorkerLostError(f"The server ended {job.attempts} times while it made this video.")
        if shutil.disk_usage(self.store.folder).free < job.num_bytes:  # It would be made in vain.
            raise ApiError("The disk is full.", None, "memory_full", 503)
        wanted = await asyncio.to_thread(self.load, job)  # The model and the limits may be others now.
        with self._state.images.hold(wanted.size.num_bytes):
            if (left_s := job.left_s) <= 0:
                raise QueueTimeoutError(_TOO_LATE)
            job.running = self._state.omni.submit(wanted.request, deadline_s=None if left_s == math.inf else left_s)
            async for event in job.running:
                match event:
                    case Started():
                        job.status, job.attempts = "in_progress", job.attempts + 1
                        with contextlib.suppress(sqlite3.OperationalError):  # A full disk: its end will be stored.
                            await self.in_thread(self.store.save, job)
                    case Progress():  # Of several passes.
                        job.progress = max(job.progress, min(99, 100 * event.step // event.num_steps))
                    case Preview():
                        job.preview = await asyncio.to_thread(webp, event.image)
                        job.samovar["has_preview"] = True
                    case Failed():
                        raise event.error
                    case Done():
                        await self._complete(job, event.result)
                if job.id not in self.store.unfinished:  # It was deleted.
                    job.running.cancel()

    async def _complete(self, job: VideoJob, result: GenerationResult) -> None:
        (video,) = result.videos
        try:
            job.num_bytes = await asyncio.to_thread(self.store.write, job.id, await asyncio.to_thread(_files_of, video))
        except OSError as error:
            raise _full_disk(error) from error
        job.status, job.progress, job.size = "completed", 100, f"{video.width}x{video.height}"
        job.seconds = f"{video.seconds:g}"
        details = details_of(result) | {"num_frames": len(video), "fps": video.fps, "has_preview": False}
        job.samovar |= json.loads(to_json(details, inf_nan_mode="null"))
        await self._end(job)
        log.info("video %s made in %.1f s", job.id, result.seconds, extra={"job": job.id, "generate_s": result.seconds})

    async def _give_up(self, job: VideoJob, error: BaseException) -> None:
        """Let a job wait for another try if the server or the worker is to blame; else it has failed."""
        if not isinstance(error, SamovarError):
            log.error("the video %s failed", job.id, exc_info=error)
            error = ApiError("The server failed. Its log says why.", None, "internal_error", 500)
        code = api_error(error).code
        if code != "shutting_down" and (code not in _AGAIN or job.attempts >= _MAX_ATTEMPTS):
            await self._end(job, error)
            return
        job.attempts -= code == "shutting_down" and job.status == "in_progress"
        job.status, job.progress, job.running = "queued", 0, None
        with contextlib.suppress(sqlite3.OperationalError):
            await self.in_thread(self.store.save, job)
        await asyncio.sleep(_PAUSE_S)
        self._queue.put_nowait((*job.turn, job))

    async def _end(self, job: VideoJob, error: SamovarError | None = None) -> None:
        """Store how a job has ended, as soon as the disk has room."""
        unfinished = self.store.unfinished
        if error is not None:
            refused = api_error(error)
            job.status, job.num_bytes, job.error = "failed", 0, {"code": refused.code, "message": refused.message}
        if error is not None or job.id not in unfinished:  # Or it was deleted while it was written.
            await asyncio.to_thread(shutil.rmtree, self.store.file(job.id), ignore_errors=True)
        job.completed_at = int(time.time())
        job.expires_at = job.completed_at + int(self._state.config.job_expiry_s)
        while job.id in unfinished:
            try:
                await self.in_thread(self.store.save, job)
                unfinished.pop(job.id, None)
            except sqlite3.OperationalError as full:
                log.error("the end of %s cannot be stored, and is tried again: %s", job.id, full)
                if self._state.phase == "draining":
                    return
                await asyncio.sleep(_FULL_PAUSE_S)


def _files_of(video: Video) -> dict[str, bytes]:
    contents = {"video": encode(video, ".mp4"), "thumbnail": webp(thumbnail(video)),
                "spritesheet": encode(spritesheet(video), ".jpg")}  # fmt: skip
    return {FILES[name][0]: content for name, content in contents.items()}


def _unknown(id: str, param: str = "id") -> ApiError:
    return ApiError(f"There is no video {id[:80]!r}. It may have expired.", param, "video_not_found", 404)


def _full_disk(error: Exception) -> ApiError:
    message = f"The disk is full: {getattr(error, 'strerror', error)}. Try again when there is room."
    return ApiError(message, None, "disk_full", 507)
