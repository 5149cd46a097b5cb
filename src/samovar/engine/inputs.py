"""The images, videos and sounds that a pipeline takes, read from the signature of its call.

An argument that has no default is needed. What else a pipeline needs, its own checks say when it is called.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL.Image import Image, new

from ..arch.calls import call_parameters
from ..arch.modular import ModularCall
from ..core.errors import SettingError
from ..core.files import brief
from ..media import Audio, Video, upright

INPUT_NAMES = frozenset({"mask", "last_image", "control_image", "control_video", "video", "audio"})
"""Inputs that have the same name for every pipeline; `image` is a parameter of its own."""
_MEDIA = re.compile(
    r"(?:^|_)(image|images|video|audio|mask|waveforms)$|^(conditioning_frames|image_reference|controls)$"
)
_NOT_MEDIA = re.compile(r"(sample|return|use|render|freeze|attention|padding|prompt|processed|resized)_")
_KINDS = {"waveforms": "audio", "conditioning_frames": "video", "controls": "video", "image_reference": "image"}
_WORDS = {
    "image": ("image", "images", "input_images", "cond_image", "control_image"),
    "mask": ("mask_image", "mask", "control_mask", "mask_video"),
    "control_video": ("control_video", "conditioning_frames", "controls"),
    "audio": ("audio", "src_audio", "initial_audio_waveforms", "reference_audio"),
}
"""Our words, and the pipelines' words for the same."""
_USUAL = {"video", *(name for names in _WORDS.values() for name in names)}
"""What pipelines start from, as a rule."""
_ARTICLES = {"image": "an image", "images": "images", "video": "a video", "audio": "a sound", "mask": "a mask"}
_MAX_SHAPE_RATIO = math.log(1.1)
"""How far the shape of a mask may be from that of its image."""


@dataclass(frozen=True)
class Inputs:
    """The arguments of a pipeline that take images, videos or sounds."""

    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    mask: str | None = None
    """The one that says which part of an image is redrawn, if an image is nothing without it."""

    @property
    def takes_image(self) -> bool:
        """Whether there is an argument for `image`."""
        return not set(_WORDS["image"]).isdisjoint(self.takes)

    def argument(self, name: str, class_name: str) -> str:
        """The pipeline's argument for an input; SettingError if it has none."""
        for candidate in (name, *_WORDS.get(name, ())):
            if candidate in self.takes:
                return candidate
        known = f"It takes {', '.join(self.takes)}." if self.takes else "It starts from text alone."
        remedy = " To start from one, choose another task with the same weights, such as 'img2img' or 'image2video'."
        raise SettingError(f"{class_name} takes no {name}. {known}{remedy * (name == 'image')}", param=name)

    def prepared(self, given: Mapping[str, Any], class_name: str, rate: int | None) -> dict[str, Any]:
        """The pipeline's arguments for some inputs: images upright in RGB, videos as lists of images, sound as tensors.
        SettingError for an input that is unknown, of the wrong kind, or cannot be read."""
        names = {name: self.argument(name, class_name) for name in given}
        call: dict[str, Any] = {}
        for name, argument in names.items():
            if argument in call:
                first = next(each for each in names if names[each] == argument)
                message = f"For {class_name}, {first} and {name} are the same input. Give one of them."
                raise SettingError(message, param=name)
            _check_kind(name, _kind(argument), given[name])
            try:
                call[argument] = _converted(argument, given[name], rate)
            except (EOFError, OSError, SyntaxError, ValueError) as error:  # Which one depends on the format.
                raise SettingError(f"The {name} cannot be read: {error}. Is the file complete?", param=name) from error
            if _kind(argument) == "images" and not isinstance(call[argument], list):  # Its only form is a list.
                call[argument] = [call[argument]]
        if "initial_audio_waveforms" in call:
            call["initial_audio_sampling_rate"] = rate
        if self.mask is not None:
            self._add_mask(call, given.get("image"), class_name)
        return call

    def _add_mask(self, call: dict[str, Any], image: Any, class_name: str) -> None:
        """The alpha channel of an image is its mask, if there is no other. Refuse one of another shape: stretched, it
        would say something else. Its size may differ."""
        assert self.mask is not None, "the pipeline takes one"
        if isinstance(image, (list, tuple)):
            raise SettingError(f"{class_name} redraws one image, not several. Give one.", param="image")
        if self.mask not in call and isinstance(image, Image):
            if "A" not in image.getbands():
                message = "needs a mask, or an image with an alpha channel: it redraws what is transparent."
                raise SettingError(f"{class_name} {message}", param="image")
            call[self.mask] = upright(image).getchannel("A").point(lambda alpha: 255 - alpha)
        image, mask = call.get("image"), call.get(self.mask)
        if isinstance(image, Image) and isinstance(mask, Image):
            ratio = image.width * mask.height / (image.height * mask.width)
            if abs(math.log(ratio)) > _MAX_SHAPE_RATIO:
                sizes = f"The mask is {mask.width}x{mask.height} and the image {image.width}x{image.height}"
                message = f"{sizes}, which is another shape. Give a mask of the image's size."
                raise SettingError(message, param="mask")

    def missing(self, call: Mapping[str, Any]) -> list[str]:
        """What the pipeline could start from and a call does not have."""
        return [name for name in self.takes if name in _USUAL and name not in call]

    def check_sendable(self, words: Collection[str], class_name: str) -> None:
        """Refuse a pipeline that needs something else than images under these words."""
        reached = {name for word in words for name in (word, *_WORDS.get(word, ()))}
        for name in self.needs:
            if name not in reached or _kind(name) in ("video", "audio"):
                message = f"{class_name} needs {name}, which requests to a server cannot send: they hold images."
                raise SettingError(f"{message} Use Omni, or samovar generate --input {name}=FILE.", param="model")

    def blanks(self, width: int, height: int) -> dict[str, Any]:
        """Transparent images for what is needed, or can be started from."""
        blank = new("RGBA", (width, height))
        wanted = [name for name in self.takes if name in ("image", "control_image", *self.needs) and name != self.mask]
        return {name: [blank] if _kind(name) == "video" else blank for name in wanted}


def find_inputs(cls: type) -> Inputs:
    """The inputs of a pipeline class."""
    parameters = call_parameters(cls)
    takes = tuple(name for name in parameters if _MEDIA.search(name) and not _NOT_MEDIA.search(name))
    needs = tuple(name for name in takes if parameters[name].default is parameters[name].empty)
    has_mask = {"mask_image", "image"} <= set(takes) and not issubclass(cls, ModularCall)
    return Inputs(takes, needs, "mask_image" if has_mask else None)


def is_media(value: Any) -> bool:
    """Whether a value is an image, a video or a sound, or a list of them."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(one, (Audio, Video, Image))


def _kind(argument: str) -> str:
    """What an argument takes: "image", "images", "video", "audio" or "mask"."""
    found = _MEDIA.search(argument)
    word = (found[1] or found[2]) if found else argument
    return "mask" if word == "image" and "mask" in argument else _KINDS.get(word, word)


def _check_kind(name: str, kind: str, value: Any) -> None:
    if isinstance(value, (Audio, Video, Image)):
        is_fit = isinstance(value, {"video": Video, "audio": Audio}.get(kind, Image))
    else:  # Tensors are the caller's business.
        is_list = isinstance(value, (list, tuple)) and not (kind == "audio" and is_media(value))
        is_fit = is_list or hasattr(value, "shape")
    if not is_fit:
        what = {Audio: "a sound", Video: "a video"}.get(type(value), "an image" if is_media(value) else brief(value))
        reader = kind if kind in ("video", "audio") else "image"
        message = f"{name} must be {_ARTICLES[kind]}, not {what}; samovar.media.read_{reader}(file) reads one."
        raise SettingError(message, param=name)


def _converted(argument: str, value: Any, rate: int | None) -> Any:
    if isinstance(value, Video):
        return value.images
    if isinstance(value, Audio):
        return _waveform(argument, value, rate)
    if isinstance(value, (list, tuple)):
        return [_converted(argument, each, rate) for each in value]
    return upright(value).convert("L" if _kind(argument) == "mask" else "RGB") if isinstance(value, Image) else value


def _waveform(argument: str, audio: Audio, rate: int | None) -> Any:
    """(1, channels, samples) at the model's rate, and (channels, samples) for those that add the first one."""
    samples = torch.from_numpy(audio.samples)
    if rate is not None and rate != audio.rate:
        count = round(samples.shape[1] * rate / audio.rate)
        samples = torch.nn.functional.interpolate(samples[None], count, mode="linear", antialias=False)[0]
    return samples if argument in ("src_audio", "reference_audio") else samples[None]
