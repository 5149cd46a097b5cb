"""What a client gets instead of an image: one body for every error, in OpenAI's form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from ..core.errors import EngineError, QueueFullError, SamovarError, SettingError
from ..engine import OmniDiffusionConfig

_STATUS = {
    "queue_full": 429,
    "queue_timeout": 503,
    "worker_restarted": 503,
    "shutting_down": 503,
    "engine_down": 503,
    "step_timeout": 504,
    "out_of_memory": 507,
    "nan_latents": 500,
    "cancelled": 499,
}
_NO_RETRY = ("step_timeout", "out_of_memory", "nan_latents")
"""The same request would fail again, and OpenAI's clients retry by default."""
_RETRY_AFTER_S = {"worker_restarted": 2, "shutting_down": 5, "engine_down": 30, "queue_timeout": 5}
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_WIRE_NAMES = {"height": "size", "width": "size", "num_outputs_per_prompt": "n", "deadline_s": "deadline",
               "num_previews": "partial_images"}  # fmt: skip
"""Parameters that have another name in a request."""
_PYTHON_NAMES = re.compile(r"\b(exact=True|[a-z]+(?:_[a-z]+)+)\b")
_SERVER_NAMES = {
    **{name: f"--{name.removesuffix('_s').replace('_', '-')}" for field in fields(OmniDiffusionConfig)
       if "_" in (name := field.name)},
    **_WIRE_NAMES, "exact=True": '"cache": false',
}  # fmt: skip
"""What Python's settings and parameters are called in the server's options and in requests."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error, in OpenAI's form"""

    error: ErrorDetail


class ApiError(Exception):
    """An error that is sent to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body())  # In ASCII: a field's name may not be valid UTF-8.
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def refusal(param: str | None, message: str, code: str = "invalid_value") -> ApiError:
    """What a client gets whose request cannot be served as it is; `param` is the field at fault."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: SamovarError) -> ApiError:
    """What the client sees of an engine error. Internal errors stay in the log."""
    if isinstance(error, SettingError):
        param = _WIRE_NAMES.get(error.param or "", error.param)
        return ApiError(400, _in_wire_names(str(error)), param=param, code="invalid_value")
    if is_internal(error):
        return ApiError(500, "The engine failed. The server's log says why.", code="internal_error")
    assert isinstance(error, EngineError)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif error.code in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[error.code])
    if error.code in _NO_RETRY:
        headers["x-should-retry"] = "false"
    message = _in_wire_names(str(error))
    return ApiError(_STATUS.get(error.code, 500), message, code=error.code, headers=headers)


def _in_wire_names(message: str) -> str:
    return _PYTHON_NAMES.sub(lambda match: _SERVER_NAMES.get(match[1], match[1]), message)


def is_internal(error: SamovarError) -> bool:
    """Whether an error is about the server rather than the request, such as a model file or a library's exception."""
    is_known = isinstance(error, EngineError) and error.code != EngineError.code
    return not is_known and not isinstance(error, SettingError)
