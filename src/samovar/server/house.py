"""Who is at home? The engine, and whether it takes requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..errors import EngineError, SamovarError, SettingError
from ..omni import AsyncOmni
from .failures import Refusal, refusal_of
from .protocol import ImageRequest
from .settings import ServerConfig

Phase = Literal["loading", "serving", "draining"]

log = logging.getLogger("samovar.server")


@dataclass
class House:
    """What all routes share."""

    omni: AsyncOmni
    config: ServerConfig
    phase: Phase = "loading"

    @property
    def model_name(self) -> str:
        """What clients call the model. A folder's name, never where it is."""
        return Path(self.omni.config.model).name

    @cached_property
    def is_cached(self) -> bool:
        """Whether the engine skips steps; the environment may say so too."""
        return self.omni.config.attach_config().make_cache(None) is not None

    def problem(self) -> str | None:
        """Why no request can be taken now, if so."""
        if self.phase != "serving":
            return self.phase
        status = self.omni.status()
        return None if status.is_ready and status.is_alive else "restarting" if status.is_alive else "dead"

    def engine_for(self, asked: ImageRequest) -> AsyncOmni:
        """Who makes the pictures; a request for another model, or for what is not there, is refused."""
        if asked.model is not None and asked.model != self.model_name:
            message = f"The model {asked.model[:80]!r} is not served here. Known: {self.model_name!r}."
            raise Refusal(404, message, param="model", code="model_not_found")
        if self.phase == "loading":
            raise Refusal(503, "The model is still being loaded.", code="loading", headers={"Retry-After": "2"})
        return self.omni

    def check_can_edit(self) -> None:
        if self.phase == "serving" and not self.omni.can_edit:
            message = f"The model {self.model_name!r} makes pictures from text alone, and edits none."
            raise Refusal(400, message, param="image", code="unsupported_model")

    def check_has_room(self) -> None:
        """Refuse early what the queue would refuse. The queue itself has the last word."""
        most = self.omni.config.max_queue
        if self.omni.status().queued >= most:
            message = f"{most} requests are waiting already. Try again later."
            raise Refusal(429, message, code="queue_full", headers={"Retry-After": "1"})

    def refusal_of(self, error: SamovarError) -> Refusal:
        """What the client is told; what it is not told is logged."""
        if not isinstance(error, (SettingError, EngineError)):
            log.error("the engine failed: %s: %s", type(error).__name__, error)
        return refusal_of(error)
