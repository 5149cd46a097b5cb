"""How does an HTTP request become a video? OpenAI's videos API: a job that is asked for, watched and fetched."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from ..core.errors import nearest
from ..engine import Job
from .api_errors import ApiError, refusal
from .app_state import AppState
from .asking import FORM, JSON, Asked, check_asked, read_asked, unless_gone
from .bodies import RemixBody, VideoBody, checked
from .job_store import VideoJob
from .making import encoded, make_now
from .uploads import check_type, receive_body
from .video_jobs import VARIANTS, VideoJobs

VIDEO_FILES = {"input_reference": "image", "image": "image", "image[]": "image", "last_image": "last_image",
               "mask": "mask", "control_image": "control_image"}  # fmt: skip
"""The names of files, and which inputs they are."""
_POLL_MS = 500
_MAX_PAGE = 100


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

    async def create(self, request: Request) -> Response:
        check_type(request, FORM, JSON)
        jobs = self._jobs
        return self._answer(await jobs.create(await self._asked(request)))

    async def create_now(self, request: Request) -> Response:
        """The video itself, while the client waits."""
        asked = await self._asked(request)
        check_asked(self.state, asked)

        async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
            return await encoded(self.state, request, job, ".mp4"), "video/mp4"

        return await make_now(self.state, request, asked, answer)

    async def retrieve(self, video_id: str) -> Response:
        return self._answer(self._jobs.find(video_id))

    async def page(
        self, request: Request, after: str | None = None, limit: str = "20", order: str = "desc"
    ) -> Response:
        """Videos by age, the newest first."""
        _check_query(request, "after", "limit", "order")
        if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= _MAX_PAGE:
            raise refusal("limit", f"limit must be a number from 1 to {_MAX_PAGE}, not {limit[:40]!r}.")
        if order not in ("asc", "desc"):
            raise refusal("order", f"order must be asc or desc, not {order[:40]!r}.")
        if after is not None:
            self._jobs.find(after, "after")
        jobs, has_more = self._jobs.store.page(after, int(limit), order)
        data = [self._described(job) for job in jobs]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return JSONResponse({"object": "list", "data": data, **ends, "has_more": has_more})

    async def content(self, request: Request, video_id: str, variant: str = "video") -> Response:
        """The video, or an image of it. While it is made, the thumbnail is the last preview."""
        _check_query(request, "variant")
        if variant not in VARIANTS:
            raise refusal("variant", f"variant must be {', '.join(VARIANTS)}, not {variant[:40]!r}.")
        job = self._jobs.find(video_id)
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
        self._jobs.delete(video_id)
        return JSONResponse({"id": video_id, "object": "video.deleted", "deleted": True})

    async def remix(self, request: Request, video_id: str) -> Response:
        """The same again for another prompt: with its seed, its settings and its images."""
        check_type(request, JSON)
        with self.state.bodies.hold() as hold:
            parts = await receive_body(request, self.state.config.limits.max_json_bytes, hold)
            values, _ = await unless_gone(request, self.state.body_readers.read_object(parts))
        prompt = checked(RemixBody, values).prompt
        job = self._jobs.find(video_id)
        if job.status != "completed":
            message = f"The video is {job.status.replace('_', ' ')}. Only a completed one can be remixed."
            raise ApiError(400, message, param="id", code="video_not_ready")
        asked = await asyncio.to_thread(self._jobs.load, replace(job, values={**job.values, "prompt": prompt}))
        return self._answer(await self._jobs.create(asked, remixed_from=job.id))

    @property
    def _jobs(self) -> VideoJobs:
        self.state.check_open()
        self.state.check_kind("video")
        if not self.state.keeps_jobs:
            message = "This is one of several replicas, which keep no jobs. Ask at /v1/videos/sync."
            raise ApiError(400, message, code="unsupported_value")
        return self.state.video_jobs

    async def _asked(self, request: Request) -> Asked[VideoBody]:
        check_type(request, FORM, JSON)
        self.state.check_open()
        self.state.check_kind("video")
        return await read_asked(self.state, request, VideoBody, types=(FORM, JSON), files=VIDEO_FILES)

    def _answer(self, job: VideoJob) -> Response:
        headers = {} if job.is_over else {"openai-poll-after-ms": str(_POLL_MS)}
        return JSONResponse(self._described(job), headers=headers)

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


def _check_query(request: Request, *known: str) -> None:
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name in known and given.count(name) > 1:
            raise refusal(name, f"{name} is given {given.count(name)} times. Give it once.")
        if name not in known:
            message = f"{name[:50]!r} is not a parameter of this address. {nearest(name, known)}"
            raise ApiError(400, message, param=name[:100], code="unknown_field")
