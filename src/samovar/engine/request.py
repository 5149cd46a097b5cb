"""What is asked for, and what comes back?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, SamovarError, SettingError, nearest
from ..files import read_json

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST = {"num_inference_steps": 1, "height": 1, "width": 1, "num_outputs_per_prompt": 1, "max_sequence_length": 1}
_WHOLE = (*_LEAST, "seed")
_NUMBERS = ("guidance_scale", "true_cfg_scale", "strength")
_MOST: dict[str, int] = {"strength": 1, "seed": 2**64 - 1} | dict.fromkeys(_LEAST, 2**31 - 1)
"""What is more than a generator, or any tensor, can have."""


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
    strength: float | None = None
    """How much of a given picture is drawn anew, from 0 to 1."""

    def __post_init__(self) -> None:
        for name in (*_WHOLE, *_NUMBERS):
            value = getattr(self, name)
            if value is None:
                continue
            is_number = isinstance(value, int if name in _WHOLE else (int, float)) and not isinstance(value, bool)
            if not (is_number and (name in _WHOLE or abs(value) <= sys.float_info.max)):
                kind = "a whole number" if name in _WHOLE else "a finite number"
                raise SettingError(f"{name} must be {kind}, not {_shown(value)}.")
            if value < _LEAST.get(name, 0):
                raise SettingError(f"{name} must be at least {_LEAST.get(name, 0)}, not {_shown(value)}.")
            if value > _MOST.get(name, value):
                raise SettingError(f"{name} must be at most {_MOST[name]}, not {_shown(value)}.")
        last = (self.seed or 0) + (self.num_outputs_per_prompt or 1) - 1
        if last > _MOST["seed"]:
            raise SettingError(f"seed + num_outputs_per_prompt - 1 must be at most {_MOST['seed']}, not {last}.")
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


def _shown(value: Any) -> str:
    """A value in a message, where a number of a thousand digits has no place, and Python writes none."""
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**128 else repr(value)


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
class Request:
    """One prompt and how its pictures are made."""

    prompt: str
    params: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    image: Image | None = None
    """What to start from, for pipelines that edit."""
    num_previews: int = 0
    exact: bool = False
    """Whether every step is computed, cache or not."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise SettingError(f"A prompt must be text, not {self.prompt!r}.")
        if not isinstance(self.params, OmniDiffusionSamplingParams):
            raise SettingError(f"params must be OmniDiffusionSamplingParams, not {self.params!r}.")
        if type(self.num_previews) is not int or self.num_previews < 0:
            raise SettingError(f"num_previews must be a whole number from 0 on, not {self.num_previews!r}.")
        if not isinstance(self.exact, bool):
            raise SettingError(f"exact must be True or False, not {self.exact!r}.")

    @property
    def num_pictures(self) -> int:
        return self.params.num_outputs_per_prompt or 1

    def fits_with(self, other: Request) -> bool:
        """Whether one call of the pipeline can make the pictures of both."""
        is_plain = self.image is None and other.image is None and self.exact == other.exact
        return is_plain and _shared(self.params) == _shared(other.params)


def _shared(params: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
    return replace(params, seed=None, num_outputs_per_prompt=None)


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
    error: SamovarError | None = None
    """Why there are no pictures, for a prompt of a list; a single prompt that fails raises it instead."""

    @classmethod
    def failed(cls, request: Request, error: SamovarError) -> GeneratedPictures:
        """No pictures, and why."""
        return cls(request.prompt, (), (), request.params, 0.0, error=error)
