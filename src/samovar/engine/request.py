"""A request: one prompt, what to start from, and how its outputs are sampled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image

from ..core.errors import ModelError, SettingError
from ..core.files import brief, check_names, is_file_name, naming, read_json, read_mapping
from ..core.settings import (
    FLAG,
    MAX_NUMBER,
    TEXT,
    TOLERANCE,
    Kind,
    Settings,
    count,
    is_number,
    kind,
    number,
    setting,
    table,
)

_MAX_SEED = 2**64 - 1
_COUNT = count(1, 2**31 - 1)
_LENGTHS = ("num_frames", "seconds")
_WORDS = {"extra_args": "options", "generator": "seed", "audio_length": "seconds"}
"""Vllm-omni's words for some parameters."""
_BY_NAME = kind(
    "arguments of the pipeline by name", lambda value: isinstance(value, Mapping) and all(type(n) is str for n in value)
)


@dataclass(frozen=True)
class OmniDiffusionSamplingParams(Settings, param="sampling_params"):
    """How an output is sampled. None means the model's default, or else its pipeline's."""

    num_inference_steps: int | None = setting(None, _COUNT, "Number of denoising steps.")
    seed: int | None = setting(
        None, count(0, _MAX_SEED), "None draws one, which the result names. Image i of a prompt uses seed + i."
    )
    height: int | None = setting(None, _COUNT, "In pixels.")
    width: int | None = setting(None, _COUNT, "In pixels.")
    guidance_scale: float | None = setting(
        None,
        number(),
        "How closely to follow the prompt, for pipelines with one scale (SD3, SDXL, Wan) or a distilled one (FLUX).",
    )
    true_cfg_scale: float | None = setting(
        None, number(), "The same by classifier-free guidance, for FLUX, Qwen-Image and the built-in model."
    )
    negative_prompt: str | None = setting(None, TEXT, "What to avoid; used with classifier-free guidance.")
    num_outputs_per_prompt: int | None = setting(None, _COUNT, "Number of images, videos or sounds per prompt.")
    max_sequence_length: int | None = setting(None, _COUNT, "Number of text tokens the model reads.")
    strength: float | None = setting(None, number(0, 1), "How much of a given image is redrawn, from 0 to 1.")
    num_frames: int | None = setting(None, _COUNT, "Number of frames of a video.")
    fps: float | None = setting(
        None,
        number(0.01, 1000),
        "Frames per second of a video. A model that does not take it makes the same frames, played at this rate.",
    )
    seconds: float | None = setting(
        None,
        number(0.001, 86_400),
        "Duration of a video or a sound, in place of `num_frames`; the model's nearest.",
    )
    options: Mapping[str, Any] = setting(dict, _BY_NAME, "Any other argument of the pipeline's call.", hash=False)
    extra_args: InitVar[Any] = None
    generator: InitVar[Any] = None
    audio_length: InitVar[Any] = None

    def __post_init__(self, extra_args: Any, generator: Any, audio_length: Any) -> None:
        options = {**extra_args, **self.options} if isinstance(extra_args, Mapping) else extra_args
        seed = None if generator is None else _seed_of(generator)
        for (word, name), value in zip(_WORDS.items(), (options, seed, audio_length), strict=True):
            if value is not None:
                if name != "options" and getattr(self, name) not in (None, value):
                    message = f"{name}={getattr(self, name)} and {word} ({value}) are mutually exclusive. Give one."
                    raise SettingError(message, param=word)
                object.__setattr__(self, name, value)
        super().__post_init__()

    def check(self) -> None:
        if self.num_frames is not None and self.seconds is not None:
            message = f"num_frames={self.num_frames} and seconds={self.seconds} are mutually exclusive. Give one."
            raise SettingError(message, param="seconds")
        last = (self.seed or 0) + (self.num_outputs_per_prompt or 1) - 1
        if last > _MAX_SEED:
            message = f"seed + num_outputs_per_prompt - 1 must be at most {_MAX_SEED}, not {last}."
            raise SettingError(message, param="seed")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> OmniDiffusionSamplingParams:
        """Settings by name. Names of other arguments are options, which the pipeline's signature judges."""
        known = {*table(cls), *_WORDS}
        options = {name: value for name, value in arguments.items() if name not in known}
        given = {name: value for name, value in arguments.items() if name in known}
        return cls(**given | {"options": {**given.get("options", {}), **options}})

    def given(self) -> dict[str, Any]:
        """What is not None, by name; `options` apart."""
        values = ((name, getattr(self, name)) for name in table(type(self)) if name != "options")
        return {name: value for name, value in values if value is not None}

    def over(self, other: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
        """These settings, completed by another's."""
        ours, theirs = self.given(), other.given()
        if not ours.keys().isdisjoint(_LENGTHS):
            theirs = {name: value for name, value in theirs.items() if name not in _LENGTHS}
        return OmniDiffusionSamplingParams(**theirs | ours, options={**other.options, **self.options})


def _seed_of(generator: Any) -> int:
    """The seed of a generator. One that was drawn from has another state, which no seed gives."""
    if not isinstance(generator, torch.Generator):
        raise SettingError(f"generator must be a torch.Generator, not {brief(generator)}.", param="generator")
    seed = generator.initial_seed()
    if not torch.equal(torch.Generator(generator.device).manual_seed(seed).get_state(), generator.get_state()):
        message = "generator was drawn from already, and each output has a generator of its own. Give a seed."
        raise SettingError(message, param="generator")
    return seed


def read_defaults(folder: Path) -> OmniDiffusionSamplingParams:
    """The model's defaults, from `samovar.json` in its folder if there is one."""
    file = folder / "samovar.json"
    try:
        return OmniDiffusionSamplingParams.read(read_json(file) if file.is_file() else {})
    except SettingError as error:
        raise ModelError(f"{file} has invalid defaults: {error} Correct the file or remove it.") from error


def saved_defaults(cache: Any) -> OmniDiffusionSamplingParams:
    """The parameters that a cache setting was tuned with, if it is a file that `samovar tune` saved."""
    content = read_mapping(cache, "cache") if is_file_name(cache) else {}
    known = table(OmniDiffusionSamplingParams).keys() & content.keys() if "cache" in content else ()
    with naming(cache):
        return OmniDiffusionSamplingParams(**{name: content[name] for name in known})


# ------------------------------------------------------------------------------------------------ adapters


class Adapter(NamedTuple):
    """A LoRA adapter that a request uses."""

    name: str
    scale: float = 1.0


def read_adapters(lora: Any) -> tuple[Adapter, ...]:
    """The adapters that a request uses: a name, {"name": ..., "scale": ...}, or a list of these."""
    several = () if lora is None else [lora] if isinstance(lora, (str, Mapping, Adapter)) else lora
    if not isinstance(several, (list, tuple)):
        raise ValueError
    chosen = tuple(map(_read_adapter, several))
    for index, (name, _) in enumerate(chosen):
        if name in [before for before, _ in chosen[:index]]:
            raise SettingError(f"lora: {brief(name)} is given twice. Give it once, with one scale.", param="lora")
    return chosen


def _read_adapter(one: Any) -> Adapter:
    given = one._asdict() if isinstance(one, Adapter) else {"name": one} if isinstance(one, str) else one
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError
    check_names(given, Adapter._fields, "a part of an adapter in lora, which has a name and a scale", param="lora")
    scale: Any = 1.0 if given.get("scale") is None else given["scale"]
    if not is_number(scale) or not abs(scale) <= MAX_NUMBER:
        message = f"lora: the scale of {brief(given['name'])} must be a number, not {brief(scale)}."
        raise SettingError(message, param="lora")
    return Adapter(given["name"], float(scale))


# ------------------------------------------------------------------------------------------------ requests


def _flat(images: Any) -> Iterator[Any]:
    if isinstance(images, (list, tuple)):
        for each in images:
            yield from _flat(each)
    elif images is not None:
        yield images


def _are_images(value: Any) -> bool:
    found = list(_flat(value))
    return bool(found) and all(isinstance(each, Image) for each in found)


_IMAGES = kind("a PIL image, or a list of them, as samovar.media.read_image(file) reads", _are_images)
_PARAMS = kind("OmniDiffusionSamplingParams", lambda value: isinstance(value, OmniDiffusionSamplingParams))
_ADAPTERS = Kind("the name of an adapter, {'name': ..., 'scale': ...}, or a list of these", read_adapters)


@dataclass(frozen=True)
class Request(Settings, param="request"):
    """One prompt and how to make its images, videos or sounds."""

    prompt: str = setting("", TEXT, "What to make.")
    params: OmniDiffusionSamplingParams = setting(OmniDiffusionSamplingParams, _PARAMS, "How it is sampled.")
    image: Any = setting(
        None,
        _IMAGES,
        "The image to start from, or several, for pipelines that take them; or rows of them, with None for one to "
        "make.",
    )
    num_previews: int = setting(0, count(), "Number of previews.")
    exact: bool = setting(False, FLAG, "Compute every step, whatever the cache would skip.")
    lora: Any = setting((), _ADAPTERS, "The adapters to use.")
    tolerance: float | str | None = setting(
        None, TOLERANCE, 'How much the cache "auto" may lose, if not what its settings say.'
    )
    inputs: Mapping[str, Any] = setting(
        dict,
        _BY_NAME,
        "Other images, videos and sounds to start from: mask, last_image, control_image, video, audio ...",
    )
    priority: int = setting(0, kind("a whole number", lambda value: type(value) is int), "Higher ones go first.")
    deadline_s: float | None = setting(
        None, number(above=True), "A request that has not started within this many seconds fails."
    )
    arguments: Mapping[str, Any] | None = None
    """What the pipeline is called with, once its facts have checked the request. Its parameters are complete then."""
    notes: tuple[str, ...] = ()
    """What of it has no effect."""

    @property
    def images(self) -> tuple[Image, ...]:
        """All images to start from, whatever rows they are in."""
        return tuple(_flat(self.image))

    @property
    def num_images(self) -> int:
        return self.params.num_outputs_per_prompt or 1

    @property
    def seeds(self) -> tuple[int, ...]:
        first = self.params.seed or 0
        return tuple(range(first, first + self.num_images))

    @property
    def given_inputs(self) -> dict[str, Any]:
        """All images, videos and sounds to start from, by name."""
        return dict(self.inputs) if self.image is None else {"image": self.image, **self.inputs}
