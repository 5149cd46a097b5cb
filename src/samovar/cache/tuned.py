"""The model that a saved setting is for: it is refused on another, and a warning says if the sampler is another."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..arch import find_denoisers
from ..arch.folder import read_index
from ..arch.modules import unwrapped
from ..core.errors import SettingError
from ..core.files import brief, is_file_name, read_json, read_mapping

KEY = "tuned_for"
"""Where a file that `samovar tune` writes says what its setting is for."""
Part = Mapping[str, Any]
"""The class and the configuration of a component."""


def describe(pipeline: Any) -> dict[str, Any]:
    """What a setting for this pipeline is for, as plain JSON values."""
    scheduler = getattr(pipeline, "scheduler", None)
    parts = {name: _part_of(module) for name, module in find_denoisers(pipeline).items()}
    return {"denoisers": parts} | ({} if scheduler is None else {"scheduler": _part_of(scheduler)})


@dataclass(frozen=True)
class TunedFor:
    """What a saved setting is for."""

    file: str
    model: str
    denoisers: Mapping[str, Part]
    scheduler: Part | None = None

    @classmethod
    def read(cls, cache: Any) -> TunedFor | None:
        """What a file says; None for any other setting, and for a file that does not say."""
        content = read_mapping(cache, "cache") if is_file_name(cache) else {}
        if KEY not in content:
            return None
        said = content[KEY]
        try:
            denoisers = {name: _part(of["config"], of["class"]) for name, of in said["denoisers"].items()}
            scheduler = said.get("scheduler")
            return cls(
                str(cache),
                str(content.get("model")),
                denoisers,
                None if scheduler is None else _part(scheduler["config"], scheduler["class"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SettingError(
                f"{str(cache)!r}: {KEY} is {brief(said)}; expected what samovar tune writes. Tune again, or leave it "
                "out.",
                param="cache",
            ) from error

    def check(self, pipeline: Any) -> None:
        """Refuse another model than the one that the setting was tuned for. Another sampler is warned of."""
        self._check_parts(map(_part_of, find_denoisers(pipeline).values()))
        scheduler = getattr(pipeline, "scheduler", None)
        if self.scheduler is None or scheduler is None:
            return
        if difference := _difference(self.scheduler, _part_of(scheduler)):
            warnings.warn(
                f"{self.file!r} was tuned with another sampler: {difference}. How near images stay with this one was "
                "not measured; tune again, or use cache='auto'.",
                stacklevel=2,
            )

    def check_folder(self, folder: Path) -> None:
        """The same by a model's folder, before any weights are loaded."""
        index = read_index(folder)
        files = {name: folder / name / "config.json" for name in self.denoisers if isinstance(index.get(name), list)}
        self._check_parts(_part(read_json(file), str(index[name][1])) for name, file in files.items() if file.is_file())

    def _check_parts(self, found: Iterable[Part]) -> None:
        for part in found:
            differences = [_difference(known, part) for known in self.denoisers.values()]
            if differences and all(differences):
                raise SettingError(
                    f"{self.file!r} was tuned for another model, {self.model!r}: {min(differences, key=len)}. Tune a "
                    "setting for this one (samovar tune), or use cache='auto', which needs no tuning.",
                    param="cache",
                )


def _part_of(component: Any) -> Part:
    bare = unwrapped(component) if isinstance(component, torch.nn.Module) else component
    return _part(getattr(bare, "config", {}), type(bare).__name__)


def _part(config: Any, name: str) -> Part:
    """Without what differs between two copies of a model: the path, the version, how it is quantised."""
    plain = json.loads(json.dumps(dict(config), default=str))
    left = {key: value for key, value in plain.items() if not key.startswith("_") and key != "quantization_config"}
    return {"class": name, "config": left}


def _difference(there: Part, here: Part) -> str:
    """The first difference in words. A version of diffusers may add settings, so only common ones count."""
    if there["class"] != here["class"]:
        return f"a {there['class']}, not a {here['class']}"
    old, new = there["config"], here["config"]
    others = (f"{key} was {brief(old[key])}, is {brief(new[key])}" for key in old if old[key] != new.get(key, old[key]))
    return next(others, "")
