"""How long may a worker be silent? It depends on the size of the images, and on how long earlier ones took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .facts import PipelineFacts
from .request import Request
from .settings import OmniDiffusionConfig

MARGIN = 10
"""How many times longer than expected a silence may be."""
_USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""


@dataclass
class Patience:
    """What is known of an engine's silences: the longest of a batch, and of how many pixels that batch was."""

    pixels: int = 0
    longest_s: float = 0.0

    def note(self, pixels: int, longest_s: float) -> None:
        """A batch has ended well. One of more pixels says more; among equals, one long silence is forgotten in time."""
        if pixels == self.pixels:
            self.longest_s = max(longest_s, self.longest_s / 2)
        elif pixels > self.pixels:
            self.pixels, self.longest_s = pixels, longest_s

    def allowed_s(self, pixels: int, facts: PipelineFacts, config: OmniDiffusionConfig) -> float:
        """How long a worker with a batch of so many pixels may be silent. `step_timeout_s` is enough for the default
        size. Before a batch has ended, a larger one is taken to be as slow as attention: quadratic."""
        if not pixels:
            return config.step_timeout_s
        known = self.pixels or pixels_of([], facts)
        expected_s = self.longest_s if self.pixels else config.step_timeout_s / MARGIN
        growth = pixels / known
        if growth <= 1:
            return max(config.step_timeout_s, MARGIN * expected_s * growth)
        # A guess: nobody waits for longer than for a model to load.
        guess_s = min(MARGIN * expected_s * growth**2, config.load_timeout_s)
        return max(config.step_timeout_s, guess_s)


def pixels_of(requests: Sequence[Request], facts: PipelineFacts, max_batch: int = 1) -> int:
    """Pixels that a worker computes at once for some requests, in all frames; without any, for one of the default
    size."""
    params = facts.completed(requests[0] if requests else Request(""))
    count = min(max_batch, sum(request.num_images for request in requests)) if requests else 1
    pixels = (params.width or 0) * (params.height or 0) or _USUAL_PIXELS
    return pixels * count * facts.num_frames(params)
