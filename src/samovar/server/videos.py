"""Videos over HTTP, as in OpenAI's API: a job that is asked for, watched and fetched."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, TypeAdapter
from starlette.responses import FileResponse, Response

from .decode import JSON
from .errors import ApiError
from .job_store import MAX_PAGE_BYTES, VideoData, VideoJob
from .request import ClientRequest, HttpRequest, check_type, read_values
from .respond import HeldResponse, in_thread
from .schemas import STRICT, RemixBody, read_body, read_query
from .state import AppState
from .video_jobs import FILES, VideoJobs

_POLL_MS = 500
_VIDEO = TypeAdapter(VideoData)
"""Writes a job without what only the server knows."""
_PAGE_MEMORY = 4 * MAX_PAGE_BYTES
"""What a page takes until it is bytes: its records, what they hold, and the same as text."""


class VideoList(BaseModel):
    """Some videos"""

    object: Literal["list"] = "list"
    data: list[VideoData]
    first_id: str | None
    last_id: str | None
    has_more: bool


class PageQuery(BaseModel):
    """Which videos are listed"""

    model_config = STRICT

    after: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


class ContentQuery(BaseModel):
    """Which file of a video is sent"""

    model_config = STRICT

    variant: Literal["video", "thumbnail", "spritesheet"] = "video"


class DeletedVideo(BaseModel):
    """A video that was deleted"""

    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


async def respond_with_job(http: HttpRequest, wanted: ClientRequest, remixed_from: str | None = None) -> Response:
    """A video that will be made."""
    return _described(await _jobs(wanted.state).create(wanted, remixed_from))


@dataclass(frozen=True)
class Videos:
    """The routes of videos that were asked for."""

    state: AppState

    async def retrieve(self, video_id: str) -> Response:
        return _described(await _jobs(self.state).find(video_id))

    async def page(self, request: HttpRequest) -> Response:
        """Videos by age, the newest first; made in a thread, and held in the budget until they are sent."""
        query, jobs = read_query(PageQuery, request), _jobs(self.state)
        if query.after is not None:
            await jobs.find(query.after, "after")
        with contextlib.ExitStack() as held:
            hold = held.enter_context(self.state.images.hold(_PAGE_MEMORY))
            found, has_more = await jobs.in_thread(jobs.store.page, query.after, query.limit, query.order)
            first, last = (found[0].id, found[-1].id) if found else (None, None)
            page = VideoList(data=found, first_id=first, last_id=last, has_more=has_more)
            content = (await asyncio.to_thread(page.model_dump_json)).encode()
            hold.release()
            hold.add(len(content))
            return HeldResponse.of(in_thread(iter([content])), JSON, held, {"Content-Length": str(len(content))})

    async def content(self, request: HttpRequest, video_id: str) -> Response:
        """The video, or an image of it. While it is made, the thumbnail is the last preview."""
        variant, jobs = read_query(ContentQuery, request).variant, _jobs(self.state)
        job = await jobs.find(video_id)
        name, media_type = FILES[variant]
        file = jobs.store.file(job.id, name)
        if job.status == "completed" and file.is_file():
            return FileResponse(file, media_type=media_type)
        if variant == "thumbnail" and job.preview is not None:
            return Response(job.preview, media_type="image/webp", headers={"Cache-Control": "no-store"})
        if job.status == "completed":
            message = "The file of this video was removed from the server's folder. Delete the video, or remix it."
            raise ApiError(message, "id", "video_not_found", 404)
        if job.status == "failed":
            reason = (job.error or {}).get("message", "")
            raise ApiError(f"The video was not made. {reason}", "id", "video_failed", 404)
        message = f"The video is {job.status.replace('_', ' ')}. Ask again when it is completed."
        raise ApiError(message, "variant", "video_not_ready", 404)

    async def delete(self, video_id: str) -> dict[str, Any]:
        await _jobs(self.state).delete(video_id)
        return DeletedVideo(id=video_id).model_dump()

    async def remix(self, request: HttpRequest, video_id: str) -> Response:
        """The same again for another prompt: with its seed, its settings and its images."""
        values, _ = await read_values(self.state, request, check_type(request, JSON), {})
        prompt, jobs = read_body(RemixBody, values).prompt, _jobs(self.state)
        job = await jobs.find(video_id)
        if job.status != "completed":
            message = f"The video is {job.status.replace('_', ' ')}. Only a completed one can be remixed."
            raise ApiError(message, "id", "video_not_ready")
        return await respond_with_job(request, await asyncio.to_thread(jobs.load, job, prompt), job.id)


def _jobs(state: AppState) -> VideoJobs:
    state.check_open("video")
    if state.jobs is None:
        message = "This is one of several replicas, which keep no jobs. Ask at /v1/videos/sync."
        raise ApiError(message, None, "unsupported_value")
    return state.jobs


def _described(job: VideoJob) -> Response:
    headers = {} if job.completed_at else {"openai-poll-after-ms": str(_POLL_MS)}
    return Response(_VIDEO.dump_json(job), media_type=JSON, headers=headers)
