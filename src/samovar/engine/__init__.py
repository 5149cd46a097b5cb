"""One request in, one picture out."""

from .request import GeneratedPictures, OmniDiffusionSamplingParams
from .worker import Worker

__all__ = ["GeneratedPictures", "OmniDiffusionSamplingParams", "Worker"]
