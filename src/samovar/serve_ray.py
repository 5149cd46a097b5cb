"""How does one server become many? As a Ray Serve application, with the extra `ray`.

    serve run samovar.serve_ray:build model=emoji num_replicas=2
    serve run samovar.serve_ray:build model=./flux num_gpus=1 min_replicas=2 max_replicas=16 gpu_memory=20GiB

Ray starts replicas on the machines of its cluster, watches them, replaces those that die, adds some under load, and
hands each request to one that has room. A replica is all of `samovar serve` but its socket: the same addresses, limits
and errors, with worker processes and a queue of its own.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import yaml  # type: ignore[import-untyped, unused-ignore]
from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from .engine import OmniDiffusionConfig
from .errors import SettingError, nearest
from .omni import AsyncOmni
from .server import AppState, ServerConfig, create_app

_WATCHING = 8
"""Requests beside those for pictures that a replica answers at once: for its health, its figures, its page."""


@dataclass(frozen=True)
class RayConfig:
    """How many replicas there are, and what each takes of its machine."""

    num_replicas: int | None = None
    """So many, always; or as many as the load asks for, within the next two."""
    min_replicas: int = 1
    max_replicas: int | None = None
    num_gpus: float | None = None
    """Of one replica: one for each rank, if it computes on GPUs. Half of one lets two replicas share it."""
    num_cpus: float = 1.0
    max_queued: int = 64
    """Requests that wait at a proxy of Ray while all replicas are full; more are refused."""
    drain_s: float = 30.0
    """How long what is running may take to finish when a replica is taken away."""
    health_period_s: float = 10.0

    def __post_init__(self) -> None:
        for name, least in (("num_replicas", 1), ("min_replicas", 0), ("max_replicas", 1), ("max_queued", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise SettingError(f"{name} must be a whole number from {least} on, not {value!r}.")
        for name in ("num_gpus", "num_cpus", "drain_s", "health_period_s"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < float("inf")):
                raise SettingError(f"{name} must be a number from 0 on, not {value!r}.")
        if not self.health_period_s:
            raise SettingError(f"health_period_s must be a number of seconds above 0, not {self.health_period_s!r}.")
        if self.num_replicas is not None and self.max_replicas is not None:
            raise SettingError("num_replicas is a fixed number, and max_replicas lets it change. Give one of them.")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise SettingError(f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}.")

    def options(self, engine: OmniDiffusionConfig) -> dict[str, Any]:
        """The same, as Ray takes it."""
        gpus = self.num_gpus
        if gpus is None:
            gpus = engine.num_ranks if engine.execution_device().type == "cuda" else 0
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": gpus},
            "max_ongoing_requests": 1 + engine.max_queue + _WATCHING,
            "max_queued_requests": self.max_queued,
            "graceful_shutdown_timeout_s": self.drain_s,
            "health_check_period_s": self.health_period_s,
        }
        if self.max_replicas is None:
            return options | {"num_replicas": self.num_replicas or max(self.min_replicas, 1)}
        autoscaling = {"min_replicas": self.min_replicas, "max_replicas": self.max_replicas}
        return options | {"autoscaling_config": autoscaling | {"target_ongoing_requests": 2}}


@dataclass
class _Here:
    """What this process serves, if it is a replica."""

    app: ASGIApp | None = None


_here = _Here()


class _Front:
    """The application that Ray is shown: that of the replica, once it has one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        else:
            assert _here.app is not None
            await _here.app(scope, receive, send)


@serve.deployment(name="samovar")
@serve.ingress(_Front())
class Replica:
    """A server without a socket."""

    async def __init__(  # type: ignore[misc, unused-ignore]
        self, engine: OmniDiffusionConfig, config: ServerConfig
    ) -> None:
        self._state = AppState(AsyncOmni(od_config=engine), config)
        await self._state.omni.start()
        self._state.open()
        # Ray sends this class by value, with a copy of all that it names; `_Front` asks the module.
        importlib.import_module("samovar.serve_ray")._here.app = create_app(self._state)

    def check_health(self) -> None:
        """Ray asks now and then, and replaces a replica for which this raises. One that is replacing its worker is
        well: it will be back sooner than another would be there."""
        if self._state.problem() == "dead":
            raise RuntimeError("The engine is down: its workers died again and again.")

    async def __del__(self) -> None:
        self._state.phase = "draining"
        await self._state.omni.close(self._state.config.shutdown_timeout_s)


def build(arguments: Mapping[str, Any] | None = None) -> serve.Application:
    """The application, from settings by name: those of `RayConfig` and `OmniDiffusionConfig`, and `api_key`. Text, as
    from the command line, is read as YAML, but for the key, which YAML would alter (0123, no). An `api_key` that is not
    given is that of SAMOVAR_API_KEY."""
    given = {name: value if name == "api_key" else _read(value) for name, value in (arguments or {}).items()}
    ray_names, engine_names = ([f.name for f in fields(cls)] for cls in (RayConfig, OmniDiffusionConfig))
    for name in given:
        if name not in (*ray_names, *engine_names, "api_key", "config"):
            hint = nearest(name, [*ray_names, *engine_names, "api_key", "config"])
            raise SettingError(f"{name!r} is no setting of this application. {hint}")
    config = RayConfig(**{name: value for name, value in given.items() if name in ray_names})
    settings = {name: value for name, value in given.items() if name in engine_names}
    engine = OmniDiffusionConfig.read(settings, given.get("config"))
    # Who reaches a replica does so through a proxy of Ray, by whatever name that has.
    server = ServerConfig(host="0.0.0.0", api_key=_key(given.get("api_key")), shutdown_timeout_s=config.drain_s)
    replica: Any = Replica
    application: serve.Application = replica.options(**config.options(engine)).bind(engine, server)
    return application


def _key(given: Any) -> str | None:
    if given is None:
        return os.environ.get("SAMOVAR_API_KEY")
    if not isinstance(given, str):  # A file's YAML has read it already, and perhaps as another number.
        raise SettingError(f"api_key must be text, not {type(given).__name__}. Put it in quotes.")
    return given


def _read(value: Any) -> Any:
    return yaml.safe_load(value) if isinstance(value, str) else value
