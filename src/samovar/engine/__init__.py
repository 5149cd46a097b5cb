"""The engine: a request becomes an image, a video or a sound."""

import os

# OpenMP threads that spin while they wait starve each other when processes share cores: an image took ten times longer.
# torch reads this when it is first imported, here or in a worker process.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from .calling import call_pipeline
from .events import (
    Done,
    Event,
    Failed,
    GenerationResult,
    Listener,
    Outcome,
    Preview,
    Progress,
    Started,
)
from .facts import PipelineFacts
from .inputs import INPUT_NAMES, is_media
from .job import Job
from .local import ImageWorker, MultirankWorker, is_under_torchrun, start_worker
from .outputs import OutputKind
from .request import OmniDiffusionSamplingParams, Request
from .restarts import Restarts
from .settings import OmniDiffusionConfig
from .status import EngineStatus, ReplicaStatus
from .supervisor import Supervisor
from .worker import Worker

__all__ = [
    "INPUT_NAMES",
    "Done",
    "EngineStatus",
    "Event",
    "Failed",
    "GenerationResult",
    "ImageWorker",
    "Job",
    "Listener",
    "MultirankWorker",
    "OmniDiffusionConfig",
    "OmniDiffusionSamplingParams",
    "Outcome",
    "OutputKind",
    "PipelineFacts",
    "Preview",
    "Progress",
    "ReplicaStatus",
    "Request",
    "Restarts",
    "Started",
    "Supervisor",
    "Worker",
    "call_pipeline",
    "is_media",
    "is_under_torchrun",
    "start_worker",
]
