"""How much faster is a method, and how close are its images to the exact ones? Every method gets the same tasks, and a
journal keeps the results of an interrupted run."""

from __future__ import annotations

import hashlib
import json
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.errors import SettingError
from ..core.files import read_json, reading
from ..media import Video, save
from . import metrics
from .image_runner import Batch, ImageRunner, Task
from .methods import EXACT, Method
from .metrics import Quality
from .times import Progress, speed_of, time_alone

_STRIP = 4
"""Frames on the picture of a video."""
_USUAL_SHARE = 0.5
"""Of steps that a cache computes, for an estimate of the time."""


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

    def has_images(self, name: str) -> bool:
        return (self.folder / f"{name}.safetensors").is_file()

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
    seconds: float | None
    """Of an image made alone, with text encoders and VAE: the median. None if nothing was timed."""
    speedup: float | None
    """Measured, relative to exact images made beside it."""
    quality: Quality
    """The average."""
    images: tuple[Quality, ...]
    """The quality of each image."""
    notes: Any = None
    """The method's notes on the first batch; for one of our caches, which steps it computed."""
    exact_steps: int | None = None
    """Number of steps of the exact images, if other than `steps`."""
    explained: float | None = None
    """The highest speed-up that the computed forwards of the timed images explain; None if they do not tell."""

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
        means = {name: round(value, 7) for name, value in self.quality._asdict().items() if value is not None}
        columns = zip(means, zip(*self.images, strict=True), strict=False)
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
        *,
        timed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        """`name` distinguishes sessions that share a journal. `report` receives lines about the progress; or give the
        progress that several sessions share. `timed` is the number of images by which methods are timed."""
        if type(timed) is not int or timed < 0:
            raise SettingError(f"timed={timed!r}; expected a number of images, 0 or more.", param="timed")
        self.runner, self.tasks, self.journal = runner, list(tasks), journal
        self.progress = progress or Progress(report)
        self.timed = timed
        self._name = name
        self._exact: Row | None = None
        self._exact_forwards = 0
        self._exact_seconds: float | None = None
        """Of the exact image that was timed last."""
        self._is_warm = False

    def exact(self, watched: Method | None = None) -> Row:
        """The exact images, with which all others are compared: made when first needed, and again to be watched.
        Watching takes time, so a watched run is not timed."""
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

    def work(self, methods: Sequence[Method]) -> float:
        """About how much it is to measure these, in exact images."""
        alone = 0 if self._times_batches() or not self.timed else self.timed + 1
        return sum(self._share(method) * (len(self.tasks) + alone) + bool(self.timed) for method in methods)

    def _share(self, method: Method) -> float:
        """About how much of an exact image a method computes."""
        return _USUAL_SHARE if method.steps is None else method.steps / self.runner.steps

    def _key(self, method: Method, number: int | str) -> str:
        return f"{self._name} {method.key} {number}".strip()

    def _reference(self, number: int) -> torch.Tensor:
        return self.journal.load_images(self._reference_name(number))

    def _reference_name(self, number: int) -> str:
        return f"{self._name or 'exact'}-{number}"

    def _make_lost_references(self, numbers: Sequence[int]) -> None:
        """Values are small and images large: who moves a journal elsewhere may leave the images behind."""
        lost = [number for number in numbers if not self.journal.has_images(self._reference_name(number))]
        if lost:
            batches = self.runner.batches(self.tasks)
            with self.runner.under(EXACT) as make:
                for number in lost:
                    self.progress.say(f"exact images again: batch {number + 1} of {len(batches)}")
                    self.journal.save_images(self._reference_name(number), make(batches[number]).images)

    def _batches(self, method: Method, is_exact: bool, folder: Path | None = None) -> list[dict[str, Any]]:
        batches = self.runner.batches(self.tasks)
        keys = [self._key(method, number) for number in range(len(batches))]
        times = self._key(method, "times") if self.timed and (not is_exact or method is EXACT) else ""
        known = [key for key in keys if key in self.journal]
        self.progress.add(self._share(method) * len(known) * self.runner.batch, is_made=False)
        if len(known) < len(keys) or (times and times not in self.journal):
            if not self._is_warm:
                self.progress.say("warming up")
                self.runner.warm_up(batches[0])
                self._is_warm = True
            if not is_exact:
                self._make_lost_references([number for number, key in enumerate(keys) if key not in self.journal])
            before = self._exact_seconds or (self._time_exact() if times and not is_exact else None)
            with self.runner.under(method) as make:
                for number, (key, tasks) in enumerate(zip(keys, batches, strict=True)):
                    self.progress.say(f"{method.name}: {number * self.runner.batch} of {len(self.tasks)} images")
                    if key not in self.journal:
                        self._record(number, key, make(tasks), is_exact, folder)
                found = self._alone(method, make, keys) if times else {}
            if times and is_exact:
                self._exact_seconds = found["seconds"][-1]
            if times:
                self.journal.record(times, {**found, "exact": [] if is_exact else [before, self._time_exact()]})
        return [self.journal[key] for key in keys]

    def _times_batches(self) -> bool:
        """Whether each image is made alone anyway, and enough of them after the first."""
        return self.runner.batch == 1 and len(self.tasks) > self.timed

    def _alone(
        self, method: Method, make: Callable[[Sequence[Task]], Batch], keys: Sequence[str]
    ) -> dict[str, list[float]]:
        """The times of images made alone under a method that is on."""
        if self._times_batches():
            made = [self.journal[key] for key in keys[1 : 1 + self.timed]]
            return {name: [one[name] for one in made] for name in ("seconds", "forwards")}
        self.progress.say(f"{method.name}: timing {self.timed} images")
        found = time_alone(make, self.tasks, self.timed)
        self.progress.add((self.timed + 1) * self._share(method))
        return found

    def _time_exact(self) -> float:
        """The seconds of an exact image made alone now."""
        with self.runner.under(EXACT) as make:
            self._exact_seconds = make(self.tasks[:1]).seconds
        self.progress.add(1)
        return self._exact_seconds

    def _record(self, number: int, key: str, made: Batch, is_exact: bool, folder: Path | None) -> None:
        if is_exact:
            if self._exact is None:  # Otherwise other methods were already compared with the saved ones.
                self.journal.save_images(self._reference_name(number), made.images)
            qualities = metrics.exactly_equal(made.images)
        else:
            qualities = metrics.measure(made.images, self._reference(number))
        if folder is not None:
            save_images(made.images, folder, number * self.runner.batch, self.runner.fps)
        value = {"seconds": made.seconds, "forwards": made.forwards, "notes": made.notes}
        self.journal.record(key, {**value, "qualities": [list(quality) for quality in qualities]})
        each = self._exact_forwards / len(self.runner.batches(self.tasks))
        self.progress.add(len(made.images) * (1.0 if is_exact else made.forwards / each))

    def _row(self, method: Method, batches: list[dict[str, Any]], exact: Row | None) -> Row:
        qualities = [Quality(*values) for batch in batches for values in batch["qualities"]]
        forwards = sum(batch["forwards"] for batch in batches)
        speed: tuple[float | None, float | None, float | None] = (None, None if exact else 1.0, None)
        if self.timed and (exact is not None or method is EXACT):
            own, all_exact = (self.journal[self._key(one, "times")] for one in (method, EXACT))
            speed = speed_of(own, all_exact)
            if exact is None:
                speed = speed[0], 1.0, 1.0
            elif method.quantization is not None:  # Its forwards are not those of the exact weights.
                speed = *speed[:2], None
        return Row(
            method.name if exact else EXACT.name,
            method.family,
            dict(method.settings),
            method.steps or self.runner.steps,
            round(self.runner.steps * forwards / self._exact_forwards, 2),
            speed[0],
            speed[1],
            metrics.average(qualities),
            tuple(qualities),
            batches[0]["notes"] if exact else None,
            self.runner.steps,
            speed[2],
        )


def save_images(images: torch.Tensor, folder: Path, first: int = 0, fps: float | None = None) -> None:
    """Write images (N, 3, height, width) with values from 0 to 1 as numbered PNG files; of videos (N, frames, 3,
    height, width) a strip of frames, and beside it the video."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = (images.clamp(0, 1) * 255).round().byte().movedim(-3, -1).cpu().numpy()
    for number, image in enumerate(pixels, start=first):
        if image.ndim == 4:
            suffix = (
                ".mp4" if find_spec("av") is not None and not any(side % 2 for side in image.shape[1:3]) else ".gif"
            )
            save(Video(image, fps or 16.0), folder / f"{number}{suffix}")
            places = [round(place * (len(image) - 1) / (_STRIP - 1)) for place in range(_STRIP)]
            image = np.concatenate([image[place] for place in dict.fromkeys(places)], axis=1)
        Image.fromarray(image).save(folder / f"{number}.png")
