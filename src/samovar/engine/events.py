"""What happens to a request while it runs, and its result.

A request that runs yields `Started`, `Progress` for each step, `Preview` as often as asked, and one `Done` or `Failed`.
A request that is refused or cancelled in the queue yields only `Failed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL.Image import Image

from ..core.errors import SamovarError
from ..media import Audio, Video, check_suffix, numbered, save
from .request import Adapter, OmniDiffusionSamplingParams, Request


@dataclass(frozen=True)
class GenerationResult:
    """What was made of one prompt."""

    prompt: str
    outputs: tuple[Image | Video | Audio, ...]
    seeds: tuple[int, ...]
    """The seed that makes each output again, alone."""
    params: OmniDiffusionSamplingParams
    """The settings used."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Warnings, such as a prompt that was truncated."""
    cache: tuple[Any, ...] = ()
    """The cache's `stats()` for each pipeline call; empty without a cache."""
    lora: tuple[Adapter, ...] = ()
    """The adapters used."""
    error: SamovarError | None = None
    """Why there are no outputs, for a prompt of a list. A single prompt that fails raises it instead."""

    def _of_kind(self, kind: Any) -> tuple[Any, ...]:
        if self.error is not None:
            raise self.error
        return tuple(output for output in self.outputs if isinstance(output, kind))

    @property
    def images(self) -> tuple[Image, ...]:
        """Raises the error of a prompt that failed, as the others do."""
        return self._of_kind(Image)

    @property
    def videos(self) -> tuple[Video, ...]:
        return self._of_kind(Video)

    @property
    def audios(self) -> tuple[Audio, ...]:
        return self._of_kind(Audio)

    @property
    def request_output(self) -> list[GenerationResult]:
        """As in vllm-omni, where a result has one part for each stage of a model."""
        return [self]

    def save(self, file: str | Path) -> list[Path]:
        """Write the outputs, as the suffix says: .png, .jpg, .webp; .mp4, .webm, .gif; .wav, .flac, .mp3, .ogg. Several
        get numbers: cat-1.png, cat-2.png ..."""
        outputs = self._of_kind(object)
        check_suffix(file)
        return [save(output, path) for output, path in zip(outputs, numbered(file, len(outputs)), strict=True)]

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<GenerationResult for {self.prompt!r}: {type(self.error).__name__}: {self.error}>"
        shown = (f"{o.width}x{o.height}" if isinstance(o, Image) else repr(o) for o in self.outputs)
        made = ", ".join(f"{output}, seed {seed}" for output, seed in zip(shown, self.seeds, strict=True))
        return f"<GenerationResult for {self.prompt!r}: {made}; {self.seconds:.1f} s>"

    @classmethod
    def failed(cls, request: Request, error: SamovarError) -> GenerationResult:
        return cls(request.prompt, (), (), request.params, 0.0, error=error)


Outcome = GenerationResult | SamovarError


@dataclass(frozen=True)
class Started:
    """A worker has begun."""

    seconds_queued: float


@dataclass(frozen=True)
class Progress:
    """A step has ended."""

    step: int
    """Counted from 1."""
    num_steps: int
    image_index: int
    """Counted from 0."""
    num_images: int
    seconds: float
    """Duration of the step."""
    is_computed: bool | None
    """False if the cache skipped it; None without a cache."""


@dataclass(frozen=True)
class Preview:
    """What the image looks like after a step."""

    step: int
    num_steps: int
    image_index: int
    image: Image


@dataclass(frozen=True)
class Done:
    """The images are ready."""

    result: GenerationResult


@dataclass(frozen=True)
class Failed:
    """The request failed."""

    error: SamovarError


Event = Started | Progress | Preview | Done | Failed


class Listener(NamedTuple):
    """Hears of the events of a request, and may cancel it."""

    on_event: Callable[[Event], None]
    is_cancelled: Callable[[], bool]


SILENT = Listener(lambda event: None, lambda: False)
