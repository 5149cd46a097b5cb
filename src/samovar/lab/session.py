"""What does each of several methods cost, and how near are its pictures to the exact ones? Same tasks for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import metrics
from .journal import Journal
from .methods import EXACT, Method
from .metrics import Quality
from .studio import Made, Studio, Task


@dataclass(frozen=True)
class Row:
    """What was measured of a method."""

    method: str
    family: str
    settings: dict[str, Any]
    steps: int
    """Of the sampler."""
    computed: float
    """Of these, how many were computed, on average over branches and pictures."""
    seconds: float
    """For all pictures, with text encoders and VAE."""
    speedup: float
    """Measured, over the exact pictures."""
    quality: Quality
    """On average."""
    pictures: tuple[Quality, ...]
    """Of each."""
    notes: Any = None
    """What the method says of the first pictures: a cache of ours, which steps it computed."""

    @property
    def nearness(self) -> float:
        """PSNR of the mean error of all pictures: unlike the mean PSNR it is low if some pictures are far off."""
        return metrics.psnr_of_mean_error(self.pictures)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: `each` has the pictures' figures, a list for each metric."""
        rest = {name: value for name, value in asdict(self).items() if name not in ("quality", "pictures")}
        columns = zip(Quality._fields, zip(*self.pictures, strict=True), strict=True)
        means = {name: round(value, 7) for name, value in self.quality._asdict().items()}
        return {**rest, **means, "each": {name: [round(v, 7) for v in column] for name, column in columns}}


class Session:
    """A studio, tasks, and a journal of what is known."""

    def __init__(
        self, studio: Studio, tasks: Sequence[Task], journal: Journal, name: str = "", progress: bool = True
    ) -> None:
        """`name` tells sessions apart that share a journal."""
        self.studio, self.tasks, self.journal, self._name = studio, list(tasks), journal, name
        self._progress = progress
        self._exact: Row | None = None
        self._forwards = 0
        """Of the exact pictures."""
        self._is_warm = False

    def exact(self, watched: Method | None = None) -> Row:
        """The exact pictures, with which all others are compared; made when they are first asked for, and again to be
        watched. Watching takes time, so no other's time is compared with that of a watched run."""
        if watched is None and self._exact is not None:
            return self._exact
        method = watched or EXACT
        batches = self._batches(method, is_exact=True)
        self._forwards = sum(batch["forwards"] for batch in batches)
        row = self._row(method, batches, None)
        if watched is None:
            self._exact = row
        return row

    def measure(self, method: Method, pictures: Path | None = None) -> Row:
        """A method on all tasks. `pictures` is a folder that gets them, rounded, as PNG."""
        exact = self.exact()
        return self._row(method, self._batches(method, False, pictures), exact)

    def notes(self, method: Method) -> list[Any]:
        """What a method that was measured said of each call."""
        return [self.journal[self._key(method, n)]["notes"] for n in range(len(self.studio.batches(self.tasks)))]

    def exact_pictures(self) -> torch.Tensor:
        """All of them, on the host."""
        if not self._forwards:  # Those of a watched run are the same.
            self.exact()
        return torch.cat([self._reference(number) for number in range(len(self.studio.batches(self.tasks)))])

    def _key(self, method: Method, number: int) -> str:
        return f"{self._name} {method.key} {number}".strip()

    def _reference(self, number: int) -> torch.Tensor:
        return self.journal.pictures(f"{self._name or 'exact'}-{number}")

    def _batches(self, method: Method, is_exact: bool, folder: Path | None = None) -> list[dict[str, Any]]:
        from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

        keys = [self._key(method, number) for number in range(len(self.studio.batches(self.tasks)))]
        if not all(key in self.journal for key in keys):
            self._warm_up()
            with self.studio.under(method) as make:
                batches = list(zip(keys, self.studio.batches(self.tasks), strict=True))
                for number, (key, tasks) in enumerate(
                    # None: shown on a terminal, not in a file.
                    tqdm(batches, desc=method.name[:40], leave=False, disable=None if self._progress else True)
                ):
                    if key not in self.journal:
                        self._record(number, key, make(tasks), is_exact, folder)
        return [self.journal[key] for key in keys]

    def _warm_up(self) -> None:
        if not self._is_warm:
            self.studio.warm_up(self.studio.batches(self.tasks)[0])
            self._is_warm = True

    def _record(self, number: int, key: str, made: Made, is_exact: bool, folder: Path | None) -> None:
        if is_exact:
            if self._exact is None:  # Else others were compared with those that are there.
                self.journal.keep_pictures(f"{self._name or 'exact'}-{number}", made.pictures)
            qualities = [Quality(metrics.HIGHEST_PSNR, 1.0, 0.0)] * len(made.pictures)
        else:
            qualities = metrics.measure(made.pictures, self._reference(number))
        if folder is not None:
            first = number * self.studio.config.batch
            for offset, picture in enumerate(made.pictures):
                save_png(picture, folder / f"{first + offset}.png")
        value = {"seconds": made.seconds, "forwards": made.forwards, "notes": made.notes}
        self.journal.record(key, {**value, "qualities": [list(quality) for quality in qualities]})

    def _row(self, method: Method, batches: list[dict[str, Any]], exact: Row | None) -> Row:
        qualities = [Quality(*values) for batch in batches for values in batch["qualities"]]
        steps = method.steps or self.studio.steps
        seconds = sum(batch["seconds"] for batch in batches)
        forwards = sum(batch["forwards"] for batch in batches)
        return Row(
            method.name if exact else EXACT.name,
            method.family,
            dict(method.settings),
            steps,
            round(self.studio.steps * forwards / self._forwards, 2),
            seconds,
            exact.seconds / seconds if exact else 1.0,
            metrics.average(qualities),
            tuple(qualities),
            batches[0]["notes"] if exact else None,
        )


def save_png(picture: torch.Tensor, file: Path) -> None:
    """A picture (3, height, width) with values from 0 to 1, rounded to 8 bits."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = (picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(pixels).save(file)
