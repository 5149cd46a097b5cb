"""How does an HTTP request become sound? /v1/audio/generate and /v1/audio/speech answer with a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from ..engine import Job
from ..media import check_suffix
from .app_state import AppState
from .asking import JSON, check_asked, read_asked
from .bodies import AudioBody, SpeechBody
from .making import encoded, make_now

TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "aac": "audio/aac", "opus": "audio/ogg",
         "pcm": "audio/pcm"}  # fmt: skip


@dataclass(frozen=True)
class Sounds:
    """The two routes, which differ in their fields."""

    state: AppState

    async def generate(self, request: Request) -> Response:
        return await self._respond(request, AudioBody)

    async def speak(self, request: Request) -> Response:
        return await self._respond(request, SpeechBody)

    async def _respond(self, request: Request, kind: type[AudioBody]) -> Response:
        self.state.check_kind("audio")
        self.state.check_room()
        asked = await read_asked(self.state, request, kind, types=(JSON,))
        check_asked(self.state, asked)
        suffix = check_suffix(f"sound.{asked.body.format}", "audio")

        async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
            return await encoded(self.state, request, job, suffix), TYPES[suffix[1:]]

        return await make_now(self.state, request, asked, answer)
