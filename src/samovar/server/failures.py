"""What does a client get instead of a picture? One body for every error, the one that OpenAI's clients read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from ..errors import EngineError, QueueFullError, SamovarError, SettingError

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
_POINTLESS_TO_REPEAT = ("step_timeout", "out_of_memory", "nan_latents")
"""The same request would fail again. OpenAI's clients repeat it unless they are told."""

_RETRY_AFTER_S = {"worker_restarted": 2, "shutting_down": 5, "engine_down": 30, "queue_timeout": 5}

_PARAM_OF = {"height": "size", "width": "size", "num_outputs_per_prompt": "n"}
"""Settings that have another name on the wire."""

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class Refusal(Exception):
    """An answer that is an error: its status, and what its body says."""

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
        """In OpenAI's words."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        content = json.dumps(self.body()).encode()
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def refusal_of(error: SamovarError) -> Refusal:
    """What a client is told of an error of the engine. What is not meant for clients stays in the log."""
    if isinstance(error, SettingError):
        return Refusal(400, str(error), param=_param_in(str(error)), code="invalid_value")
    if is_internal(error):
        return Refusal(500, "The engine failed. The server's log says why.", code="internal_error")
    assert isinstance(error, EngineError)
    status = _STATUS.get(error.code, 500)
    headers: dict[str, str] = {}
    if isinstance(error, QueueFullError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    elif error.code in _RETRY_AFTER_S:
        headers["Retry-After"] = str(_RETRY_AFTER_S[error.code])
    if error.code in _POINTLESS_TO_REPEAT:
        headers["x-should-retry"] = "false"
    return Refusal(status, str(error), code=error.code, headers=headers)


def is_internal(error: SamovarError) -> bool:
    """Whether an error speaks of our inside, not of the request: a model's file, an exception of a library."""
    is_known = isinstance(error, EngineError) and error.code != EngineError.code
    return not is_known and not isinstance(error, SettingError)


def _param_in(message: str) -> str | None:
    """The setting that a message is about: it comes first in all of them, or after "takes no"."""
    match = re.match(r"(?:\w+ takes no )?([a-z]+(?:_[a-z]+)*)\b", message)
    name = match.group(1) if match else None
    known = {"num_inference_steps", "seed", "guidance_scale", "true_cfg_scale", "negative_prompt", "prompt", "image"}
    return _PARAM_OF.get(name or "", name if name in known else None)
