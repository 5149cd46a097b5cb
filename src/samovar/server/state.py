"""What all routes share: the engine, the settings, the budgets, and whether requests are taken now."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cache import AutoConfig
from ..core.errors import SamovarError, SettingError, nearest
from ..core.settings import read_tolerance
from ..omni import AsyncOmni
from .decode_pool import DecodePool
from .errors import ApiError, api_error, is_internal
from .fetch import Fetcher
from .memory import Ledger
from .options import find_options
from .output_size import check_output_size, output_size
from .settings import BYTES_PER_PIXEL, ServerConfig

if TYPE_CHECKING:
    from .video_jobs import VideoJobs

_TOLERANCES = {"high": "high", "hd": "high", "low": "fast"}
"""What OpenAI's qualities stand for; "auto", "medium" and "standard" are what the server was started with."""

_ADDRESSES = {"image": "/v1/images/generations", "video": "/v1/videos", "audio": "/v1/audio/generate"}

log = logging.getLogger("samovar.server")


@dataclass
class AppState:
    omni: AsyncOmni
    config: ServerConfig
    phase: Literal["loading", "serving", "draining"] = "loading"
    is_loaded: bool = False
    """Whether the model's facts are known. A server may drain before it has loaded."""
    keeps_jobs: bool = True
    """Whether videos can be asked for as jobs: by all clients of one server, so not by those of many replicas."""

    def __post_init__(self) -> None:
        most = self.config.max_tolerance
        if most is None or (choice := self.omni.config.attach_config.cache) is None:
            return
        own, message = choice.settings, ""
        if not isinstance(own, AutoConfig):
            message = (
                f"cannot be kept by the cache {choice.backend!r}, which does not know how much it loses. "
                "Choose the cache 'auto', or leave it out."
            )
        elif own.number > most:
            message = f"is less than the default tolerance, {own.number:g}. Give tolerance={most:g} too."
        if message:
            raise SettingError(f"max_tolerance={most:g} {message}", param="max_tolerance")

    def open(self) -> None:
        """Take requests, once the engine has started. Refused if the model's own defaults exceed the limits."""
        defaults, limits, facts = self.omni.defaults, self.config.limits, self.omni.facts
        for name, value, option, most in (
            ("num_inference_steps", defaults.num_inference_steps, "--max-steps", limits.max_steps),
            ("num_outputs_per_prompt", defaults.num_outputs_per_prompt, "--max-images", limits.max_images),
        ):
            if (value or 0) > most:
                message = (
                    f"The default {name} is {value}, more than {option} {most}. Raise that, or set a smaller default."
                )
                raise SettingError(message, param=name)
        try:
            facts.check_size(defaults)
            check_output_size(output_size(facts), facts, limits)
        except SettingError as error:
            message = f"With the defaults, requests that leave them out would all be refused: {error}"
            raise SettingError(message, param=error.param) from error
        words = ("image", "mask", "control_image", *["last_image"] * (self.omni.output.kind == "video"))
        facts.inputs.check_sendable(words, facts.class_name)
        for name in set(self.adapters) & set(self.model_names):
            message = f"The adapter {name!r} has the name of the model. Rename it, or give another --served-model-name."
            raise SettingError(message, param="lora")
        self.is_loaded = True
        if self.has_jobs:
            self.video_jobs.open()
        self.phase = "serving"
        if self.omni.can_edit or self.omni.output.kind == "video":
            self.decode_pool.warm()

    def drain(self) -> None:
        """Take no more requests, and end those that are not in the queue yet."""
        self.phase = "draining"
        self.decode_pool.close()

    async def close(self) -> None:
        """Let what runs finish within `shutdown_timeout_s`, refuse what waits, and end the engine. Videos that were not
        made stay in their folder, for the next server."""
        await self.omni.close(self.config.shutdown_timeout_s)
        if self.is_loaded and self.has_jobs:
            await self.video_jobs.close()

    @property
    def has_jobs(self) -> bool:
        return self.keeps_jobs and self.omni.output.kind == "video"

    @cached_property
    def video_jobs(self) -> VideoJobs:
        from .video_jobs import VideoJobs  # It needs this file.

        return VideoJobs(self)

    @cached_property
    def bodies(self) -> Ledger:
        """What arrives. It cannot take the room of what is made."""
        return Ledger(self.config.memory_bytes // 4, "bodies")

    @cached_property
    def images(self) -> Ledger:
        """Images that wait to be edited, and what was made and is not sent or stored yet."""
        most = self.config.memory_bytes - self.bodies.most
        if self.is_loaded and self.omni.output.kind == "video" and self.config.max_memory is None:
            most = max(most, BYTES_PER_PIXEL * self.config.limits.max_video_pixels * self.omni.config.num_replicas)
        return Ledger(most, "images")

    @cached_property
    def options(self) -> dict[str, bool]:
        """Other arguments of the loaded pipeline that a request may set, and whether each is text."""
        return find_options(self.omni.facts)

    @cached_property
    def decode_pool(self) -> DecodePool:
        return DecodePool(self.config.limits)

    @cached_property
    def fetcher(self) -> Fetcher:
        return Fetcher(self.config.fetch_origins, self.config.limits.max_upload_bytes)

    @cached_property
    def model_name(self) -> str:
        """The model's name for clients: of a folder its name, never its path."""
        if self.config.served_model_name:
            return self.config.served_model_name[0]
        path = Path(self.omni.config.model)
        return path.resolve().name if path.name in ("", "..") else path.name

    @property
    def model_names(self) -> tuple[str, ...]:
        """All of its names."""
        return self.config.served_model_name or (self.model_name,)

    @cached_property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters that a request may name."""
        return tuple(self.omni.config.lora or ())

    def adapters_of(self, model: str | None, lora: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The adapters of a request. As in vllm, an adapter may also be named as the model."""
        if model is None or model in self.model_names:
            return lora
        if lora and lora != [{"name": model, "scale": lora[0].get("scale")}]:
            message = f"model names the adapter {model!r}, and lora names others. Give the model {self.model_name!r}."
            raise ApiError(400, message, param="lora", code="invalid_value")
        return lora or [{"name": model}]

    def tolerance_of(self, tolerance: float | str | None, quality: str | None) -> float | str | None:
        """How much the cache may lose for a request: what it says, or what its quality stands for, within the limit."""
        if tolerance is not None and quality in _TOLERANCES:
            raise ApiError(400, "Give a quality or a tolerance, not both.", param="tolerance", code="invalid_value")
        asked = _TOLERANCES.get(quality or "") if tolerance is None else tolerance
        choice, most = self.omni.config.attach_config.cache, self.config.max_tolerance
        if tolerance is None and (choice is None or choice.backend != "auto" or asked is None):
            return None  # Every step is computed, or nothing special is asked for; or see `is_exact`.
        if asked is not None and most is not None and read_tolerance(asked) > most:
            if tolerance is None:
                return most
            message = f"A tolerance of {asked} is above the limit of this server, {most:g}."
            raise ApiError(400, message, param="tolerance", code="invalid_value")
        return asked

    def is_exact(self, cache: bool | None, quality: str | None) -> bool:
        """Whether every step of a request is computed: it says so, or it wants the quality "high" where the cache makes
        no promise of any."""
        choice = self.omni.config.attach_config.cache
        is_other = choice is not None and choice.backend != "auto"
        return cache is False or (is_other and _TOLERANCES.get(quality or "") == "high")

    @cached_property
    def is_cached(self) -> bool:
        """Whether the engine skips steps; a cache may also come from the environment."""
        return self.omni.config.attach_config.cache is not None

    def problem(self) -> str | None:
        """Why no request is taken now, or None."""
        if self.phase != "serving":
            return self.phase
        status = self.omni.status()
        return None if status.is_ready and status.is_alive else "restarting" if status.is_alive else "dead"

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served."""
        known = (*self.model_names, *self.adapters)
        if name not in (None, *known):
            message = f"The model {(name or '')[:80]!r} is not served here. {nearest(name or '', known)}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def check_open(self) -> None:
        """Refuse while the model loads."""
        if self.phase == "loading":
            raise ApiError(503, "The model is still loading.", code="loading", headers={"Retry-After": "2"})
        self.check_not_draining()

    def check_not_draining(self) -> None:
        """Refuse what needs a model, if it will never be loaded."""
        if self.phase == "draining" and not self.is_loaded:
            message = "The server is shutting down before its model was loaded."
            raise ApiError(503, message, code="shutting_down", headers={"Retry-After": "5"})

    def check_room(self) -> None:
        """Refuse what would wait in a queue that is full, before it is received."""
        if self.is_loaded:
            try:
                self.omni.check_room()
            except SamovarError as error:
                raise self.api_error(error) from error

    def check_kind(self, kind: str) -> None:
        """Refuse a request for something else than the model makes."""
        made = self.omni.output.kind if self.is_loaded else kind
        if made != kind:
            message = f"The model {self.model_name!r} makes {self.omni.output}. Ask for it at {_ADDRESSES[made]}."
            raise ApiError(400, message, param="model", code="unsupported_model")

    def check_can_edit(self) -> None:
        """Refuse edits early, before the body is read. The queue has the last word on its length."""
        self.check_kind("image")
        if self.phase == "serving" and not self.omni.can_edit:
            message = f"The model {self.model_name!r} only makes images from text; it cannot edit."
            raise ApiError(400, message, param="image", code="unsupported_model")
        most = self.omni.config.max_queue
        if self.omni.status().queued + self.decode_pool.num_waiting >= most:
            message = f"{most} requests are already waiting. Try again later."
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})

    def api_error(self, error: SamovarError) -> ApiError:
        """What the client sees of an error; internal errors are logged instead."""
        if is_internal(error):
            log.error("the engine failed: %s: %s", type(error).__name__, error)
        return api_error(error)
