"""The images, videos and sounds that a pipeline takes, read from the signature of its call.

An argument that has no default is needed. What else a pipeline needs, its own checks say when it is called.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from ..arch.calls import call_parameters
from ..arch.modular import ModularCall
from ..core.errors import SettingError
from ..media import Audio, Video, upright, upright_size

_MEDIA = re.compile(
    r"(?:^|_)(image|images|video|audio|mask|waveforms)$|^(conditioning_frames|image_reference|controls)$"
)
_NOT_MEDIA = re.compile(r"(sample|return|use|render|freeze|attention|padding|prompt|processed|resized)_")
_WORDS = {
    "image": ("image", "images", "input_images", "cond_image"),
    "mask": ("mask_image", "mask", "control_mask", "mask_video"),
    "control_image": ("control_image",),
    "control_video": ("control_video", "conditioning_frames", "controls"),
    "audio": ("audio", "src_audio", "initial_audio_waveforms", "reference_audio"),
}
"""Our words, and the pipelines' words for the same."""
INPUT_NAMES = frozenset({"mask", "last_image", "control_image", "control_video", "video", "audio"})
"""Inputs that have the same name for every pipeline; `image` is a parameter of its own."""
_MOST_OFF = math.log(1.1)
"""How far the shape of a mask may be from that of its image."""
_ARTICLES = {"image": "an image", "images": "images", "video": "a video", "audio": "a sound", "mask": "a mask"}


@dataclass(frozen=True)
class Inputs:
    """The arguments of a pipeline that take images, videos or sounds."""

    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For some, the others that they cannot do without."""
    exactly: Mapping[str, int] = field(default_factory=dict)
    """Those that take as many images as the pipeline has ControlNets, which is more than one."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Those that the pipeline could take, each with the component that it would need."""

    @property
    def takes_image(self) -> bool:
        """Whether there is an argument for `image`."""
        return not {*_WORDS["image"], "control_image"}.isdisjoint(self.takes)

    def argument(self, name: str, class_name: str) -> str:
        """The pipeline's argument for an input; SettingError if it has none."""
        for candidate in (name, *_WORDS.get(name, ())):
            if candidate in self.takes:
                return candidate
        if name == "control_image" and "image" in self.needs:  # The older ControlNets have no other image.
            return "image"
        if name == "image" and "control_image" in self.takes:  # The newer ones neither.
            return "control_image"
        for candidate in (name, *_WORDS.get(name, ())):
            if part := self.lacking.get(candidate):
                raise SettingError(f"{class_name} takes {name} with a {part}, and this one has none.", param=name)
        known = f"It takes {', '.join(self.takes)}." if self.takes else "It starts from text alone."
        raise SettingError(f"{class_name} takes no {name}. {known}", param=name)

    def check(self, given: Mapping[str, Any], class_name: str) -> dict[str, Any]:
        """The inputs by the pipeline's names; SettingError for one that is missing, unknown or of the wrong kind."""
        found: dict[str, Any] = {}
        names: dict[str, str] = {}
        for name, value in given.items():
            argument = self.argument(name, class_name)
            first = names.setdefault(argument, name)
            if first != name:
                message = f"For {class_name}, {first} and {name} are the same input. Give one of them."
                raise SettingError(message, param=name)
            self._check_kind(name, argument, value)
            found[argument] = value
        if self.mask is not None:
            _check_shapes(found.get("image"), found.get(self.mask))
        return found

    @property
    def mask(self) -> str | None:
        """The argument that says which part of an image is redrawn, if an image is nothing without one."""
        is_needed = {"mask_image", "image"} <= set(self.takes) and "mask_image" not in self.beside
        return "mask_image" if is_needed else None

    def missing(self, call: Mapping[str, Any]) -> list[str]:
        """What pipelines start from, as a rule, that this one takes and a call does not have."""
        usual = {name for names in _WORDS.values() for name in names} | {"video"}
        return [name for name in self.takes if name in usual and name not in call]

    def check_missing(self, given: Mapping[str, Any], class_name: str) -> None:
        """Refuse a request without something that the pipeline needs."""
        if (
            self.mask is not None
            and self.mask not in given
            and "image" in given
            and not _is_transparent(given["image"])
        ):
            message = f"{class_name} needs a mask, or an image with an alpha channel: it redraws what is transparent."
            raise SettingError(message, param="image")
        beside = [name for other in given for name in self.beside.get(other, ()) if name in self.takes]
        for name in (*self.needs, *beside):
            if name not in given and name != self.mask:
                word = next((word for word, names in _WORDS.items() if name in names and word not in self.takes), name)
                what = _ARTICLES[_kind(name)] if word in _ARTICLES else f"{_ARTICLES[_kind(name)]} as {word}"
                if name == "control_image" and "image" not in self.takes:
                    what, word = "a control image", "image"
                raise SettingError(f"{class_name} needs {what}. Give it as {word}.", param=word)

    def check_sendable(self, words: Collection[str], class_name: str) -> None:
        """Refuse a pipeline that needs something else than images under these words."""
        reached = {name for word in words for name in (word, *_WORDS.get(word, ())) if name in self.takes}
        for name in self.needs:
            if name not in reached or _kind(name) in ("video", "audio"):
                remedy = f"Use Omni, or samovar generate --input {name}=FILE."
                message = (
                    f"{class_name} needs {name}, which requests to a server cannot send: they hold images. {remedy}"
                )
                raise SettingError(message, param="model")

    def _check_kind(self, name: str, argument: str, value: Any) -> None:
        is_image = hasattr(value, "convert")
        are_images = isinstance(value, (list, tuple)) and bool(value) and all(hasattr(one, "convert") for one in value)
        kind = _kind(argument)
        wanted = self.exactly.get(argument)
        if wanted is not None and (is_image or are_images) and (1 if is_image else len(value)) != wanted:
            count = "one" if is_image else str(len(value))
            message = f"There are {wanted} ControlNets, so {name} must be {wanted} images, in their order, not {count}."
            raise SettingError(message, param=name)
        problem = ""
        if isinstance(value, Audio):
            problem = "" if kind == "audio" else "a sound"
        elif isinstance(value, Video):
            problem = "" if kind == "video" else "a video"
        elif is_image:
            problem = "" if kind not in ("video", "audio") else "an image"
        elif are_images:
            problem = "several images" if kind == "audio" else ""
        elif not hasattr(value, "shape") and not isinstance(value, (list, tuple)):  # Tensors are the caller's business.
            reader = kind if kind in ("video", "audio") else "image"
            problem = f"{value!r}: samovar.media.read_{reader}(file) reads one"
        if problem:
            raise SettingError(f"{name} must be {_ARTICLES[kind]}, not {problem}.", param=name)
        for image in (value,) if is_image else value if are_images else ():
            _load(image, name)

    def blanks(self, width: int, height: int) -> dict[str, Any]:
        """Images for what can be started from and what is needed, all transparent, by the pipeline's names."""
        wanted = [name for name in self.takes if name == "image" or name in self.needs]
        blank = Image.new("RGBA", (width, height))
        images = [
            name for name in wanted if _kind(name) in ("image", "images") or (name in self.needs and name != self.mask)
        ]
        return {name: [blank] * self.exactly[name] if name in self.exactly else blank for name in images}

    def prepare(self, found: Mapping[str, Any], rate: int | None) -> dict[str, Any]:
        """The pipeline's arguments, as it takes them: images in RGB, videos as lists of images, sound as a tensor. The
        transparent part of an image is the mask, if a pipeline needs one and none is given."""
        call = {name: _prepared(name, value, rate) for name, value in found.items()}
        if "initial_audio_waveforms" in call:
            call["initial_audio_sampling_rate"] = rate
        mask, image = self.mask, found.get("image")
        if mask is not None and mask not in found and _is_transparent(image):
            call[mask] = image.getchannel("A").point(lambda alpha: 255 - alpha)  # type: ignore[union-attr]
        for name in self.takes:  # Its only form: several, or one among them.
            if _kind(name) == "images" and name in call and not isinstance(call[name], list):
                call[name] = [call[name]]
        return call


def find_inputs(cls: type) -> Inputs:
    """The inputs of a pipeline class."""
    parameters = call_parameters(cls)
    takes = _media_of(cls)
    needs = tuple(name for name in takes if parameters[name].default is inspect.Parameter.empty)
    if issubclass(cls, ModularCall):
        return Inputs(takes, needs, beside=cls.beside, lacking=cls.lacking)
    return Inputs(takes, needs)


def _media_of(cls: type) -> tuple[str, ...]:
    return tuple(name for name in call_parameters(cls) if _MEDIA.search(name) and not _NOT_MEDIA.search(name))


def is_media(value: Any) -> bool:
    """Whether a value is an image, a video or a sound, or a list of them."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(one, (Audio, Video)) or hasattr(one, "convert")


def _kind(argument: str) -> str:
    found = _MEDIA.search(argument)
    word = (found[1] or found[2]) if found else argument
    if word == "image" and "mask" in argument:
        return "mask"
    others = {"waveforms": "audio", "conditioning_frames": "video", "controls": "video", "image_reference": "image"}
    return others.get(word, word)


def _check_shapes(image: Any, mask: Any) -> None:
    """Refuse a mask of another shape than the image: stretched, it would say something else. Its size may differ."""
    if hasattr(image, "getexif") and hasattr(mask, "getexif"):
        (width, height), (mask_width, mask_height) = upright_size(image), upright_size(mask)
        if abs(math.log(width * mask_height / (height * mask_width))) > _MOST_OFF:
            message = f"The mask is {mask_width}x{mask_height} and the image {width}x{height}, which is another shape."
            raise SettingError(f"{message} Give a mask of the image's size.", param="mask")


def _is_transparent(image: Any) -> bool:
    return hasattr(image, "getbands") and "A" in image.getbands()


def _load(image: Any, name: str) -> None:
    try:
        image.load()  # Does nothing if its pixels are there.
    except (EOFError, OSError, SyntaxError, ValueError) as error:  # Which one depends on the format.
        raise SettingError(f"The {name} cannot be read: {error}. Is the file complete?", param=name) from error


def _prepared(name: str, value: Any, rate: int | None) -> Any:
    if isinstance(value, Video):
        return value.images
    if isinstance(value, Audio):
        return _waveform(name, value, rate)
    if isinstance(value, (list, tuple)) and any(hasattr(each, "convert") or isinstance(each, list) for each in value):
        return [_prepared(name, image, rate) for image in value]
    if not hasattr(value, "convert"):
        return value
    try:
        return upright(value).convert("L" if _kind(name) == "mask" else "RGB")
    except ValueError as error:
        raise SettingError(f"The {name} cannot be converted to RGB: {error}.", param=name) from error


def _waveform(name: str, audio: Audio, rate: int | None) -> Any:
    """(1, channels, samples) at the model's rate, and (channels, samples) for those that add the first one."""
    samples = torch.from_numpy(audio.samples)
    if rate is not None and rate != audio.rate:
        count = round(samples.shape[1] * rate / audio.rate)
        samples = torch.nn.functional.interpolate(samples[None], count, mode="linear", antialias=False)[0]
    return samples if name in ("src_audio", "reference_audio") else samples[None]
