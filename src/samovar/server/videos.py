"""Videos over HTTP, as in OpenAI's API: a job that is asked for, watched and fetched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.responses import FileResponse, JSONResponse, Response

from ..core.errors import nearest
from ..engine import Job, Request
from .decode_worker import JSON
from .errors import ApiError, refusal
from .job_store import VideoJob
from .request import FORM, HttpRequest, check_request, check_type, read_request, receive_body, unless_gone
from .respond import encoded, json_response, make_now
from .schemas import RemixBody, VideoBody, checked
from .state import AppState
from .video_jobs import MAX_PAGE_BYTES, VARIANTS, VideoJobs

VIDEO_FILES = {"input_reference": "image", "image": "image", "image[]": "image", "last_image": "last_image",
               "mask": "mask", "control_image": "control_image"}  # fmt: skip
"""The names of files, and which inputs they are."""
_POLL_MS = 500
_MAX_PAGE = 100
_PAGE_MEMORY = 4 * MAX_PAGE_BYTES
"""What a page takes until it is bytes: its records, what they hold, and the same as text."""


class VideoData(BaseModel):
    """A video, made or to be made."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    size: str
    seconds: str
    prompt: str
    remixed_from_video_id: str | None
    error: dict[str, str] | None
    samovar: dict[str, Any]


class VideoList(BaseModel):
    """Some videos"""

    object: Literal["list"] = "list"
    data: list[VideoData]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    """A video that was deleted"""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


@dataclass(frozen=True)
class Videos:
    """The routes."""

    state: AppState

    async def create(self, request: HttpRequest) -> Response:
        check_type(request, FORM, JSON)
        jobs = self._jobs
        return await self._answer(await jobs.create(*await self._read(request)))

    async def create_now(self, request: HttpRequest) -> Response:
        """The video itself, while the client waits."""
        body, wanted = await self._read(request)
        check_request(self.state, body, wanted)

        async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
            return await encoded(self.state, request, job, ".mp4"), "video/mp4"

        return await make_now(self.state, request, body, wanted, answer)

    async def retrieve(self, video_id: str) -> Response:
        return await self._answer(await self._jobs.find(video_id))

    async def page(
        self, request: HttpRequest, after: str | None = None, limit: str = "20", order: str = "desc"
    ) -> Response:
        """Videos by age, the newest first."""
        _check_query(request, "after", "limit", "order")
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MAX_PAGE:
            raise refusal("limit", f"limit must be a number from 1 to {_MAX_PAGE}, not {limit[:40]!r}.")
        if order not in ("asc", "desc"):
            raise refusal("order", f"order must be asc or desc, not {order[:40]!r}.")
        if after is not None:
            await self._jobs.find(after, "after")
        with self.state.images.hold() as hold:
            hold.add(_PAGE_MEMORY)
            jobs, has_more = await self._jobs.page(after, int(limit), order)

        def build() -> dict[str, Any]:
            data = [self._described(job) for job in jobs]
            ends = {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
            return {"object": "list", "data": data, **ends, "has_more": has_more}

        return await json_response(self.state, build, _PAGE_MEMORY)

    async def content(self, request: HttpRequest, video_id: str, variant: str = "video") -> Response:
        """The video, or an image of it. While it is made, the thumbnail is the last preview."""
        _check_query(request, "variant")
        if variant not in VARIANTS:
            raise refusal("variant", f"variant must be {', '.join(VARIANTS)}, not {variant[:40]!r}.")
        job = await self._jobs.find(video_id)
        name, media_type = VARIANTS[variant]
        file = self._jobs.store.file(job.id, name)
        if job.status == "completed" and not file.is_file():
            message = "The file of this video was removed from the server's folder. Delete the video, or remix it."
            raise ApiError(404, message, param="id", code="video_not_found")
        if job.status == "completed":
            return FileResponse(file, media_type=media_type)
        if variant == "thumbnail" and job.id in self._jobs.previews:
            return Response(self._jobs.previews[job.id], media_type="image/webp", headers={"Cache-Control": "no-store"})
        if job.status == "failed":
            reason = (job.error or {}).get("message", "")
            raise ApiError(404, f"The video was not made. {reason}", param="id", code="video_failed")
        message = f"The video is {job.status.replace('_', ' ')}. Ask again when it is completed."
        raise ApiError(404, message, param="variant", code="video_not_ready")

    async def delete(self, video_id: str) -> Response:
        await self._jobs.delete(video_id)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    async def remix(self, request: HttpRequest, video_id: str) -> Response:
        """The same again for another prompt: with its seed, its settings and its images."""
        check_type(request, JSON)
        with self.state.bodies.hold() as hold:
            parts = await receive_body(request, self.state.config.limits.max_json_bytes, hold)
            values, _ = await unless_gone(request, self.state.decode_pool.read(JSON, parts))
        prompt = checked(RemixBody, values).prompt
        job = await self._jobs.find(video_id)
        if job.status != "completed":
            message = f"The video is {job.status.replace('_', ' ')}. Only a completed one can be remixed."
            raise ApiError(400, message, param="id", code="video_not_ready")
        loaded = await asyncio.to_thread(self._jobs.load, replace(job, values={**job.values, "prompt": prompt}))
        return await self._answer(await self._jobs.create(*loaded, remixed_from=job.id))

    @property
    def _jobs(self) -> VideoJobs:
        self.state.check_open()
        self.state.check_kind("video")
        if not self.state.keeps_jobs:
            message = "This is one of several replicas, which keep no jobs. Ask at /v1/videos/sync."
            raise ApiError(400, message, code="unsupported_value")
        return self.state.video_jobs

    async def _read(self, request: HttpRequest) -> tuple[VideoBody, Request]:
        check_type(request, FORM, JSON)
        self.state.check_open()
        self.state.check_kind("video")
        return await read_request(self.state, request, VideoBody, types=(FORM, JSON), files=VIDEO_FILES)

    async def _answer(self, job: VideoJob) -> Response:
        headers = {} if job.completed_at else {"openai-poll-after-ms": str(_POLL_MS)}
        return await json_response(self.state, lambda: self._described(job), MAX_PAGE_BYTES, headers)

    def _described(self, job: VideoJob) -> dict[str, Any]:
        progress = 100 if job.status == "completed" else self._jobs.progress.get(job.id, 0)
        settings = {name: value for name, value in job.values.items() if name not in ("prompt", "user")}
        return VideoData(
            id=job.id,
            model=job.model,
            status=job.status,
            progress=progress,
            created_at=int(job.created_at),
            completed_at=None if job.completed_at is None else int(job.completed_at),
            expires_at=None if job.expires_at is None else int(job.expires_at),
            size=job.size,
            seconds=f"{job.seconds:g}",
            prompt=job.values.get("prompt", ""),
            remixed_from_video_id=job.remixed_from,
            error=job.error,
            samovar={"request": settings, "has_preview": job.id in self._jobs.previews, **job.details},
        ).model_dump()


def _check_query(request: HttpRequest, *known: str) -> None:
    for name in request.query_params:
        count = len(request.query_params.getlist(name))
        if name in known and count > 1:
            raise refusal(name, f"{name} is given {count} times. Give it once.")
        if name not in known:
            message = f"{name[:50]!r} is not a parameter of this address. {nearest(name, known)}"
            raise ApiError(400, message, param=name[:100], code="unknown_field")
