"""Measures methods: how much faster they are, and how close their images are to the exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch

from ..media import Video, save
from . import metrics
from .journal import Journal
from .methods import EXACT, QUANTISED, Method
from .metrics import Quality
from .progress import Progress
from .runner import Made, Runner
from .tasks import Task

_STRIP = 4
"""Frames on the picture of a video."""
_USUAL_SHARE = 0.5
"""Of steps that a cache computes, for an estimate of the time."""
_NUM_TIMED = 3
"""Images by which a method is timed, after a first one."""
_MARGIN = 1.1
"""A speed-up may exceed what the counts explain by this factor: times are never the same twice."""


@dataclass(frozen=True)
class Row:
    """The figures of one method."""

    method: Method
    computed: float
    """How many of its steps were computed, averaged over branches and images."""
    images: tuple[Quality, ...]
    """The quality of each image."""
    exact_steps: int
    """Number of steps of the exact images."""
    seconds: float | None = None
    """Of an image made alone, with text encoders and VAE: the median. None if nothing was timed."""
    speedup: float | None = None
    """Measured, relative to exact images made right before and right after it: a machine that slows down slows both."""
    folder: Path | None = None
    """Where its images are, each named by the number of its task."""

    @property
    def steps(self) -> int:
        """Number of steps of the sampler."""
        return self.method.steps or self.exact_steps

    @cached_property
    def quality(self) -> Quality:
        """The average."""
        return metrics.average(self.images)

    @property
    def saving(self) -> float:
        """How many times fewer steps are computed. Unlike time, it is the same on every machine."""
        return self.exact_steps / self.computed

    @property
    def is_noise(self) -> bool:
        """Whether the speed-up is more than the computed steps explain: something else was running."""
        return self.method.family != QUANTISED and self.speedup is not None and self.speedup > _MARGIN * self.saving

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `each` holds the figures of the images, one list per metric."""
        names = ("steps", "computed", "exact_steps", "seconds", "speedup")
        rest = {"method": self.method.name, "family": self.method.family, "settings": dict(self.method.settings)}
        rest |= {name: getattr(self, name) for name in names}
        means = {name: round(value, 7) for name, value in self.quality._asdict().items() if value is not None}
        columns = zip(means, zip(*self.images, strict=True), strict=False)
        return {**rest, **means, "each": {name: [round(v, 7) for v in column] for name, column in columns}}


class Session:
    """Measures methods on some tasks; the journal remembers what is done."""

    def __init__(
        self,
        runner: Runner,
        tasks: Sequence[Task],
        journal: Journal,
        name: str = "",
        progress: Progress | None = None,
        *,
        is_timed: bool = False,
    ) -> None:
        """`name` distinguishes sessions that share a journal."""
        self.runner, self.tasks, self.journal = runner, list(tasks), journal
        self.progress = progress or Progress()
        self._name, self._is_timed = name, is_timed
        self._exact: Row | None = None
        self._beside: float | None = None
        """The seconds of the exact image that was made alone last."""

    def exact(self, folder: Path | None = None) -> Row:
        """The exact images, with which all others are compared: made when first needed."""
        if self._exact is None:
            self._exact = self._measure(EXACT, folder)
        return self._exact

    def measure(self, method: Method, folder: Path | None = None) -> Row:
        """The figures of a method on all tasks. `folder` receives its images as PNG."""
        self.exact()
        return self._measure(method, folder)

    def work(self, methods: Sequence[Method]) -> float:
        """About how much it is to measure these, in exact images."""
        return sum(self._share(method) * len(self.tasks) + 2 * self._is_timed for method in methods)

    def _share(self, method: Method) -> float:
        """About how much of an exact image a method computes."""
        return method.steps / self.runner.steps if method.steps else 1.0 if method is EXACT else _USUAL_SHARE

    def _key(self, method: Method, what: int | str) -> str:
        return f"{self._name} {method.key} {what}".strip()

    def _measure(self, method: Method, folder: Path | None) -> Row:
        known = [n for n in range(len(self.tasks)) if self._key(method, n) in self.journal]
        if method is EXACT:  # Values are small and images large: who moves a journal may leave these behind.
            known = [n for n in known if self.journal.has_images(self._key(EXACT, n))]
        share = self._share(method)
        self.progress.add(share * len(known), is_made=False)
        if len(known) < len(self.tasks):
            beside = [self._time_exact()] if self._is_timed and method is not EXACT else []
            with self.runner.under(method) as make:
                for part in self._calls(method, sorted({*range(len(self.tasks))}.difference(known))):
                    self.progress.say(f"{method.name}: {part[0]} of {len(self.tasks)} images")
                    self._record(method, part, make([self.tasks[n] for n in part]), folder)
                    self.progress.add(share * len(part))
            if beside:
                self.journal.record(self._key(method, "beside"), [*beside, self._time_exact(again=True)])
        return self._row(method, folder)

    def _calls(self, method: Method, numbers: Sequence[int]) -> list[Sequence[int]]:
        """The images of each call: those that are timed alone, and all of a method that decides by the image."""
        size = 1 if method.is_adaptive else self.runner.batch
        alone = [n for n in numbers if size == 1 or (self._is_timed and n <= _NUM_TIMED)]
        return [[n] for n in alone] + [numbers[i : i + size] for i in range(len(alone), len(numbers), size)]

    def _time_exact(self, again: bool = False) -> float:
        """The seconds of an exact image made alone now, or for the last method just before."""
        if self._beside is None or again:
            with self.runner.under(EXACT) as make:
                self._beside = make(self.tasks[:1]).seconds
            self.progress.add(1)
        return self._beside

    def _record(self, method: Method, numbers: Sequence[int], made: Made, folder: Path | None) -> None:
        computed = (method.steps or self.runner.steps) * made.report.get("computed", 1.0)
        for number, one in zip(numbers, made.images, strict=True):
            image = one[None]
            if method is EXACT:
                self.journal.save_images(self._key(method, number), image)
                (quality,) = metrics.exactly_equal(image)
            else:
                (quality,) = metrics.measure(image, self.journal.load_images(self._key(EXACT, number)))
            if folder is not None:
                save_images(image, folder, number, self.runner.fps)
            value = {"computed": computed, "quality": quality, "seconds": made.seconds if len(numbers) == 1 else None}
            self.journal.record(self._key(method, number), value)

    def _row(self, method: Method, folder: Path | None) -> Row:
        found = [self.journal[self._key(method, number)] for number in range(len(self.tasks))]
        computed = round(fmean(one["computed"] for one in found), 2)
        qualities, seconds = tuple(Quality(*one["quality"]) for one in found), self._seconds(method)
        speedup = 1.0 if method is EXACT else self._speedup(method, seconds)
        return Row(method, computed, qualities, self.runner.steps, seconds, speedup, folder)

    def _seconds(self, method: Method) -> float | None:
        """The median time of an image made alone. The first does not count, unless there is no other."""
        if not self._is_timed:
            return None
        timed = range(min(len(self.tasks), _NUM_TIMED + 1))
        times = [float(self.journal[self._key(method, number)]["seconds"]) for number in timed]
        return median(times[1:] or times)

    def _speedup(self, method: Method, seconds: float | None) -> float | None:
        usual = self._seconds(EXACT)
        if seconds is None or usual is None:
            return None
        # The median of the three bears one that was disturbed.
        return float(median([*self.journal[self._key(method, "beside")], usual])) / seconds


def save_images(images: torch.Tensor, folder: Path, first: int = 0, fps: float | None = None) -> None:
    """Write images (N, 3, height, width) with values from 0 to 1 as numbered PNG files; of videos (N, frames, 3,
    height, width) a strip of frames, and beside it the video."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = (images.clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
    for number, image in enumerate(pixels, start=first):
        if image.ndim == 4:
            is_even = not any(side % 2 for side in image.shape[1:3])
            suffix = ".mp4" if is_even and find_spec("av") is not None else ".gif"
            save(Video(image, fps or 16.0), folder / f"{number}{suffix}")
            places = [round(place * (len(image) - 1) / (_STRIP - 1)) for place in range(_STRIP)]
            image = np.concatenate([image[place] for place in dict.fromkeys(places)], axis=1)
        Image.fromarray(image).save(folder / f"{number}.png")
