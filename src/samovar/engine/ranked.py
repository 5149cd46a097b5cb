"""How do several processes make one picture? Each has a worker, and all are told the same."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import SamovarError, SettingError
from .request import GeneratedPictures, OmniDiffusionSamplingParams
from .settings import EngineConfig
from .worker import Worker


class RankedWorkers:
    """Workers in processes of their own, which act as one."""

    def __init__(self, config: EngineConfig) -> None:
        from ..parallel import Ranks

        self._ranks = Ranks(config.num_ranks, backend=config.backend)
        self._close = weakref.finalize(self, self._ranks.close)
        self.defaults, self.load_seconds = self._on_all(_load, config, is_usable_after_error=False)

    @property
    def process_ids(self) -> list[int]:
        """Those of the ranks, in their order; none if they have ended."""
        return self._ranks.process_ids

    def generate(self, prompt: str, params: OmniDiffusionSamplingParams) -> GeneratedPictures:
        """Pictures of a prompt, as by one worker."""
        pictures: GeneratedPictures = self._on_all(_generate, prompt, params)
        return pictures

    def close(self) -> None:
        """End the processes."""
        self._close()

    def _on_all(self, function: Callable[..., Any], *args: Any, is_usable_after_error: bool = True) -> Any:
        """What rank 0 returns. An error of ours is raised here as it was there; the ranks live on, as all of them were
        asked the same and refused it. After anything else nobody knows where each one is, so they are ended."""
        is_usable = False
        try:
            answers: list[_Answer] = self._ranks.call(_answer, function, *args)
            error = next((answer.error for answer in answers if answer.error is not None), None)
            is_usable = is_usable_after_error and all(answer.error is not None for answer in answers)
            if error is not None:
                raise error
            is_usable = True
            return answers[0].result
        finally:
            if not is_usable:
                self._ranks.close(wait_s=0.0)  # They may be computing, or waiting for each other.


def start_worker(config: EngineConfig) -> Worker | RankedWorkers:
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


def _check_world(config: EngineConfig, size: int) -> None:
    if config.num_ranks != size:
        raise SettingError(
            f"{size} ranks are running, and the degrees need {config.num_ranks} (cfg {config.cfg_parallel_size} x ring "
            f"{config.ring_degree} x ulysses {config.ulysses_degree}). Their product must be the number of ranks."
        )


def _world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


# ------------------------------------------------------------------------------------------------ on each rank


class _Answer(NamedTuple):
    """What came of a call on one rank."""

    result: Any = None
    error: SamovarError | None = None


_here: list[Worker] = []
"""The worker of this process, if it is a rank."""


def _answer(function: Callable[..., Any], *args: Any) -> _Answer:
    import torch.distributed as dist

    try:
        result = function(*args)
    except SamovarError as error:
        return _Answer(error=error)
    return _Answer(result if dist.get_rank() == 0 else None)


def _load(config: EngineConfig) -> tuple[OmniDiffusionSamplingParams, float]:
    worker = Worker(config)
    _here.append(worker)
    return worker.defaults, worker.load_seconds


def _generate(prompt: str, params: OmniDiffusionSamplingParams) -> GeneratedPictures:
    return _here[0].generate(prompt, params)
