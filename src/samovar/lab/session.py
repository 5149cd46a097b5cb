"""How much faster is a method, and how close are its images to the exact ones? Every method gets the same tasks, and a
journal keeps the results of an interrupted run."""

from __future__ import annotations

import hashlib
import json
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import SettingError
from ..files import read_json, reading
from . import metrics
from .image_runner import Batch, ImageRunner, Task
from .methods import EXACT, Method
from .metrics import Quality


class Journal:
    """Values and images by name, each in its own file, from which an interrupted run resumes. A journal belongs to one
    set of settings and refuses any other, whose values would be different."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        """`about` is everything that the values depend on, as plain JSON values."""
        self.folder = folder
        about = json.loads(json.dumps(about))
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingError(f"Cannot create {str(folder)!r} ({error.strerror}). Choose another output.") from error
        if (folder / "about.json").is_file():
            self._check(read_json(folder / "about.json"), about)
        else:
            self._write(folder / "about.json", about)

    def __len__(self) -> int:
        return len(list(self.folder.glob("value-*.json")))

    def __contains__(self, name: str) -> bool:
        return self._file(name).is_file()

    def __getitem__(self, name: str) -> Any:
        with reading(str(self._file(name))):
            return read_json(self._file(name))["value"]

    def record(self, name: str, value: Any) -> None:
        self._write(self._file(name), {"name": name, "value": value})

    def _file(self, name: str) -> Path:
        return self.folder / f"value-{hashlib.sha256(name.encode()).hexdigest()[:24]}.json"

    def _write(self, file: Path, content: Mapping[str, Any]) -> None:
        """A file is there whole or not at all, whenever the process is killed."""
        part = file.with_suffix(".part")
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(file)

    def save_images(self, name: str, images: torch.Tensor) -> None:
        """Save images, not rounded. `record` the values that belong to them afterwards."""
        from safetensors.torch import save_file

        part = self.folder / f"{name}.part"
        save_file({"images": images.detach().cpu().contiguous()}, part)
        part.replace(self.folder / f"{name}.safetensors")

    def load_images(self, name: str) -> torch.Tensor:
        from safetensors.torch import load_file

        return load_file(self.folder / f"{name}.safetensors")["images"]

    def delete(self) -> None:
        """Everything is done and written elsewhere."""
        shutil.rmtree(self.folder)

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            shown = "; ".join(f"{name}: {_change(before.get(name), now.get(name))}" for name in changed)
            raise SettingError(
                f"{str(self.folder)!r} holds an unfinished run with other settings ({shown}). Finish that run with its "
                "settings, delete the folder, or choose another output."
            )


def _change(before: Any, now: Any) -> str:
    """A changed setting in a few words: of lists and mappings, their sizes and the first difference."""
    if isinstance(before, dict) and isinstance(now, dict):
        before, now = list(before.items()), list(now.items())
    if isinstance(before, list) and isinstance(now, list):
        sizes = f"{len(before)} before, {len(now)} now"
        pair = next(((a, b) for a, b in zip(before, now, strict=False) if a != b), None)
        return sizes if pair is None else f"{sizes}, {_change(*map(repr, pair))}"
    old, new = (textwrap.shorten(str(value), 80, placeholder=" ...") for value in (before, now))
    return f"was {old}, is {new}"


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
    exact_steps: int | None = None
    """Number of steps of the exact images, if other than `steps`."""

    @property
    def saving(self) -> float:
        """How many times fewer forwards are computed. Unlike time, it is the same on every machine."""
        return (self.exact_steps or self.steps) / self.computed

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
        self._name, self.report = name, report
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
                self.report("warming up")
                self.runner.warm_up(batches[0])
                self._is_warm = True
            with self.runner.under(method) as make:
                for number, (key, tasks) in enumerate(zip(keys, batches, strict=True)):
                    self.report(f"{method.name}: {number * self.runner.batch} of {len(self.tasks)} images")
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
            self.runner.steps,
        )


def save_images(images: torch.Tensor, folder: Path, first: int = 0) -> None:
    """Write images (N, 3, height, width) with values from 0 to 1 as numbered PNG files."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    for number, image in enumerate(pixels, start=first):
        Image.fromarray(image).save(folder / f"{number}.png")
