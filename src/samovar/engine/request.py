"""Requests, what happens while they run, and their results.

A request that runs yields `Started`, `Progress` for each step, `Preview` as often as asked, and one `Done` or `Failed`.
A request that is refused or cancelled in the queue yields only `Failed`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL.Image import Image

from ..core.errors import ModelError, SamovarError, SettingError
from ..core.files import check_names, is_file_name, naming, read_json, read_mapping
from ..core.settings import read_tolerance
from ..media import Audio, Video, check_suffix, numbered, save
from .lora import Adapter, read_choice

_OTHER_WORDS = ("extra_args", "generator")
_MAX_INT, _MAX_SEED = 2**31 - 1, 2**64 - 1
_INTEGERS = {"num_inference_steps": (1, _MAX_INT), "height": (1, _MAX_INT), "width": (1, _MAX_INT),
             "num_outputs_per_prompt": (1, _MAX_INT), "max_sequence_length": (1, _MAX_INT),
             "seed": (0, _MAX_SEED), "num_frames": (1, _MAX_INT)}  # fmt: skip
_NUMBERS = {"guidance_scale": (0, sys.float_info.max), "true_cfg_scale": (0, sys.float_info.max), "strength": (0, 1),
            "fps": (0.01, 1000), "seconds": (0.001, 86_400)}  # fmt: skip


@dataclass(frozen=True)
class OmniDiffusionSamplingParams:
    """How an output is sampled. None means the model's default, or else its pipeline's."""

    num_inference_steps: int | None = None
    """Number of denoising steps."""
    seed: int | None = None
    """None draws one, which the result names. Image i of a prompt uses seed + i."""
    height: int | None = None
    """In pixels."""
    width: int | None = None
    """In pixels."""
    guidance_scale: float | None = None
    """How closely to follow the prompt, for pipelines with one scale (SD3, SDXL, Wan) or a distilled one (FLUX)."""
    true_cfg_scale: float | None = None
    """The same by classifier-free guidance, for FLUX, Qwen-Image and the built-in model."""
    negative_prompt: str | None = None
    """What to avoid; used with classifier-free guidance."""
    num_outputs_per_prompt: int | None = None
    """Number of images, videos or sounds per prompt."""
    max_sequence_length: int | None = None
    """Number of text tokens the model reads."""
    strength: float | None = None
    """How much of a given image is redrawn, from 0 to 1."""
    num_frames: int | None = None
    """Number of frames of a video."""
    fps: float | None = None
    """Frames per second of a video. A model that does not take it makes the same frames, played at this rate."""
    seconds: float | None = None
    """Duration of a video or a sound, in place of `num_frames`; the model's nearest."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Any other argument of the pipeline's call, by name."""
    extra_args: InitVar[Mapping[str, Any] | None] = None
    """Vllm-omni's word for `options`."""
    generator: InitVar[torch.Generator | None] = None
    """One that nothing was drawn from yet, in place of its seed."""

    def __post_init__(self, extra_args: Mapping[str, Any] | None, generator: torch.Generator | None) -> None:
        if extra_args is not None:
            if not isinstance(extra_args, Mapping):
                message = f"extra_args must be arguments of the pipeline by name, not {extra_args!r}."
                raise SettingError(message, param="extra_args")
            object.__setattr__(self, "options", {**extra_args, **self.options})
        if generator is not None:
            object.__setattr__(self, "seed", _seed_of(generator, self.seed))
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            message = f"options must be arguments of the pipeline by name, not {self.options!r}."
            raise SettingError(message, param="options")
        self._read_audio_length()
        if self.num_frames is not None and self.seconds is not None:
            message = f"num_frames={self.num_frames} and seconds={self.seconds} are mutually exclusive. Give one."
            raise SettingError(message, param="seconds")
        for name, value in self.given().items():
            if name == "negative_prompt":
                if not isinstance(value, str):
                    raise SettingError(f"negative_prompt must be text, not {value!r}.", param=name)
                continue
            kind, types = ("a whole number", int) if name in _INTEGERS else ("a finite number", (int, float))
            is_number = isinstance(value, types) and not isinstance(value, bool)
            if not is_number or (name in _NUMBERS and not abs(value) <= sys.float_info.max):
                raise SettingError(f"{name} must be {kind}, not {_shown(value)}.", param=name)
            least, most = _INTEGERS.get(name) or _NUMBERS[name]
            if not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise SettingError(f"{name} must be {bound}, not {_shown(value)}.", param=name)
        last = (self.seed or 0) + (self.num_outputs_per_prompt or 1) - 1
        if last > _MAX_SEED:
            message = f"seed + num_outputs_per_prompt - 1 must be at most {_MAX_SEED}, not {last}."
            raise SettingError(message, param="seed")

    def _read_audio_length(self) -> None:
        """Vllm-omni's word for the seconds of a sound; no pipeline of diffusers has an argument of this name."""
        options = dict(self.options)
        seconds = options.pop("audio_length", None)
        if seconds is not None and self.seconds is not None:
            message = f"seconds={self.seconds} and audio_length={seconds} are mutually exclusive. Give one."
            raise SettingError(message, param="audio_length")
        if "audio_length" in self.options:
            object.__setattr__(self, "options", options)
            object.__setattr__(self, "seconds", self.seconds if seconds is None else seconds)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> OmniDiffusionSamplingParams:
        """Settings by name. An unknown name is refused with the nearest known one."""
        check_names(settings, [*(field.name for field in fields(cls)), *_OTHER_WORDS], "a sampling parameter")
        return cls(**settings)

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> OmniDiffusionSamplingParams:
        """Settings by name. Names of other arguments are options, which the pipeline's signature judges."""
        known = {*(field.name for field in fields(cls)), *_OTHER_WORDS} - {"options"}
        options = {name: value for name, value in arguments.items() if name not in {*known, "options"}}
        given = {name: value for name, value in arguments.items() if name in known}
        return cls(**given, options={**arguments.get("options", {}), **options})

    def given(self) -> dict[str, Any]:
        """What is not None, by name; `options` apart."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "options"}
        return {name: value for name, value in values.items() if value is not None}

    def over(self, other: OmniDiffusionSamplingParams) -> OmniDiffusionSamplingParams:
        """These settings, completed by another's."""
        theirs, ours = other.given(), self.given()
        if ours.keys() & {"num_frames", "seconds"}:
            theirs = {name: value for name, value in theirs.items() if name not in ("num_frames", "seconds")}
        return OmniDiffusionSamplingParams(**theirs | ours, options={**other.options, **self.options})


def _seed_of(generator: Any, seed: int | None) -> int:
    """The seed of a generator. One that was drawn from has another state, which no seed gives."""
    if not isinstance(generator, torch.Generator):
        raise SettingError(f"generator must be a torch.Generator, not {generator!r}.", param="generator")
    found = generator.initial_seed()
    if seed not in (None, found):
        message = f"seed={seed} and a generator with the seed {found} are mutually exclusive. Give one."
        raise SettingError(message, param="generator")
    if not torch.equal(torch.Generator(generator.device).manual_seed(found).get_state(), generator.get_state()):
        message = "generator was drawn from already, and each output has a generator of its own. Give a seed."
        raise SettingError(message, param="generator")
    return found


def _flat(images: Any) -> Iterator[Any]:
    if isinstance(images, (list, tuple)):
        for each in images:
            yield from _flat(each)
    elif images is not None:
        yield images


def _shown(value: Any) -> str:
    """A value for a message. Python refuses to print integers of thousands of digits."""
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) > 2**128 else repr(value)


def read_defaults(folder: Path) -> OmniDiffusionSamplingParams:
    """The model's defaults, from `samovar.json` in its folder if there is one."""
    file = folder / "samovar.json"
    if not file.is_file():
        return OmniDiffusionSamplingParams()
    try:
        return OmniDiffusionSamplingParams.from_dict(read_json(file))
    except SettingError as error:
        raise ModelError(f"{file} has invalid defaults: {error} Correct the file or remove it.") from error


def saved_defaults(cache: Any) -> OmniDiffusionSamplingParams:
    """The parameters that a cache setting was tuned with, if it is a file that `samovar tune` saved."""
    content = read_mapping(cache, "cache") if is_file_name(cache) else {}
    known = {field.name for field in fields(OmniDiffusionSamplingParams)} if "cache" in content else set()
    with naming(cache):
        return OmniDiffusionSamplingParams(**{name: content[name] for name in known & content.keys()})


@dataclass(frozen=True)
class Request:
    """One prompt and how to make its images, videos or sounds."""

    prompt: str
    params: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    image: Image | Sequence[Any] | None = None
    """The image to start from, or several, for pipelines that take them; or rows of them, with None for one to make."""
    num_previews: int = 0
    exact: bool = False
    """Compute every step, whatever the cache would skip."""
    lora: Any = ()
    """The adapters to use: a name, {"name": ..., "scale": ...}, or a list of these."""
    tolerance: float | str | None = None
    """How much the cache "auto" may lose, if not what its settings say."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Other images, videos and sounds to start from, by name: mask, last_image, control_image, video, audio ..."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise SettingError(f"prompt must be text, not {self.prompt!r}.", param="prompt")
        if not isinstance(self.params, OmniDiffusionSamplingParams):
            raise SettingError(f"params must be OmniDiffusionSamplingParams, not {self.params!r}.", param="params")
        if not all(hasattr(image, "convert") for image in self.images) or (self.image is not None and not self.images):
            remedy = "samovar.media.read_image(file) reads one."
            message = f"image must be a PIL image, or a list of them, not {self.image!r}. {remedy}"
            raise SettingError(message, param="image")
        if type(self.num_previews) is not int or self.num_previews < 0:
            message = f"num_previews must be a whole number, 0 or more, not {self.num_previews!r}."
            raise SettingError(message, param="num_previews")
        if not isinstance(self.exact, bool):
            raise SettingError(f"exact must be True or False, not {self.exact!r}.", param="exact")
        object.__setattr__(self, "lora", read_choice(self.lora))
        if self.tolerance is not None:
            read_tolerance(self.tolerance)

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

    def _made(self) -> tuple[Any, ...]:
        if self.error is not None:
            raise self.error
        return self.outputs

    @property
    def images(self) -> tuple[Image, ...]:
        """Raises the error of a prompt that failed, as the others do."""
        return tuple(output for output in self._made() if not isinstance(output, (Video, Audio)))

    @property
    def videos(self) -> tuple[Video, ...]:
        return tuple(output for output in self._made() if isinstance(output, Video))

    @property
    def audios(self) -> tuple[Audio, ...]:
        return tuple(output for output in self._made() if isinstance(output, Audio))

    @property
    def request_output(self) -> list[GenerationResult]:
        """As in vllm-omni, where a result has one part for each stage of a model."""
        return [self]

    def save(self, file: str | Path) -> list[Path]:
        """Write the outputs, as the suffix says: .png, .jpg, .webp; .mp4, .webm, .gif; .wav, .flac, .mp3, .ogg. Several
        get numbers: cat-1.png, cat-2.png ..."""
        outputs = self._made()
        check_suffix(file)
        return [save(output, path) for output, path in zip(outputs, numbered(file, len(outputs)), strict=True)]

    def __repr__(self) -> str:
        if self.error is not None:
            return f"<GenerationResult for {self.prompt!r}: {type(self.error).__name__}: {self.error}>"
        made = ", ".join(
            f"{_described(output)}, seed {seed}" for output, seed in zip(self.outputs, self.seeds, strict=True)
        )
        return f"<GenerationResult for {self.prompt!r}: {made}; {self.seconds:.1f} s>"

    @classmethod
    def failed(cls, request: Request, error: SamovarError) -> GenerationResult:
        return cls(request.prompt, (), (), request.params, 0.0, error=error)


def _described(output: Image | Video | Audio) -> str:
    return repr(output) if isinstance(output, (Video, Audio)) else f"{output.width}x{output.height}"


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
