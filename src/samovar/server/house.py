"""Who is at home? The engine, and whether it takes requests."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from ..errors import SamovarError, SettingError
from ..omni import AsyncOmni
from .failures import Refusal, is_internal, refusal_of
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
    is_loaded: bool = False
    """Whether the model is known. A server may be told to end before."""

    def open(self) -> None:
        """Take requests, once the engine has started; refused if the model's own defaults exceed the limits: a request
        that says nothing would be one that nobody may send."""
        defaults, limits = self.omni.defaults, self.config.limits
        pixels = (defaults.width or 0) * (defaults.height or 0)
        for what, value, option, most in (
            (f"size {defaults.width}x{defaults.height}", pixels, "max_pixels", limits.max_pixels),
            ("num_inference_steps", defaults.num_inference_steps or 0, "max_steps", limits.max_steps),
            ("num_outputs_per_prompt", defaults.num_outputs_per_prompt or 0, "max_pictures", limits.max_pictures),
        ):
            if value > most:
                raise SettingError(
                    f"{option} is {most}, and the model's own default, {what}, is {value}. "
                    f"Raise --{option.replace('_', '-')}, or give the model smaller defaults in its samovar.json."
                )
        self.is_loaded, self.phase = True, "serving"

    def check_not_ending(self) -> None:
        """Refuse what only a loaded model could answer, if it will never be loaded."""
        if self.phase == "draining" and not self.is_loaded:
            message = "The server is ending, and its model was not loaded."
            raise Refusal(503, message, code="shutting_down", headers={"Retry-After": "5"})

    @cached_property
    def model_name(self) -> str:
        """What clients call the model. A folder's name, never where it is, and the same as long as the server lives."""
        path = Path(self.omni.config.model)
        return path.resolve().name if path.name in ("", "..") else path.name

    @cached_property
    def is_cached(self) -> bool:
        """Whether the engine skips steps; the environment may say so too."""
        return self.omni.config.attach_config().cache is not None

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
        self.check_not_ending()
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
        if is_internal(error):
            log.error("the engine failed: %s: %s", type(error).__name__, error)
        return refusal_of(error)
