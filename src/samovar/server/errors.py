"""What a client gets instead of an image: one body for every error, in OpenAI's form."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from ..core.errors import EngineError, QueueFullError, SamovarError, SettingError
from ..core.settings import table

_ANSWERS: dict[str, tuple[int, int]] = {
    "queue_full": (429, 1),
    "queue_timeout": (503, 5),
    "worker_restarted": (503, 2),
    "shutting_down": (503, 5),
    "engine_down": (503, 30),
    "step_timeout": (504, 0),
    "out_of_memory": (507, 0),
    "nan_latents": (500, 0),
    "cancelled": (499, 0),
}
"""By the code of an engine's error: its status, and the seconds after which to try again. With 0 the same request would
fail again, and OpenAI's clients retry by default."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_WIRE_NAMES = {"height": "size", "width": "size", "num_outputs_per_prompt": "n", "deadline_s": "deadline",
               "num_previews": "partial_images"}  # fmt: skip
"""Parameters that have another name in a request."""
_PYTHON_NAMES = re.compile(r"\b(exact=True|[a-z]+(?:_[a-z]+)+)\b")

log = logging.getLogger("samovar.server")


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, in OpenAI's form"""

    error: ErrorDetail


class ApiError(SamovarError):
    """An error that is sent to the client; `param` is the field at fault. It goes from one process to another."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: str = "invalid_value",
        status: int = 400,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body())  # In ASCII: a field's name may not be valid UTF-8.
        return Response(content, self.status, headers=self.headers, media_type="application/json")


@functools.cache
def _server_names() -> Mapping[str, str]:
    """What Python's settings and parameters are called in the server's options and in requests."""
    from ..engine import OmniDiffusionConfig  # It loads torch, which the processes that read bodies do without.

    options = {
        name: f"--{name.removesuffix('_s').replace('_', '-')}" for name in table(OmniDiffusionConfig) if "_" in name
    }
    return {**options, **_WIRE_NAMES, "exact=True": '"cache": false'}


def api_error(error: SamovarError) -> ApiError:
    """What the client sees of an error. What is about the server rather than the request, such as a model file or an
    exception of a library, is logged instead."""
    if isinstance(error, ApiError):
        return error
    message = _PYTHON_NAMES.sub(lambda match: _server_names().get(match[1], match[1]), str(error))
    if isinstance(error, SettingError):
        return ApiError(message, _WIRE_NAMES.get(error.param or "", error.param))
    if not isinstance(error, EngineError) or error.code not in _ANSWERS:
        log.error("the engine failed: %s: %s", type(error).__name__, error)
        return ApiError("The engine failed. The server's log says why.", code="internal_error", status=500)
    status, retry_s = _ANSWERS[error.code]
    if isinstance(error, QueueFullError):
        retry_s = max(retry_s, math.ceil(error.retry_after_s))
    headers = {"Retry-After": str(retry_s)} if retry_s else {"x-should-retry": "false"}
    return ApiError(message, None, error.code, status, headers)
