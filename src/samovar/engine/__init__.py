"""One request in, one picture out."""

from .events import Done, Event, Failed, Listener, Preview, Progress, Started
from .facts import PipelineFacts
from .ranked import PictureMaker, RankedWorkers, is_under_torchrun, start_worker
from .request import GeneratedPictures, OmniDiffusionSamplingParams, Request
from .restarts import Restarts
from .settings import OmniDiffusionConfig
from .status import EngineStatus
from .supervisor import Supervisor
from .ticket import Ticket
from .worker import Worker

__all__ = [
    "Done",
    "EngineStatus",
    "Event",
    "Failed",
    "GeneratedPictures",
    "Listener",
    "OmniDiffusionConfig",
    "OmniDiffusionSamplingParams",
    "PictureMaker",
    "PipelineFacts",
    "Preview",
    "Progress",
    "RankedWorkers",
    "Request",
    "Restarts",
    "Started",
    "Supervisor",
    "Ticket",
    "Worker",
    "is_under_torchrun",
    "start_worker",
]
