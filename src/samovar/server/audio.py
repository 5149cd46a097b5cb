"""Sound over HTTP: /v1/audio/generate and /v1/audio/speech answer with a file."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.responses import Response

from ..engine import Job
from ..media import check_suffix
from .decode_worker import JSON
from .request import HttpRequest, check_request, read_request
from .respond import encoded, make_now
from .schemas import AudioBody, SpeechBody
from .state import AppState

TYPES = {"wav": "audio/wav", "mp3": "audio/mpeg", "flac": "audio/flac", "aac": "audio/aac", "opus": "audio/ogg",
         "pcm": "audio/pcm"}  # fmt: skip


@dataclass(frozen=True)
class Sounds:
    """The two routes, which differ in their fields."""

    state: AppState

    async def generate(self, request: HttpRequest) -> Response:
        return await self._respond(request, AudioBody)

    async def speak(self, request: HttpRequest) -> Response:
        return await self._respond(request, SpeechBody)

    async def _respond(self, request: HttpRequest, kind: type[AudioBody]) -> Response:
        self.state.check_kind("audio")
        self.state.check_room()
        body, wanted = await read_request(self.state, request, kind, types=(JSON,))
        check_request(self.state, body, wanted)
        suffix = check_suffix(f"sound.{body.format}", "audio")

        async def answer(job: Job) -> tuple[AsyncIterator[bytes], str]:
            return await encoded(self.state, request, job, suffix), TYPES[suffix[1:]]

        return await make_now(self.state, request, body, wanted, answer)
