"""What is asked for, and what comes back?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, SettingError, nearest
from ..files import read_json

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST = {"num_inference_steps": 1, "height": 1, "width": 1, "num_outputs_per_prompt": 1, "max_sequence_length": 1}
_WHOLE = (*_LEAST, "seed")
_NUMBERS = ("guidance_scale", "true_cfg_scale")


@dataclass(frozen=True)
class OmniDiffusionSamplingParams:
    """How a picture is sampled. What is None is the model's own default, or else its pipeline's."""

    num_inference_steps: int | None = None
    seed: int | None = None
    """None draws one, which the result names. Picture i of a prompt is that of seed + i."""
    height: int | None = None
    width: int | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    negative_prompt: str | None = None
    num_outputs_per_prompt: int | None = None
    max_sequence_length: int | None = None
    """Tokens of text that the model reads."""

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *_NUMBERS):
            value = getattr(self, name)
            is_number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and math.isfinite(value)):
                kind = "a whole number" if name in _WHOLE else "a finite number"
                raise SettingError(f"{name} must be {kind}, not {value!r}.")
            if value is not None and value < _LEAST.get(name, 0):
                raise SettingError(f"{name} must be at least {_LEAST.get(name, 0)}, not {value!r}.")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise SettingError(f"negative_prompt must be text, not {self.negative_prompt!r}.")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OmniDiffusionSamplingParams:
        """Settings by name; an unknown name is refused with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise SettingError(f"{name!r} is no setting of a picture. {nearest(name, known)}")
        return cls(**settings)

    def given(self) -> dict[str, Any]:
        """What is not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def over(self, other: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
        """These settings, and those of another where these leave them open."""
        return OmniDiffusionSamplingParams(**other.given() | self.given())


def read_defaults(folder: Path) -> OmniDiffusionSamplingParams:
    """A model's own defaults, which lie in its folder as `samovar.json`; none where there is no such file."""
    file = folder / "samovar.json"
    if not file.is_file():
        return OmniDiffusionSamplingParams()
    try:
        return OmniDiffusionSamplingParams.from_dict(read_json(file))
    except SettingError as error:
        raise ModelError(
            f"{file} does not hold the model's defaults: {error} Correct the file or remove it."
        ) from error


@dataclass(frozen=True)
class GeneratedPictures:
    """What came of one prompt."""

    prompt: str
    images: tuple[Image, ...]
    seeds: tuple[int, ...]
    """The seed that makes each picture again, alone."""
    params: OmniDiffusionSamplingParams
    """The settings used."""
    seconds: float
    notes: tuple[str, ...] = ()
    """What the user should know, such as a prompt that was too long."""
    cache: tuple[Any, ...] = ()
    """What the cache did for each picture, if there is one: its `stats()`."""
