"""The images, videos or sounds that a pipeline makes, known from its class before any weights are loaded.

A pipeline's call returns a dataclass whose fields say what it makes. Its module names that class.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL.Image import Image

from ..arch.calls import call_parameters
from ..core.errors import EngineError, ModelError
from ..media import Audio, Video

_FIELDS = {"video": ("frames", "videos", "video"), "image": ("images", "image"), "audio": ("audios", "audio", "sound")}
"""By what they hold. A pipeline that makes several makes the first of these."""
_FRAME_COUNTS = ("num_frames", "video_length", "frames")
START, END = "audio_start_in_s", "audio_end_in_s"
"""Of a pipeline that makes a part of a longer sound."""
_DURATIONS = ("audio_length_in_s", END, "audio_duration", "audio_duration_s", "duration")
_FRAME_RATES = ("fps", "frame_rate")
_SAMPLE_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate")
_SOUND_PARTS = ("vocoder", "audio_vae", "sound_tokenizer", "vae", "unet")
_FRAME_GROUPS = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
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
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "video with audio" if self.audio_field else {"image": "images"}.get(self.kind, self.kind)

    def frames_in(self, seconds: float, fps: float) -> int:
        """The number of frames that comes closest to a duration and that the VAE can make."""
        extra = 1 if self.frames is None else self.frames % self.frame_group
        groups = max(0 if extra else 1, round((seconds * fps - extra) / self.frame_group))
        return max(1, groups * self.frame_group + extra)

    def max_frames(self, groups: int) -> int:
        """Frames that the VAE makes at most of this number of latents, of which the first may be a single frame."""
        is_single = self.frames is None or bool(self.frames % self.frame_group)
        return (groups - is_single) * self.frame_group + is_single


def output_fields(cls: type) -> tuple[str, str, str | None]:
    """The kind of output of a pipeline class and the fields that hold it and its sound; ModelError if it is unknown."""
    fields = {field.name for found in _output_classes(cls) for field in dataclasses.fields(found)}
    found = {kind: name for kind, names in _FIELDS.items() for name in reversed(names) if name in fields}
    if not found:
        what = f"returns {', '.join(sorted(fields))}" if fields else "does not say what its call returns"
        raise ModelError(
            f"{cls.__name__} {what}: it makes no images, video or sound that could be saved. Use another pipeline, or "
            "annotate its __call__ with an output class that has images, frames or audios."
        )
    kind = next(iter(found))
    counts_frames = not call_parameters(cls).keys().isdisjoint(_FRAME_COUNTS)
    sound = found.get("audio") if kind == "video" else None
    return "video" if kind == "image" and counts_frames else kind, found[kind], sound


def _output_classes(cls: type) -> list[Any]:
    """The output classes of a pipeline's call: as annotated, else those that its module knows; or its parent's."""
    from diffusers.utils import BaseOutput

    for each in cls.__mro__:
        call = inspect.unwrap(vars(each).get("__call__"))  # type: ignore[arg-type]
        if inspect.isfunction(call):
            annotated = call.__annotations__.get("return")
            for values in ((annotated, *typing.get_args(annotated)), call.__globals__.values()):
                classes = [value for value in values if inspect.isclass(value) and dataclasses.is_dataclass(value)]
                if found := [each for each in classes if issubclass(each, BaseOutput)]:
                    return found
    return []


def find_output(pipeline: Any) -> OutputKind:
    """What a loaded pipeline makes."""
    cls = type(pipeline)
    kind, field, audio_field = output_fields(cls)
    parameters = call_parameters(cls)

    def argument(*names: str) -> tuple[str | None, Any]:
        """The argument that has one of these names, and its default if that is a number."""
        name = next((name for name in names if name in parameters), None)
        default = parameters[name].default if name is not None else None
        return name, default if isinstance(default, (int, float)) else None

    if kind == "image":
        return OutputKind(kind, field)
    rate = _sample_rate(pipeline)
    if kind == "audio":
        if rate is None:
            raise ModelError(f"No part of this {cls.__name__} says how many samples of sound it makes per second.")
        duration, seconds = argument(*_DURATIONS)
        return OutputKind(kind, field, rate=rate, duration_argument=duration, seconds=seconds)
    fps_argument, fps = argument(*_FRAME_RATES)
    frames_argument, frames = argument(*_FRAME_COUNTS)
    example = _EXAMPLE_FPS.search(cls.__call__.__doc__ or "")
    fps = fps or (example and example[1])
    note = f"{cls.__name__} does not say its frame rate; {_USUAL_FPS:g} fps is taken, unless fps is given"
    groups = (getattr(pipeline, name, None) for name in _FRAME_GROUPS)
    return OutputKind(
        kind,
        field,
        audio_field if rate is not None else None,  # Such as a model without its sound part.
        float(fps or _USUAL_FPS),
        rate if audio_field else None,
        frames_argument,
        frames,
        next((group for group in groups if isinstance(group, int)), 1),
        fps_argument,
        notes=() if fps else (note,),
    )


def _sample_rate(pipeline: Any) -> int | None:
    """What the last part that makes sound says."""
    configs = (getattr(getattr(pipeline, part, None), "config", None) for part in _SOUND_PARTS)
    rates = [getattr(config, name, None) for config in configs for name in _SAMPLE_RATES]
    return next((rate for rate in [*rates, getattr(pipeline, "sample_rate", None)] if isinstance(rate, int)), None)


# ------------------------------------------------------------------------------------------------ what was made


def take_outputs(kind: OutputKind, output: Any, fps: float | None = None) -> tuple[Image | Video | Audio, ...]:
    """What a call has made: one output, or several images that are its layers."""
    made = getattr(output, kind.field)
    if kind.kind == "image":
        image = _only(made)
        return tuple(image) if isinstance(image, (list, tuple)) else (image,)
    if kind.kind == "audio":
        return (Audio(_samples(made), kind.rate or 0),)
    sound = getattr(output, kind.audio_field or "", None)
    track = None if sound is None else Audio(_samples(sound), kind.rate or 0)
    return (Video(_frames(made), fps or kind.fps or 0, track),)


def _only(values: Any) -> Any:
    if len(values) != 1:
        raise EngineError(f"The pipeline made {len(values)} outputs for one prompt.")
    return values[0]


def _array(value: Any) -> Any:
    """Images, arrays and tensors, alone or in lists, as one array."""
    if isinstance(value, (list, tuple)):
        return np.stack([_array(each) for each in value])
    if isinstance(value, Image):
        return np.asarray(value.convert("RGB"))
    return value.detach().float().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _frames(value: Any) -> Any:
    """The frames of the only video. Numbers are from 0 to 1."""
    frames = _array(value)
    frames = _only(frames) if frames.ndim == 5 else frames
    frames = frames if frames.shape[-1] == 3 else np.moveaxis(frames, 1, -1)
    return frames if frames.dtype == np.uint8 else (_finite(frames).clip(0, 1) * 255).round().astype(np.uint8)


def _samples(value: Any) -> Any:
    """(channels, samples) of the only sound."""
    sound = _array(value)
    return _finite(np.atleast_2d(sound if sound.ndim == 1 else _only(sound)).astype(np.float32))


def _finite(values: Any) -> Any:
    if not np.isfinite(values).all():
        raise EngineError(
            "What the pipeline made contains NaN or infinity. Try another dtype, such as float32; if that does not "
            "help, the weights may be damaged."
        )
    return values
