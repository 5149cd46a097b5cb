"""What all routes share: the engine, the settings, the budgets, and whether requests are taken now."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cache import AutoConfig
from ..core.errors import SettingError, ShuttingDownError, nearest
from ..core.settings import read_tolerance
from ..engine import Request
from ..omni import AsyncOmni
from .decode import DecodePool
from .errors import ApiError
from .fetch import Fetcher
from .memory import Ledger
from .output_size import output_size
from .schemas import Body, schema_of
from .settings import BYTES_PER_PIXEL, ServerConfig

if TYPE_CHECKING:
    from .video_jobs import VideoJobs

_TOLERANCES = {"high": "high", "hd": "high", "low": "fast"}
"""What OpenAI's qualities stand for; "auto", "medium" and "standard" are what the server was started with."""

_ADDRESSES = {"image": "/v1/images/generations", "video": "/v1/videos", "audio": "/v1/audio/generate"}


@dataclass
class AppState:
    omni: AsyncOmni
    config: ServerConfig
    phase: Literal["loading", "serving", "draining"] = "loading"
    is_loaded: bool = False
    """Whether the model's facts are known. A server may drain before it has loaded."""
    keeps_jobs: bool = True
    """Whether videos can be asked for as jobs: by all clients of one server, so not by those of many replicas."""

    jobs: VideoJobs | None = None

    def __post_init__(self) -> None:
        self._schemas: dict[Any, Any] = {}
        most = self.config.max_tolerance
        if most is None or (choice := self.omni.config.attach_config.cache) is None:
            return
        if not isinstance(choice.settings, AutoConfig):
            remedy = "which does not know how much it loses. Choose the cache 'auto', or leave it out."
            message = f"max_tolerance={most:g} cannot be kept by the cache {choice.backend!r}, {remedy}"
            raise SettingError(message, param="max_tolerance")
        if choice.settings.number > most:
            message = f"max_tolerance={most:g} is less than the default tolerance, {choice.settings.number:g}."
            raise SettingError(f"{message} Give tolerance={most:g} too.", param="max_tolerance")

    def open(self) -> None:
        """Take requests, once the engine has started. Refused if the model's own defaults exceed the limits."""
        facts = self.omni.facts
        try:
            facts.check_size(self.omni.defaults)
            self.usual_size = output_size(facts, Request(""), self.config.limits)
        except SettingError as error:
            message = f"With the defaults, requests that leave them out would all be refused: {error}"
            raise SettingError(message, param=error.param) from error
        words = ("image", "mask", "control_image", *["last_image"] * (self.omni.output.kind == "video"))
        facts.inputs.check_sendable(words, facts.class_name)
        for name in set(self.adapters) & set(self.model_names):
            message = f"The adapter {name!r} has the name of the model. Rename it, or give another --served-model-name."
            raise SettingError(message, param="lora")
        self.is_loaded = True
        if self.keeps_jobs and self.omni.output.kind == "video":
            from .video_jobs import VideoJobs  # It needs this file.

            self.jobs = VideoJobs(self)
        self.phase = "serving"

    async def close(self) -> None:
        """Let what runs finish within `shutdown_timeout_s`, refuse what waits, and end the engine. Videos that were not
        made stay in their folder, for the next server."""
        self.phase = "draining"
        await self.omni.close(self.config.shutdown_timeout_s)
        if self.jobs is not None:
            await self.jobs.close()
        self.decode_pool.close()

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
    def decode_pool(self) -> DecodePool:
        limits = self.config.limits
        # A body in three copies; pixels as coefficients, in their own mode and in ours, with room between.
        return DecodePool(3 * limits.max_upload_bytes + 32 * limits.max_pixels + 2**26)

    @cached_property
    def fetcher(self) -> Fetcher:
        return Fetcher(self.config.fetch_origins, self.config.limits.max_upload_bytes)

    def schema(self, kind: type[Body]) -> type[Body]:
        """A kind of request, as this server and its model take it."""
        if kind not in self._schemas:
            self._schemas[kind] = schema_of(kind, self.config.limits, self.omni.facts)
        found: type[Body] = self._schemas[kind]
        return found

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
            raise ApiError(message, "lora")
        return lora or [{"name": model}]

    @property
    def cache(self) -> str | None:
        """The cache by which the engine skips steps; it may also come from the environment."""
        choice = self.omni.config.attach_config.cache
        return None if choice is None else choice.backend

    def tolerance_of(self, tolerance: float | str | None, quality: str | None) -> float | str | None:
        """How much the cache may lose for a request: what it says, or what its quality stands for, within the limit."""
        most, by_quality = self.config.max_tolerance, _TOLERANCES.get(quality or "")
        if tolerance is None:
            if self.cache != "auto" or by_quality is None:
                return None  # Every step is computed, or nothing special is asked for; or see `is_exact`.
            return by_quality if most is None or read_tolerance(by_quality) <= most else most
        if by_quality is not None:
            raise ApiError("Give a quality or a tolerance, not both.", "tolerance")
        if most is not None and read_tolerance(tolerance) > most:
            raise ApiError(f"A tolerance of {tolerance} is above the limit of this server, {most:g}.", "tolerance")
        return tolerance

    def is_exact(self, cache: bool | None, quality: str | None) -> bool:
        """Whether every step of a request is computed: it says so, or it wants the quality "high" where the cache makes
        no promise of any."""
        return cache is False or (self.cache not in (None, "auto") and _TOLERANCES.get(quality or "") == "high")

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
            raise ApiError(message, "model", "model_not_found", 404)

    def check_open(self, kind: str | None = None) -> None:
        """Refuse while the model loads, or if it never will be; and what it does not make."""
        if self.phase == "loading":
            raise ApiError("The model is still loading.", None, "loading", 503, {"Retry-After": "2"})
        if not self.is_loaded:
            raise ShuttingDownError("The server is shutting down before its model was loaded.")
        made = self.omni.output.kind
        if kind not in (None, made):
            message = f"The model {self.model_name!r} makes {self.omni.output}. Ask for it at {_ADDRESSES[made]}."
            raise ApiError(message, "model", "unsupported_model")

    def check_can_edit(self) -> None:
        if not self.omni.can_edit:
            message = f"The model {self.model_name!r} only makes images from text; it cannot edit."
            raise ApiError(message, "image", "unsupported_model")
