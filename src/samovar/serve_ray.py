"""One server as many: a Ray Serve application, with the extra `ray`.

    serve run samovar.serve_ray:build model=emoji num_replicas=2
    serve run samovar.serve_ray:build model=./flux num_gpus=1 min_replicas=2 max_replicas=16 gpu_memory=20GiB

Ray starts replicas on the machines of its cluster, watches them, replaces those that die, adds some under load, and
routes each request to one that has room. A replica is `samovar serve` without its socket: the same routes, limits and
errors, with its own worker processes and queue.
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

from .core.aliases import ALIASES
from .core.errors import SettingError
from .core.files import check_names
from .core.settings import Settings, count, number, setting, table
from .engine import OmniDiffusionConfig
from .omni import AsyncOmni
from .server.app import create_app
from .server.settings import ServerConfig
from .server.state import AppState

_OTHER_REQUESTS = 8
"""Concurrent requests of a replica that do not generate anything: for its health, its metrics, its page."""


@dataclass(frozen=True)
class RayConfig(Settings, param="ray"):
    """The number of replicas, and the share of a machine that each one takes."""

    num_replicas: int | None = setting(
        None, count(1), "A fixed number. By default as many as the load needs, between the next two."
    )
    min_replicas: int = setting(1, count(), "Replicas at least.")
    max_replicas: int | None = setting(None, count(1), "Replicas at most. By default there is no autoscaling.")
    num_gpus: float | None = setting(
        None, number(),
        "GPUs per replica. By default one for each rank of each of its workers, if they run on GPUs. With 0.5 two "
        "replicas share one.",
    )  # fmt: skip
    num_cpus: float = setting(1.0, number(), "Processor cores per replica.")
    max_queued: int = setting(64, count(1), "Requests that wait at a proxy of Ray while all replicas are busy.")
    drain_s: float = setting(30.0, number(), "Seconds for running requests to finish when a replica is shut down.")
    health_period_s: float = setting(10.0, number(0, above=True), "Seconds between two looks at a replica's health.")

    def check(self) -> None:
        if self.max_replicas is None:
            return
        if self.num_replicas is not None:
            message = "Give num_replicas (fixed) or max_replicas (autoscaling), not both."
            raise SettingError(message, param="max_replicas")
        if self.max_replicas < self.min_replicas:
            message = f"max_replicas is {self.max_replicas}, less than min_replicas, {self.min_replicas}."
            raise SettingError(message, param="max_replicas")

    def options(self, engine: OmniDiffusionConfig) -> dict[str, Any]:
        """The same as options of a Ray deployment."""
        gpus = self.num_gpus
        if gpus is None:
            gpus = engine.num_ranks * engine.num_replicas if engine.execution_device().type == "cuda" else 0
        options: dict[str, Any] = {
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": gpus},
            "max_ongoing_requests": engine.num_replicas + engine.max_queue + _OTHER_REQUESTS,
            "max_queued_requests": self.max_queued,
            "graceful_shutdown_timeout_s": self.drain_s,
            "health_check_period_s": self.health_period_s,
        }
        if self.max_replicas is None:
            return options | {"num_replicas": self.num_replicas or max(self.min_replicas, 1)}
        autoscaling = {"min_replicas": self.min_replicas, "max_replicas": self.max_replicas}
        return options | {"autoscaling_config": autoscaling | {"target_ongoing_requests": 2}}


_here: dict[str, ASGIApp] = {}
"""The application of this process as "app", if the process is a replica."""


class _Front:
    """The application that Ray sees. It forwards to that of the replica, once there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
        else:
            await _here["app"](scope, receive, send)


@serve.deployment(name="samovar")
@serve.ingress(_Front())
class Replica:
    """A server without a socket."""

    async def __init__(  # type: ignore[misc, unused-ignore]
        self, engine: OmniDiffusionConfig, config: ServerConfig
    ) -> None:
        self._state = AppState(AsyncOmni(od_config=engine), config, keeps_jobs=False)
        await self._state.omni.start()
        self._state.open()
        # Ray sends this class by value, with a copy of everything that it names; `_Front` reads the module's.
        importlib.import_module("samovar.serve_ray")._here["app"] = create_app(self._state)

    def check_health(self) -> None:
        """Ray calls this from time to time, and replaces a replica for which it raises. One that is restarting its
        worker is healthy: it will be back sooner than a new replica."""
        if self._state.problem() == "dead":
            raise RuntimeError("The engine is down: its workers died repeatedly.")

    async def __del__(self) -> None:
        await self._state.close()


def build(arguments: Mapping[str, Any] | None = None) -> serve.Application:
    """The application, from the settings of `RayConfig` and `OmniDiffusionConfig`, `config` (a file) and `api_key` (by
    default SAMOVAR_API_KEY). Text, as from the command line, is read as YAML, except for the key, which YAML would
    change (0123, no)."""
    given = {
        name: yaml.safe_load(value) if isinstance(value, str) and name != "api_key" else value
        for name, value in (arguments or {}).items()
    }
    engine_names = {field.name for field in fields(OmniDiffusionConfig)} | ALIASES.keys()
    check_names(given, [*table(RayConfig), *engine_names, "api_key", "config"], "a setting of this application")
    config = RayConfig(**{name: value for name, value in given.items() if name in table(RayConfig)})
    file = given.get("config")
    engine = OmniDiffusionConfig.read({name: value for name, value in given.items() if name in engine_names}, file)
    # Requests reach a replica through a proxy of Ray, under any host name.
    settings = {"host": "0.0.0.0", "shutdown_timeout_s": config.drain_s}
    key = _key(given.get("api_key"))
    server = ServerConfig.read_over(settings if key is None else {**settings, "api_key": key}, file)
    replica: Any = Replica
    application: serve.Application = replica.options(**config.options(engine)).bind(engine, server)
    return application


def _key(given: Any) -> str | None:
    if given is None:
        return os.environ.get("SAMOVAR_API_KEY")
    if not isinstance(given, str):  # A YAML file was read already, and the key perhaps as another number.
        raise SettingError(f"api_key must be text, not {type(given).__name__}. Put it in quotes.", param="api_key")
    return given
