"""Makes the videos that were asked for, one more at a time than there are workers: one is encoded meanwhile.

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
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from PIL import Image
from pydantic_core import to_json

from ..core.errors import SamovarError
from ..core.settings import parse_bytes
from ..engine import Done, Failed, GenerationResult, Job, Preview, Progress, Request, Started
from ..media import Video, check_suffix, encode, spritesheet, thumbnail, webp
from .errors import ApiError
from .job_store import JobStore, VideoJob
from .request import check_request, engine_request, memory_of, read_values, submit
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
_SWEEP_S = 30.0
_PAUSE_S = 0.5
"""Until another try, when there is no room or no worker."""
_FULL_PAUSE_S = 5.0
"""Until another try, when the disk is full."""
MAX_PAGE_BYTES = 2**20
_AGAIN = ("worker_restarted", "queue_full", "engine_down", "memory_full")
VARIANTS = {"video": ("video.mp4", "video/mp4"), "thumbnail": ("thumbnail.webp", "image/webp"),
            "spritesheet": ("spritesheet.jpg", "image/jpeg")}  # fmt: skip

T = TypeVar("T")

log = logging.getLogger("samovar.server")


class VideoJobs:
    """The jobs of a server, from its start to its end."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._most_bytes = parse_bytes(state.config.max_job_disk, "max_job_disk") or 0
        self._changed, self._creating = asyncio.Event(), asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, Job] = {}
        self._thread = ThreadPoolExecutor(1, "samovar jobs")
        """Where the store is used: a disk may be slow."""
        self.progress: dict[str, int] = {}
        """In percent, of the jobs that run."""
        self.previews: dict[str, bytes] = {}

    def open(self) -> None:
        """Take up what the last server left."""
        check_suffix("video.mp4", "video")
        self.store = JobStore(self._state.config.jobs_folder(self._state.model_name))
        for job in self.store.begun(self._state.model_name):
            job.status = "queued"
            if job.attempts >= _MAX_ATTEMPTS:
                message = f"The server ended {job.attempts} times while it made this video."
                self._set_failed(job, ApiError(500, message, code="worker_restarted"))
            self.store.save(job)
        self._turning = asyncio.create_task(self._turn())

    async def close(self) -> None:
        """Store what was made. The engine has ended, so nothing runs any more."""
        self._turning.cancel()
        await asyncio.gather(self._turning, *self._tasks.values(), return_exceptions=True)
        await self._in_store(JobStore.retry)
        await self._in_store(JobStore.close)
        self._thread.shutdown()

    async def _in_store(self, do: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, do, self.store, *args)

    async def create(self, body: VideoBody, request: Request, remixed_from: str | None = None) -> VideoJob:
        """Keep a request; ApiError if it cannot be served or kept."""
        if self._state.phase == "draining":
            raise ApiError(503, "The server is shutting down.", code="shutting_down", headers={"Retry-After": "5"})
        size = check_request(self._state, body, request)
        memory_of(self._state, request)
        files = {f"{name}.png": image for name, image in request.inputs.items()}
        files |= {f"image-{number}.png": image for number, image in enumerate(request.images)}
        sent = sum(image.width * image.height for image in files.values())
        job = VideoJob(
            self._state.model_name,
            {"seed": random.randrange(2**32), **body.values()},
            f"{size.width}x{size.height}" if size.width else "auto",
            size.seconds or 0.0,
            int(_DISK_BYTES_PER_PIXEL * size.pixels) + 4 * sent,
            remixed_from=remixed_from,
        )
        with self._state.images.hold() as hold:
            hold.add(BYTES_PER_PIXEL * sent)
            async with self._creating:  # One at a time, or many could find the same room.
                await self._in_store(self._make_room, job.num_bytes)
                if files:
                    await self._write(job.id, await asyncio.to_thread(_as_png, files))
                try:
                    await self._in_store(JobStore.add, job)
                except (OSError, sqlite3.Error) as error:
                    raise self._full_disk(job.id, error) from error
        self._changed.set()
        return job

    def _make_room(self, store: JobStore, num_bytes: int) -> None:
        """Let failed jobs go for a new one, the oldest first; ApiError if that is not enough."""
        config = self._state.config
        most = self._state.omni.config.max_queue
        if store.num_waiting(self._state.model_name) >= most:
            message = f"{most} videos are already waiting (--max-queue). Try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "5"})
        store.remove_expired()
        while len(store) >= config.max_jobs or store.used_bytes + num_bytes > self._most_bytes:
            if not store.remove_oldest_failure():
                break
        remedy = "Delete some videos, wait until they expire, or ask for less."
        if len(store) >= config.max_jobs:
            message = f"{len(store):,} videos are kept, of at most {config.max_jobs:,} (--max-jobs)."
            raise ApiError(507, f"{message} {remedy}", code="disk_full", headers={"x-should-retry": "false"})
        free = shutil.disk_usage(store.folder).free
        if store.used_bytes + num_bytes > self._most_bytes or num_bytes > free:
            is_ours = store.used_bytes + num_bytes > self._most_bytes
            limit = f"{self._most_bytes:,} (--max-job-disk)" if is_ours else f"{free:,} free"
            message = f"This video may take {num_bytes:,} bytes on disk, where others take {store.used_bytes:,} of"
            raise ApiError(507, f"{message} {limit}. {remedy}", code="disk_full", headers={"x-should-retry": "false"})

    async def _write(self, id: str, files: dict[str, bytes]) -> int:
        try:
            return await asyncio.to_thread(self.store.write, id, files)
        except OSError as error:
            raise self._full_disk(id, error) from error

    def _full_disk(self, id: str, error: Exception) -> ApiError:
        shutil.rmtree(self.store.file(id, ""), ignore_errors=True)
        return ApiError(507, f"The video cannot be kept: {getattr(error, 'strerror', error)}.", code="disk_full")

    async def find(self, id: str, param: str = "id") -> VideoJob:
        job: VideoJob | None = await self._in_store(JobStore.get, id)
        return _there(job, id, param)

    async def page(self, after: str | None, limit: int, order: str) -> tuple[list[VideoJob], bool]:
        """Some jobs by age, of `MAX_PAGE_BYTES` together or a single one, and whether there are more."""
        return await self._in_store(JobStore.page, after, limit, order, MAX_PAGE_BYTES)

    async def delete(self, id: str) -> None:
        """Forget a job. If it runs, the worker stops at its next step."""
        was_there: bool = await self._in_store(JobStore.remove, id)
        _there(was_there or None, id)
        if id in self._running:
            self._running[id].cancel()
        elif id in self._tasks:
            self._tasks[id].cancel()

    def load(self, job: VideoJob) -> tuple[VideoBody, Request]:
        """The request of a job, from its folder. Slow: use a thread."""
        images: dict[str, list[Image.Image]] = {}
        for file in sorted(self.store.file(job.id, "").glob("*.png"), key=lambda file: (len(file.name), file.name)):
            with Image.open(file) as image:
                image.load()
                images.setdefault(file.stem.partition("-")[0], []).append(image)
        body = read_values(self._state, VideoBody, job.values)
        return body, engine_request(self._state, body, images)

    # ------------------------------------------------------------------------------------------ making

    async def _turn(self) -> None:
        """Begin what waits, as soon as there is a place."""
        while True:
            self._changed.clear()
            try:
                pause_s = await self._begin_next()
            except sqlite3.Error:
                log.exception("the jobs cannot be read")
                pause_s = _PAUSE_S
                self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), pause_s)

    async def _begin_next(self) -> float:
        """Begin what waits, and return how long nothing else needs to be done."""
        pause_s = _SWEEP_S if await self._in_store(JobStore.retry) else _FULL_PAUSE_S
        await self._in_store(JobStore.remove_expired)
        config = self._state.omni.config
        places, busy = _AT_ONCE + config.num_replicas, set(self._tasks)
        waiting = await self._in_store(JobStore.waiting, self._state.model_name, places + config.max_queue)
        for job in waiting:
            left_s = _left_s(job)
            if job.id in busy:
                continue
            if left_s is not None and left_s <= 0:
                message = "The video was not begun before its deadline. Allow more time, or try again later."
                await self._fail(job, ApiError(503, message, code="queue_timeout"))
            elif len(self._tasks) < places and self._state.phase == "serving":
                if shutil.disk_usage(self.store.folder).free < job.num_bytes:
                    return _FULL_PAUSE_S  # It would be made in vain.
                self._tasks[job.id] = asyncio.create_task(self._make(job))
            else:
                pause_s = min(pause_s, left_s or pause_s)
        return pause_s

    async def _make(self, job: VideoJob) -> None:
        try:
            body, request = await asyncio.to_thread(self.load, job)
            check_request(self._state, body, request)  # The model or the limits may be others now.
            async with self._room(memory_of(self._state, request)):
                await self._run(job, body, request)
        except ApiError as error:
            await self._give_up(job, error)
        except SamovarError as error:
            await self._give_up(job, self._state.api_error(error))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError):
                raise  # It was deleted before it ran.
            log.exception("the video %s failed", job.id)
            await self._fail(job, ApiError(500, "The server failed. Its log says why.", code="internal_error"))
            if not isinstance(error, Exception):
                raise
        finally:
            for kept in (self._tasks, self._running, self.progress, self.previews):
                kept.pop(job.id, None)
            self._changed.set()

    async def _run(self, job: VideoJob, body: VideoBody, request: Request) -> None:
        left_s = _left_s(job)
        running = submit(self._state, body, request, None if left_s is None else max(0.001, left_s))
        self._running[job.id] = running
        async for event in running:
            if isinstance(event, Started):
                job.status, job.attempts = "in_progress", job.attempts + 1
                await self._in_store(JobStore.save, job)
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
        if not await self._in_store(JobStore.save, job):  # Deleted meanwhile.
            await asyncio.to_thread(shutil.rmtree, self.store.file(job.id, ""), ignore_errors=True)
        log.info("video %s made in %.1f s", job.id, result.seconds, extra={"job": job.id, "generate_s": result.seconds})

    def _end(self, job: VideoJob) -> None:
        job.completed_at = time.time()
        job.expires_at = job.completed_at + self._state.config.job_expiry_s

    def _set_failed(self, job: VideoJob, error: ApiError) -> None:
        job.status, job.error = "failed", {"code": error.code or "internal_error", "message": error.message}
        job.num_bytes = 0
        self._end(job)

    async def _fail(self, job: VideoJob, error: ApiError) -> None:
        self._set_failed(job, error)
        await self._in_store(JobStore.save, job)
        await asyncio.to_thread(shutil.rmtree, self.store.file(job.id, ""), ignore_errors=True)

    async def _give_up(self, job: VideoJob, error: ApiError) -> None:
        """Let a job wait for another try if the server or the worker is to blame; else it has failed."""
        is_ending = error.code == "shutting_down"
        if is_ending or (error.code in _AGAIN and job.attempts < _MAX_ATTEMPTS):
            job.attempts -= is_ending and job.status == "in_progress"
            job.status = "queued"
            await self._in_store(JobStore.save, job)
            if not is_ending:
                await asyncio.sleep(_PAUSE_S)
        else:
            await self._fail(job, error)

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


def _there(found: T | None, id: str, param: str = "id") -> T:
    """What was found; ApiError if there is no such video."""
    if found is None:
        message = f"There is no video {id[:80]!r}. It may have expired."
        raise ApiError(404, message, param=param, code="video_not_found")
    return found


def _left_s(job: VideoJob) -> float | None:
    """What is left of its time to wait."""
    return None if job.begin_by is None else job.begin_by - time.time()


def _as_png(images: dict[str, Image.Image]) -> dict[str, bytes]:
    return {name: encode(image, ".png") for name, image in images.items()}


def _files_of(video: Video) -> dict[str, bytes]:
    contents: dict[str, Any] = {"video": encode(video, ".mp4"), "thumbnail": webp(thumbnail(video)),
                                "spritesheet": encode(spritesheet(video), ".jpg")}  # fmt: skip
    return {VARIANTS[name][0]: content for name, content in contents.items()}
