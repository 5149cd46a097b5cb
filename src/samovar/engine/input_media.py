"""Which images, videos and sounds does a pipeline take, and how are they given to it? Read from its call.

An argument that has no default is needed. So is one that may be None by its signature, and that no code of the pipeline
compares with None: it would fail, minutes later, with a message about types.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import SettingError
from ..media import Audio, Video, upright

_MEDIA = re.compile(r"(?:^|_)(image|images|video|audio|mask|waveforms)$|^(conditioning_frames|image_reference)$")
_NOT_MEDIA = re.compile(r"(sample|return|use|render|freeze|attention|padding|prompt|processed|resized)_")
_WORDS = {
    "image": ("image", "images", "input_images", "cond_image"),
    "mask": ("mask_image", "mask", "control_mask", "mask_video"),
    "control_image": ("control_image",),
    "control_video": ("control_video", "conditioning_frames"),
    "audio": ("audio", "src_audio", "initial_audio_waveforms", "reference_audio"),
}
"""Our words, and the pipelines' words for the same."""
INPUT_NAMES = frozenset({"mask", "last_image", "control_image", "control_video", "video", "audio"})
"""Inputs that have the same name for every pipeline; `image` is a parameter of its own."""
_ARTICLES = {"image": "an image", "images": "images", "video": "a video", "audio": "a sound", "mask": "a mask"}


@dataclass(frozen=True)
class Inputs:
    """The arguments of a pipeline that take images, videos or sounds."""

    takes: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    several: tuple[str, ...] = ()
    """Those that take a list of images for one output."""
    beside: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For some, the others that they cannot do without."""
    exactly: Mapping[str, int] = field(default_factory=dict)
    """Those that take as many images as the pipeline has ControlNets, which is more than one."""
    lacking: Mapping[str, str] = field(default_factory=dict)
    """Those that the pipeline could take, each with the component that it would need."""

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
        for name, value in given.items():
            argument = self.argument(name, class_name)
            if argument in found:
                raise SettingError(f"{name} is given twice, also as {argument}. Give it once.", param=name)
            self._check_kind(name, argument, value)
            found[argument] = value
        return found

    @property
    def mask(self) -> str | None:
        """The argument that says which part of an image is redrawn, if an image is nothing without one."""
        is_needed = {"mask_image", "image"} <= set(self.takes) and "mask_image" not in self.beside
        return "mask_image" if is_needed else None

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
            problem = "several images" if kind == "audio" or not self._takes_several(argument) else ""
        elif not hasattr(value, "shape") and not isinstance(value, (list, tuple)):  # Tensors are the caller's business.
            reader = kind if kind in ("video", "audio") else "image"
            problem = f"{value!r}: samovar.media.read_{reader}(file) reads one"
        if problem:
            raise SettingError(f"{name} must be {_ARTICLES[kind]}, not {problem}.", param=name)
        for image in (value,) if is_image else value if are_images else ():
            _load(image, name)

    def _takes_several(self, argument: str) -> bool:
        return argument in self.several or argument in self.exactly or _kind(argument) in ("video", "images")

    def blanks(self, width: int, height: int) -> dict[str, Any]:
        """Images for what can be started from and what is needed, all transparent, by the pipeline's names."""
        from PIL import Image

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
    from ..arch.calls import call_parameters
    from ..arch.modular import ModularCall

    parameters = call_parameters(cls)
    takes = _media_of(cls)
    code = _Code.of(cls)
    needs = [
        name
        for name in takes
        if parameters[name].default is inspect.Parameter.empty
        or (parameters[name].default is None and code is not None and not code.does_without(name))
    ]
    several = [name for name in takes if code is not None and name in code.lists]
    if issubclass(cls, ModularCall):  # Its code is that of its blocks, which say so.
        several = [name for name in takes if name in cls.lists]
        return Inputs(tuple(takes), tuple(needs), tuple(several), beside=cls.beside, lacking=cls.lacking)
    return Inputs(tuple(takes), tuple(needs), tuple(several))


def _media_of(cls: type) -> list[str]:
    from ..arch.calls import call_parameters

    return [name for name in call_parameters(cls) if _MEDIA.search(name) and not _NOT_MEDIA.search(name)]


def is_media(value: Any) -> bool:
    """Whether a value is an image, a video or a sound, or a list of them."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(one, (Audio, Video)) or hasattr(one, "convert")


def _kind(argument: str) -> str:
    found = _MEDIA.search(argument)
    word = (found[1] or found[2]) if found else argument
    if word == "image" and "mask" in argument:
        return "mask"
    return {"waveforms": "audio", "conditioning_frames": "video", "image_reference": "image"}.get(word, word)


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
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "convert"):
        return [_prepared(name, image, rate) for image in value]
    if not hasattr(value, "convert"):
        return value
    try:
        return upright(value).convert("L" if _kind(name) == "mask" else "RGB")
    except ValueError as error:
        raise SettingError(f"The {name} cannot be converted to RGB: {error}.", param=name) from error


def _waveform(name: str, audio: Audio, rate: int | None) -> Any:
    """(1, channels, samples) at the model's rate, and (channels, samples) for those that add the first one."""
    import torch

    samples = torch.from_numpy(audio.samples)
    if rate is not None and rate != audio.rate:
        count = round(samples.shape[1] * rate / audio.rate)
        samples = torch.nn.functional.interpolate(samples[None], count, mode="linear", antialias=False)[0]
    return samples if name in ("src_audio", "reference_audio") else samples[None]


class _Code:
    """What the code of a pipeline does with the arguments of its call."""

    def __init__(
        self, call: ast.AST, methods: Mapping[str, tuple[ast.AST, Collection[str]]], inputs: Collection[str]
    ) -> None:
        self._tested = set(_compared_with_none(call))
        refusals: set[str] = set()
        for method, (tree, own) in methods.items():
            found = set(_compared_with_none(tree)) & set(own)
            if method == "check_inputs":  # It may refuse two inputs together, and say nothing of none.
                refusals = found
            else:
                self._tested |= found
        self._tested |= refusals - set(_always_used(call))
        self._made = set(_made_from_others(call, inputs))
        self._handled = set(_used_beyond_passing(call))
        self.lists = set(_asked_for_a_list(call))

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, pipeline: type) -> _Code | None:
        """None if there is no source."""
        try:
            call = _parsed(pipeline.__call__)
            methods = {
                name: (_parsed(function), list(inspect.signature(function).parameters))
                for name, function in inspect.getmembers(pipeline, inspect.isfunction)
                if name != "__call__" and function.__module__ == pipeline.__call__.__module__
            }
        except (OSError, TypeError, SyntaxError):
            return None
        return cls(call, methods, _media_of(pipeline))

    def does_without(self, name: str) -> bool:
        """Whether the code has a way for this argument to be None, or leaves it to another pipeline."""
        return name in self._tested or name in self._made or name not in self._handled


def _parsed(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))


def _compared_with_none(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        tests: list[ast.expr] = []
        if isinstance(node, ast.Compare) and any(isinstance(sign, (ast.Is, ast.IsNot)) for sign in node.ops):
            tests = [node.left]
        elif isinstance(node, (ast.If, ast.IfExp)):
            tests = [node.test]
        elif isinstance(node, ast.BoolOp):
            tests = node.values
        elif isinstance(node, ast.UnaryOp):
            tests = [node.operand]
        yield from (test.id for test in tests if isinstance(test, ast.Name))


def _made_from_others(tree: ast.AST, inputs: Collection[str]) -> Iterator[str]:
    """Inputs that are made from another one, such as a video from an image."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            used = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
            names = {each.id for each in node.targets if isinstance(each, ast.Name)}
            yield from (name for name in names - used if used & set(inputs))


def _used_beyond_passing(tree: ast.AST) -> Iterator[str]:
    """Names that are used otherwise than as an argument of the same name."""
    passed = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Name) and node.arg == node.value.id
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in passed:
            yield node.id


def _always_used(tree: ast.AST) -> Iterator[str]:
    """Names that are used whatever else is given, unless latents are."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If):
            if "latents" in ast.dump(node.test):
                yield from (name for statement in node.body for name in _always_used(statement))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check_inputs":
            continue
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif not isinstance(node, ast.IfExp):
            yield from _always_used(node)


def _asked_for_a_list(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
            value, kinds = node.args
            if isinstance(value, ast.Name) and any(isinstance(n, ast.Name) and n.id == "list" for n in ast.walk(kinds)):
                yield value.id
