"""One request in, one picture out."""

from .ranked import RankedWorkers, is_under_torchrun, start_worker
from .request import GeneratedPictures, OmniDiffusionSamplingParams
from .settings import EngineConfig
from .worker import Worker

__all__ = [
    "EngineConfig",
    "GeneratedPictures",
    "OmniDiffusionSamplingParams",
    "RankedWorkers",
    "Worker",
    "is_under_torchrun",
    "start_worker",
]
