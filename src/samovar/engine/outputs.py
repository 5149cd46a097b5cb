"""What does a pipeline make: images, videos or sound? Known from its class, before any weights are loaded.

A pipeline's call returns a dataclass, whose fields say what it makes. The class is in the call's annotation, or among
the names that its code uses.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..arch.calls import call_parameters
from ..core.errors import EngineError, ModelError
from ..media import Audio, Video

_IMAGES, _VIDEOS, _SOUNDS = ("images", "image"), ("frames", "videos", "video"), ("audios", "audio", "sound")
_FRAME_COUNTS = ("num_frames", "video_length", "frames")
START, END = "audio_start_in_s", "audio_end_in_s"
"""Of a pipeline that makes a part of a longer sound."""
_DURATIONS = ("audio_length_in_s", END, "audio_duration", "audio_duration_s", "duration")
_FRAME_RATES = ("fps", "frame_rate")
_SAMPLE_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")
_SOUND_PARTS = ("vocoder", "audio_vae", "sound_tokenizer", "vae", "unet")
_USUAL_FPS = 16.0
_EXAMPLE_FPS = re.compile(r"\bfps=(\d+)")


@dataclass(frozen=True)
class OutputKind:
    """What a pipeline makes, and how long."""

    kind: str = "image"
    """"image", "video" or "audio"."""
    field: str = "images"
    """The field of the pipeline's output that holds it."""
    audio_field: str | None = None
    """The field that holds the sound of a video."""
    fps: float | None = None
    """Frames per second, unless a request says otherwise."""
    rate: int | None = None
    """Samples of sound per second."""
    frames_argument: str | None = None
    """The argument that sets the number of frames."""
    frames: int | None = None
    """Its default."""
    frame_group: int = 1
    """Frames that the VAE compresses into one."""
    fps_argument: str | None = None
    duration_argument: str | None = None
    """The argument that sets the seconds of sound."""
    seconds: float | None = None
    """Its default."""
    most_seconds: float | None = None
    """Of sound, if the model has a limit."""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "video with audio" if self.audio_field else {"image": "images"}.get(self.kind, self.kind)

    def frames_in(self, seconds: float, fps: float) -> int:
        """The number of frames that comes closest to a duration and that the VAE can make."""
        extra = 1 if self.frames is None else self.frames % self.frame_group
        groups = max(0 if extra else 1, round((seconds * fps - extra) / self.frame_group))
        return max(1, groups * self.frame_group + extra)

    def most_frames(self, groups: int) -> int:
        """Frames that the VAE makes at most of this number of latents, of which the first may be a single frame."""
        is_single = self.frames is None or bool(self.frames % self.frame_group)
        return (groups - is_single) * self.frame_group + is_single


def output_fields(cls: type) -> tuple[str, str, str | None]:
    """The kind of output of a pipeline class and the fields that hold it and its sound; ModelError if it is unknown."""
    fields = {field.name for found in _output_classes(cls) for field in dataclasses.fields(found)}
    images, videos, sounds = (
        next((name for name in names if name in fields), None) for names in (_IMAGES, _VIDEOS, _SOUNDS)
    )
    if videos is not None:
        return "video", videos, sounds
    if images is not None:
        counts_frames = any(name in call_parameters(cls) for name in _FRAME_COUNTS)
        return ("video" if counts_frames else "image"), images, None
    if sounds is not None:
        return "audio", sounds, None
    what = f"returns {', '.join(sorted(fields))}" if fields else "does not say what its call returns"
    raise ModelError(
        f"{cls.__name__} {what}: it makes no images, video or sound that could be saved. Use another pipeline, or "
        "annotate its __call__ with an output class that has images, frames or audios."
    )


def find_output(pipeline: Any) -> OutputKind:
    """What a loaded pipeline makes."""
    cls = type(pipeline)
    kind, field, audio_field = output_fields(cls)
    if kind == "image":
        return OutputKind(kind, field)
    parameters = call_parameters(cls)
    rate = _sample_rate(pipeline) if audio_field or kind == "audio" else None
    notes: list[str] = []
    if audio_field and rate is None:  # Such as a model without its sound part.
        audio_field = None
    if kind == "audio":
        if rate is None:
            raise ModelError(f"No part of this {cls.__name__} says how many samples of sound it makes per second.")
        duration = next((name for name in _DURATIONS if name in parameters), None)
        usual = parameters[duration].default if duration else None
        longest = _longest(pipeline, rate)
        seconds = float(usual) if isinstance(usual, (int, float)) else longest
        most = longest if duration == END else None
        return OutputKind(kind, field, rate=rate, duration_argument=duration, seconds=seconds, most_seconds=most)
    fps_argument = next((name for name in _FRAME_RATES if name in parameters), None)
    fps = parameters[fps_argument].default if fps_argument else None
    if not isinstance(fps, (int, float)):
        example = _EXAMPLE_FPS.search(cls.__call__.__doc__ or "")
        fps = float(example[1]) if example else _USUAL_FPS
        if not example:
            notes.append(
                f"{cls.__name__} does not say its frame rate; {_USUAL_FPS:g} fps is taken, unless fps is given"
            )
    argument = next((name for name in _FRAME_COUNTS if name in parameters), None)
    default = parameters[argument].default if argument else None
    return OutputKind(
        kind,
        field,
        audio_field,
        float(fps),
        rate,
        frames_argument=argument,
        frames=default if isinstance(default, int) else None,
        frame_group=_frame_group(pipeline),
        fps_argument=fps_argument,
        notes=tuple(notes),
    )


def take_outputs(kind: OutputKind, output: Any, count: int, fps: float | None = None) -> list[list[Any]]:
    """What a call has made, for each of the prompts that it was made for. A prompt may have several: layers."""
    value = getattr(output, kind.field)
    if kind.kind == "image":
        made = [list(each) if isinstance(each, (list, tuple)) else [each] for each in value]
    elif kind.kind == "audio":
        made = [[Audio(samples, _known(kind.rate))] for samples in _sounds(value)]
    else:
        sounds = getattr(output, kind.audio_field, None) if kind.audio_field else None
        tracks = [None] * count if sounds is None else [Audio(each, _known(kind.rate)) for each in _sounds(sounds)]
        films = [_frames(film) for film in _films(value)]
        made = [[Video(film, fps or _known(kind.fps), track)] for film, track in zip(films, tracks, strict=True)]
    if len(made) != count:
        raise EngineError(f"The pipeline made {len(made)} outputs for {count} prompts.")
    return made


def _known(value: Any) -> Any:
    assert value is not None, "found when the pipeline was loaded"
    return value


def _output_classes(cls: type) -> list[Any]:
    """The output classes of a pipeline's call: as annotated, else as used by its code, here or in a parent class."""
    from diffusers.utils import BaseOutput

    def is_output(value: Any) -> bool:
        return inspect.isclass(value) and issubclass(value, BaseOutput) and dataclasses.is_dataclass(value)

    for each in cls.__mro__:
        call = inspect.unwrap(each.__dict__["__call__"]) if "__call__" in each.__dict__ else None
        if not isinstance(call, types.FunctionType):
            continue
        annotated = call.__annotations__.get("return")
        if isinstance(annotated, str):
            names = re.findall(r"\w+", annotated)
            annotated = tuple(call.__globals__.get(name) for name in names)
        options = annotated if isinstance(annotated, tuple) else (annotated, *typing.get_args(annotated))
        used = (call.__globals__.get(name) for code in _codes(call.__code__) for name in code.co_names)
        for candidates in (options, used):
            if found := [value for value in candidates if is_output(value)]:
                return found
    return []


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _sample_rate(pipeline: Any) -> int | None:
    """What the last part that makes sound says."""
    for part in _SOUND_PARTS:
        config = getattr(getattr(pipeline, part, None), "config", None)
        for name in _SAMPLE_RATES:
            if isinstance(rate := getattr(config, name, None), int):
                return rate
    rate = getattr(pipeline, "sample_rate", None)
    return rate if isinstance(rate, int) else None


def _longest(pipeline: Any, rate: int) -> float | None:
    """The seconds of sound that all latents make which the model was trained with: who says nothing gets them."""
    latents = getattr(getattr(getattr(pipeline, "transformer", None), "config", None), "sample_size", None)
    samples = getattr(getattr(pipeline, "vae", None), "hop_length", None)
    return latents * samples / rate if isinstance(latents, int) and isinstance(samples, int) else None


def _frame_group(pipeline: Any) -> int:
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
    found = next((value for name in names if isinstance(value := getattr(pipeline, name, None), int)), 1)
    return max(1, found)


def _films(value: Any) -> Sequence[Any]:
    """One item for each video, where a pipeline may return its only one bare."""
    is_bare = getattr(value, "ndim", 5) == 4
    if isinstance(value, (list, tuple)) and value:
        is_bare = hasattr(value[0], "convert") or getattr(value[0], "ndim", 4) == 3
    return [value] if is_bare else value


def _frames(film: Any) -> Any:
    """The frames of one video, from images, arrays or tensors with values from 0 to 1."""
    if isinstance(film, (list, tuple)):
        if hasattr(film[0], "convert"):
            return np.stack([np.asarray(frame.convert("RGB")) for frame in film])
        film = torch.stack(list(film)) if isinstance(film[0], torch.Tensor) else np.stack(film)
    if isinstance(film, torch.Tensor):
        film = film.detach().float().cpu()
        film = (film if film.shape[-1] == 3 else film.movedim(1, -1)).numpy()
    if film.dtype == np.uint8:
        return film
    _check_finite(film)
    return (film.clip(0, 1) * 255).round().astype(np.uint8)


def _sounds(value: Any) -> list[Any]:
    """(channels, samples) for each sound."""
    if isinstance(value, torch.Tensor):
        value = value.detach().float().cpu().numpy()
    elif isinstance(value, (list, tuple)):
        value = np.stack(
            [one.detach().float().cpu().numpy() if isinstance(one, torch.Tensor) else one for one in value]
        )
    value = np.atleast_2d(np.asarray(value, dtype=np.float32))
    _check_finite(value)
    return [each if each.ndim == 2 else each[None] for each in value]


def _check_finite(values: Any) -> None:
    if not np.isfinite(values).all():
        raise EngineError(
            "What the pipeline made contains NaN or infinity. Try another dtype, such as float32; if that does not "
            "help, the weights may be damaged."
        )
