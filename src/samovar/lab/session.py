"""How much faster is a method, and how close are its images to the exact ones? Every method gets the same tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import metrics
from .image_runner import Batch, ImageRunner
from .journal import Journal
from .methods import EXACT, Method
from .metrics import Quality
from .tasks import Task


@dataclass(frozen=True)
class Row:
    """The figures of one method."""

    method: str
    family: str
    settings: dict[str, Any]
    steps: int
    """Number of steps of the sampler."""
    computed: float
    """How many of them were computed, averaged over branches and images."""
    seconds: float
    """For all images, including text encoders and VAE."""
    speedup: float
    """Measured, relative to the exact images."""
    quality: Quality
    """The average."""
    images: tuple[Quality, ...]
    """The quality of each image."""
    notes: Any = None
    """The method's notes on the first batch; for one of our caches, which steps it computed."""

    @property
    def closeness(self) -> float:
        """The PSNR of the mean error, in which the worst images count most."""
        return metrics.psnr_of_mean_error(self.images)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `each` holds the figures of the images, one list per metric."""
        rest = {name: value for name, value in asdict(self).items() if name not in ("quality", "images")}
        columns = zip(Quality._fields, zip(*self.images, strict=True), strict=True)
        means = {name: round(value, 7) for name, value in self.quality._asdict().items()}
        return {**rest, **means, "each": {name: [round(v, 7) for v in column] for name, column in columns}}


class Session:
    """Measures methods on some tasks; the journal remembers what is done."""

    def __init__(
        self,
        runner: ImageRunner,
        tasks: Sequence[Task],
        journal: Journal,
        name: str = "",
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`name` distinguishes sessions that share a journal. `report` receives lines about the progress."""
        self.runner, self.tasks, self.journal = runner, list(tasks), journal
        self._name, self._report = name, report
        self._exact: Row | None = None
        self._exact_forwards = 0
        self._is_warm = False

    def exact(self, watched: Method | None = None) -> Row:
        """The exact images, with which all others are compared: made when first needed, and again to be watched.
        Watching takes time, so the time of a watched run is not compared with any other."""
        if watched is None and self._exact is not None:
            return self._exact
        method = watched or EXACT
        batches = self._batches(method, is_exact=True)
        self._exact_forwards = sum(batch["forwards"] for batch in batches)
        row = self._row(method, batches, None)
        if watched is None:
            self._exact = row
        return row

    def measure(self, method: Method, folder: Path | None = None) -> Row:
        """The figures of a method on all tasks. `folder` receives its images as PNG."""
        exact = self.exact()
        return self._row(method, self._batches(method, False, folder), exact)

    def notes(self, method: Method) -> list[Any]:
        """The notes of each call of a method that was measured."""
        return [self.journal[self._key(method, n)]["notes"] for n in range(len(self.runner.batches(self.tasks)))]

    def exact_images(self) -> torch.Tensor:
        """All exact images, on the host."""
        if not self._exact_forwards:  # Those of a watched run are the same.
            self.exact()
        return torch.cat([self._reference(number) for number in range(len(self.runner.batches(self.tasks)))])

    def _key(self, method: Method, number: int) -> str:
        return f"{self._name} {method.key} {number}".strip()

    def _reference(self, number: int) -> torch.Tensor:
        return self.journal.load_images(f"{self._name or 'exact'}-{number}")

    def _batches(self, method: Method, is_exact: bool, folder: Path | None = None) -> list[dict[str, Any]]:
        batches = self.runner.batches(self.tasks)
        keys = [self._key(method, number) for number in range(len(batches))]
        if not all(key in self.journal for key in keys):
            if not self._is_warm:
                self._report("warming up")
                self.runner.warm_up(batches[0])
                self._is_warm = True
            with self.runner.under(method) as make:
                for number, (key, tasks) in enumerate(zip(keys, batches, strict=True)):
                    self._report(f"{method.name}: {number * self.runner.batch} of {len(self.tasks)} images")
                    if key not in self.journal:
                        self._record(number, key, make(tasks), is_exact, folder)
        return [self.journal[key] for key in keys]

    def _record(self, number: int, key: str, made: Batch, is_exact: bool, folder: Path | None) -> None:
        if is_exact:
            if self._exact is None:  # Otherwise other methods were already compared with the saved ones.
                self.journal.save_images(f"{self._name or 'exact'}-{number}", made.images)
            qualities = [Quality(metrics.HIGHEST_PSNR, 1.0, 0.0)] * len(made.images)
        else:
            qualities = metrics.measure(made.images, self._reference(number))
        if folder is not None:
            save_images(made.images, folder, number * self.runner.batch)
        value = {"seconds": made.seconds, "forwards": made.forwards, "notes": made.notes}
        self.journal.record(key, {**value, "qualities": [list(quality) for quality in qualities]})

    def _row(self, method: Method, batches: list[dict[str, Any]], exact: Row | None) -> Row:
        qualities = [Quality(*values) for batch in batches for values in batch["qualities"]]
        seconds = sum(batch["seconds"] for batch in batches)
        forwards = sum(batch["forwards"] for batch in batches)
        return Row(
            method.name if exact else EXACT.name,
            method.family,
            dict(method.settings),
            method.steps or self.runner.steps,
            round(self.runner.steps * forwards / self._exact_forwards, 2),
            seconds,
            exact.seconds / seconds if exact else 1.0,
            metrics.average(qualities),
            tuple(qualities),
            batches[0]["notes"] if exact else None,
        )


def save_images(images: torch.Tensor, folder: Path, first: int = 0) -> None:
    """Write images (N, 3, height, width) with values from 0 to 1 as numbered PNG files."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for number, image in enumerate(pixels, start=first):
        Image.fromarray(image).save(folder / f"{number}.png")
