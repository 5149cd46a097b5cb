"""The worker of a Python program: in this process if one is enough, else in one process per rank."""

from __future__ import annotations

import contextlib
import os
import queue
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..compose import Explanation
from ..core.errors import SamovarError, SettingError
from ..parallel import join_world
from .events import SILENT, Done, Event, Failed, Listener, Outcome, Started
from .request import Request
from .settings import OmniDiffusionConfig
from .supervisor import Supervisor
from .worker import Worker

_POLL_S = 0.1
"""How often cancellation is checked while no event arrives."""


class MultirankWorker:
    """Worker processes that act as one worker. If one of them dies, all are replaced."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        self._supervisor = supervisor = Supervisor(config)
        supervisor.start()
        self.close = weakref.finalize(self, supervisor.close)
        self.facts, self.load_seconds = supervisor.facts, supervisor.load_seconds

    def explain(self) -> Explanation:
        """What was attached when they were started."""
        return self._supervisor.explain()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """In the order of ranks; empty while they are being replaced."""
        return self._supervisor.status().worker_ids

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """As by one worker."""
        return [self.make(request) for request in requests]

    def make(self, request: Request, listener: Listener = SILENT) -> Outcome:
        """Likewise."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        try:
            job = self._supervisor.submit(request, events.put)
        except SamovarError as error:
            return error
        try:
            while True:
                if listener.is_cancelled():
                    job.cancel()
                with contextlib.suppress(queue.Empty):
                    event = events.get(timeout=_POLL_S)
                    if isinstance(event, Failed):
                        return event.error
                    if isinstance(event, Done):
                        return event.result
                    if not isinstance(event, Started):
                        listener.on_event(event)
        finally:
            job.cancel()  # Does nothing if it is over.


ImageWorker = Worker | MultirankWorker


def start_worker(config: OmniDiffusionConfig, pipeline: Any = None) -> ImageWorker:
    """A worker in this process if one rank is enough or torchrun started the others; else a process for each rank. A
    pipeline that is already loaded cannot be sent to other processes."""
    name = "devices" if config.devices is not None else "replicas"
    if config.replicas not in (None, 1) or config.devices is not None:
        raise SettingError(
            f"{name}={getattr(config, name)!r} is for AsyncOmni and samovar serve, where several workers share a "
            "queue. Omni has one: leave it out, and give device to choose a GPU or parallel to use several for one "
            "image.",
            param=name,
        )
    has_group, ranks = dist.is_initialized(), config.num_ranks
    if has_group or is_under_torchrun():
        running = dist.get_world_size() if has_group else _world_size()
        if ranks != running and (ranks > 1 or not has_group):
            raise SettingError(
                f"{running} ranks are running, and parallel={config.parallel!r} needs {ranks}. The product of its "
                "degrees must be the number of ranks.",
                param="parallel",
            )
        if not has_group:
            join_world(backend=config.backend)
    elif ranks > 1 and pipeline is None:
        return MultirankWorker(config)
    elif ranks > 1:
        raise SettingError(
            f"These settings need {ranks} processes, and a loaded pipeline cannot be sent to another process. Give the "
            "model's name or folder, or start this script with torchrun.",
            param="model",
        )
    worker = Worker(config, pipeline)
    if config.warm_up:
        worker.warm_up()
    return worker


def is_under_torchrun() -> bool:
    """Whether torchrun started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _world_size() > 1


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
