"""Where does the worker of a Python program live? In its own process if one is enough, else in one for each rank."""

from __future__ import annotations

import os
import queue
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..errors import SamovarError, SettingError
from .events import SILENT, Done, Event, Failed, Listener, Started
from .facts import PipelineFacts
from .request import Request
from .settings import OmniDiffusionConfig
from .supervisor import Supervisor
from .waiting import Entry
from .worker import Outcome, Worker

_GLANCE_S = 0.1
"""How often it is seen whether a request was taken back, while nothing else happens."""


class PictureMaker(Protocol):
    """What `Omni` needs of whoever makes its pictures."""

    facts: PipelineFacts
    load_seconds: float
    max_batch: int

    def make(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Outcome]:
        """Pictures for requests that fit together; for each that fails, its error."""

    def close(self) -> None:
        """Let the model go."""


class RankedWorkers:
    """Workers in processes of their own, which act as one. If one of them dies, all are replaced."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        supervisor = Supervisor(replace(config, max_queue=max(config.max_queue, config.max_batch)))
        supervisor.start()
        self._supervisor = supervisor
        self._close = weakref.finalize(self, supervisor.close)
        self.facts = supervisor.facts
        self.load_seconds = supervisor.load_seconds
        self.max_batch = supervisor.max_batch

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Those of the ranks, in their order; none while they are being replaced."""
        return self._supervisor.status().worker_ids

    def make(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Outcome]:
        """As by one worker."""
        listener = listener or SILENT
        events: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        outcomes: dict[int, Outcome] = {}
        entries: dict[int, Entry] = {}
        for index, request in enumerate(requests):
            try:
                entries[index] = self._supervisor.submit(request, lambda event, i=index: events.put((i, event)))  # type: ignore[misc]
            except SamovarError as error:
                outcomes[index] = error
        try:
            while len(outcomes) < len(requests):
                for waiting in set(entries) - set(outcomes):
                    if listener.is_cancelled(waiting):
                        self._supervisor.cancel(entries[waiting])
                try:
                    index, event = events.get(timeout=_GLANCE_S)
                except queue.Empty:
                    continue
                if isinstance(event, Failed):
                    outcomes[index] = event.error
                elif isinstance(event, Done):
                    outcomes[index] = event.result
                elif not isinstance(event, Started):
                    listener.tell(index, event)
        finally:
            for entry in entries.values():
                self._supervisor.cancel(entry)  # Of those that are over, nothing is left to be taken back.
        return [outcomes[index] for index in range(len(requests))]

    def close(self) -> None:
        """End the processes."""
        self._close()


def start_worker(config: OmniDiffusionConfig) -> PictureMaker:
    """A worker in this process if it needs no others or is one of several already, else one for each rank."""
    import torch.distributed as dist

    from ..parallel import join_world

    if not dist.is_initialized():
        if not is_under_torchrun():
            return Worker(config) if config.num_ranks == 1 else RankedWorkers(config)
        _check_world(config, _world_size())
        join_world(backend=config.backend)
    elif config.num_ranks > 1:
        _check_world(config, dist.get_world_size())
    return Worker(config)


def is_under_torchrun() -> bool:
    """Whether torchrun has started this process and others, to be ranks of one world."""
    return "TORCHELASTIC_RUN_ID" in os.environ and _world_size() > 1


def _check_world(config: OmniDiffusionConfig, size: int) -> None:
    if config.num_ranks != size:
        raise SettingError(
            f"{size} ranks are running, and parallel={config.parallel!r} needs {config.num_ranks}. The product of its "
            "degrees must be the number of ranks.",
            param="parallel",
        )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))
