"""How long may a worker be silent? It depends on the size of the images, and on how long earlier ones took."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from .facts import PipelineFacts
from .request import Request
from .settings import OmniDiffusionConfig

MARGIN = 10
"""How many times longer than expected a silence may be."""
_USUAL_PIXELS = 1024 * 1024
"""Of a model that does not say how large its images are."""
_MOST_SHAPES = 1024


@dataclass
class Patience:
    """What is known of an engine's silences: the longest of a batch, and of how many pixels that batch was."""

    pixels: int = 0
    longest_s: float = 0.0
    shapes: set[Hashable] = field(default_factory=set)
    """Those that the worker has computed, and so compiled."""

    def restart(self, facts: PipelineFacts, *, is_warm: bool) -> None:
        """A new worker has loaded, and has perhaps made an image of the default size."""
        self.shapes = {shape_of([Request("")], facts)} if is_warm else set()

    def note(self, pixels: int, longest_s: float, shape: Hashable = None) -> None:
        """A batch has ended well. One of more pixels says more; among equals, one long silence is forgotten in time."""
        if len(self.shapes) >= _MOST_SHAPES:  # Clients choose them. What is forgotten is given more time again.
            self.shapes.clear()
        self.shapes.add(shape)
        if pixels == self.pixels:
            self.longest_s = max(longest_s, self.longest_s / 2)
        elif pixels > self.pixels:
            self.pixels, self.longest_s = pixels, longest_s

    def allowed_s(
        self, pixels: int, facts: PipelineFacts, config: OmniDiffusionConfig, shape: Hashable = None
    ) -> float:
        """How long a worker with a batch of these pixels may be silent. `step_timeout_s` is enough for the default
        size. Before a batch has ended, a larger one is taken to be as slow as attention: quadratic. A new shape may be
        compiled first, for as long as a model may load."""
        if config.compile and shape not in self.shapes:
            return max(config.step_timeout_s, config.load_timeout_s)
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
    count = _count(requests, max_batch) if requests else 1
    pixels = (params.width or 0) * (params.height or 0) or _USUAL_PIXELS
    return pixels * count * facts.num_frames(params)


def shape_of(requests: Sequence[Request], facts: PipelineFacts, max_batch: int = 1) -> Hashable:
    """What a graph is compiled for: requests that are equal in this run the same graphs."""
    first = requests[0]
    params = replace(facts.completed(first), seed=None, num_inference_steps=None, num_outputs_per_prompt=None)
    size = tuple(image.size for image in first.images)
    what = replace(params, negative_prompt=None), bool(params.negative_prompt), size, first.lora
    return (*what, _count(requests, max_batch))


def _count(requests: Sequence[Request], max_batch: int) -> int:
    return min(max_batch, sum(request.num_images for request in requests))
