"""A run of a pipeline without weights: how it calls its components, and how much memory each call takes.

A twin of the pipeline runs two steps in `MetaMode`: it shares no module, scheduler or tokenizer with the pipeline, so
nothing of it is touched, and no device is used. What the pipeline gives its components at a size is thus known before
anything is loaded, and so is the memory that they need beside their weights.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..arch.calls import call_parameters
from ..arch.components import is_denoiser_itself
from ..arch.modular import called_as
from ..arch.modules import unwrapped
from ..arch.skeleton import loaded_parts
from ..core import nested
from ..core.errors import SettingError
from .meta_mode import MetaCopier, MetaMode, with_few_values
from .twin import Forward, TrialFailed, trial

_PROMPT, _LONG_PROMPT = "tea", "tea " * 600
"""The long one is longer than most models read: they cut it off at their most, which takes the most memory."""
_STEPS = 2
"""Schedulers that look back, and pipelines whose denoisers follow one another, need a second step."""
_MAX_SECONDS = 30.0
BATCHES = ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt")
_IMAGES = ("image", "init_image", "control_image", "mask_image", "control_mask", "last_image")
_ROUNDED = 64
"""A pipeline that rounds a size changes it by less; one that makes larger videos of smaller ones, by more."""
_SIDE = 512
"""Pixels of an image that is given where the size is not."""
_DEVICES = ("device", "_execution_device")


@dataclass(frozen=True)
class CallForm:
    """The arguments of a call. Large tensors are on the meta device. Small ones are on the CPU with the values of the
    run, because a forward may depend on them: run it inside `MetaMode`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class RequestSize:
    """What is asked of a pipeline; None means its default."""

    height: int | None = None
    width: int | None = None
    frames: int | None = None
    batch: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and (type(value) is not int or value < 1):
                raise SettingError(f"{name}={value!r}; expected a whole number of at least 1.", param=name)

    def __str__(self) -> str:
        pixels = f"{self.width or 'default width'} x {self.height or 'default height'} pixels"
        parts = [pixels if self.height or self.width else "the default size"]
        parts += [f"{self.frames} frames"] if self.frames else []
        parts += [f"a batch of {self.batch}"] if (self.batch or 1) > 1 else []
        return ", ".join(parts)


@dataclass(frozen=True)
class DryRun:
    """What was seen, by the names of components."""

    calls: Mapping[str, CallForm] = field(default_factory=dict)
    """The first call of each component that was called as a module; VAEs are called otherwise."""
    peaks: Mapping[str, int] = field(default_factory=dict)
    """Bytes that were needed beside the weights while a component ran."""
    size: RequestSize | None = None
    """What was made."""
    problem: str | None = None
    """Why it ended early, if it did. Components that are in `peaks` were run to their end."""


def dry_run(pipeline: Any, size: RequestSize | None = None, **settings: Any) -> DryRun:
    """Run a pipeline, loaded or on the meta device, without weights. SettingError for a size that it does not take.

    `settings`: other arguments of its call.
    """
    size = size or RequestSize()
    if is_denoiser_itself(pipeline) or not callable(pipeline):
        return DryRun(problem=f"{type(pipeline).__name__} is not a pipeline that can be called")
    found, deadline = DryRun(problem="it was not tried"), time.monotonic() + _MAX_SECONDS
    for arguments in _choices(pipeline, size):
        tried = _Run(pipeline, deadline).run(arguments | settings)
        if tried.problem is None:
            _check_made(type(pipeline).__name__, size, tried.size or size)
            return tried
        found = max(tried, found, key=lambda one: (len(one.peaks), len(one.calls)))
    if size != RequestSize() and not found.peaks and dry_run(pipeline, **settings).peaks:
        raise SettingError(f"{type(pipeline).__name__} does not take {size}: {found.problem}", param="height")
    return found


def _check_made(pipeline: str, asked: RequestSize, made: RequestSize) -> None:
    """Refuse a size that a pipeline rounds: nobody would notice."""
    for name, wanted in vars(asked).items():
        got = getattr(made, name)
        if None not in (wanted, got) and 0 < abs(wanted - got) < _ROUNDED and name != "batch":
            raise SettingError(f"{pipeline} makes {name}={got} of {name}={wanted}. Ask for {got}.", param=name)


def _choices(pipeline: Any, size: RequestSize) -> Iterator[dict[str, Any]]:
    """The calls to try: with all the images that the pipeline can be given and the longest prompt, then with less."""
    from PIL import Image

    takes = call_parameters(called_as(pipeline))
    asked, copies = _asked(type(pipeline).__name__, takes, size), None
    if size.batch is not None and asked.keys().isdisjoint(BATCHES):
        copies = size.batch
    images = tuple(name for name in takes if name in _IMAGES)
    needed = tuple(name for name in images if takes[name].default is inspect.Parameter.empty)
    blank = Image.new("RGB", (size.width or size.height or _SIDE, size.height or size.width or _SIDE))
    for prompt, chosen in itertools.product((_LONG_PROMPT, _PROMPT), dict.fromkeys((images, images[:1], needed))):
        fixed = {"num_inference_steps": _STEPS, "output_type": "pt", "return_dict": False}
        given = fixed | {"prompt": prompt if copies is None else [prompt] * copies} | dict.fromkeys(chosen, blank)
        yield {name: value for name, value in given.items() if name in takes} | asked


def _asked(pipeline: str, takes: Mapping[str, Any], size: RequestSize) -> dict[str, int]:
    """The size in the words of the pipeline. Where there is none for a batch, there are as many prompts."""
    words = {"frames": "num_frames", "batch": next((name for name in BATCHES if name in takes), None)}
    found: dict[str, int] = {}
    for name, value in vars(size).items():
        word = words.get(name, name)
        if value is not None and word is not None:
            if word not in takes:
                message = f"{name}={value} means nothing to {pipeline}, which takes no {word}. Leave it out."
                raise SettingError(message, param=name)
            found[word] = value
    return found


class _Run:
    """One run of a pipeline's twin."""

    def __init__(self, pipeline: Any, deadline: float) -> None:
        parts = loaded_parts(pipeline).items()
        self._components = {name: unwrapped(part.module) for name, part in parts if part.module is not None}
        self._pipeline, self._deadline = pipeline, deadline
        self._mode = MetaMode()
        self._calls: dict[str, CallForm] = {}
        self._returned: dict[Any, Any] = {}
        """The form of what a call returned, by the call's."""
        self._inside: list[str] = []
        """The component whose modules are being called, once for each."""

    def run(self, arguments: Mapping[str, Any]) -> DryRun:
        problem, output = None, None
        try:
            with trial(()), quiet(), torch.compiler.set_stance("force_eager"):
                twin = self._twin()
                with self._mode:
                    output = type(twin).__call__(twin, **arguments)
        except TrialFailed as failed:
            problem = str(failed).splitlines()[0]
        failed_in = self._inside if problem else ()
        peaks = {name: peak for name, peak in self._mode.peaks.items() if name and name not in failed_in}
        return DryRun(self._calls, peaks, _size_of(output), problem)

    def _twin(self) -> Any:
        """The pipeline with components without weights, for which the CPU is the device that it runs on."""
        copier = MetaCopier({module: partial(self._call, name) for name, module in self._components.items()})
        for name, module in self._components.items():
            for part in copier.copy(module).modules():
                part.register_forward_pre_hook(partial(self._enter, name))
                part.register_forward_hook(self._leave)
        if isinstance(self._pipeline, torch.nn.Module):
            return copier.copy(self._pipeline)
        parts = {name: value for name, value in vars(self._pipeline).items() if not name.startswith("_samovar_")}
        for value in parts.values():
            if isinstance(value, torch.nn.Module):
                copier.copy(value)
        cls = called_as(self._pipeline)
        body = {name: property(lambda _: torch.device("cpu")) for name in _DEVICES if hasattr(cls, name)}
        twin = object.__new__(type(cls)(cls.__name__, (cls,), {"__module__": cls.__module__, **body}))
        vars(twin).update({name: copier.translated(value) for name, value in parts.items()})
        if hasattr(twin, "set_progress_bar_config"):
            twin.set_progress_bar_config(disable=True)
        return twin

    def _call(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        """Called in place of a component: notes the call, and answers one that was seen with what it returned."""
        with self._mode.paused():
            form = nested.map_tensors(with_few_values, (args, kwargs))
        self._calls.setdefault(name, CallForm(*form))
        key = name, nested.signature(form)
        if key in self._returned:
            return nested.map_tensors(torch.empty_like, self._returned[key])
        output = forward(*args, **kwargs)
        with self._mode.paused():
            self._returned[key] = nested.without_data(output)
        return output

    def _enter(self, name: str, module: torch.nn.Module, args: Any) -> None:
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"the run without weights took more than {_MAX_SECONDS:.0f} s")
        self._inside.append(name)
        self._mode.runs(name)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._inside.pop()


def _size_of(output: Any) -> RequestSize | None:
    """The size of images (batch, channels, height, width) or videos (batch, frames, channels, height, width)."""
    shape = next((tensor.shape for tensor in nested.tensors(output)), torch.Size())
    if len(shape) not in (4, 5):
        return None
    return RequestSize(shape[-2], shape[-1], shape[1] if len(shape) == 5 else None, shape[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, nobody hears of prompts that are too long."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
