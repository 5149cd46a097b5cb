"""How are many pictures made under one setting, how long does that take, and how much of it is computed?"""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NamedTuple

import torch

from ..arch import find_anatomy, find_denoisers
from ..arch.modules import unwrapped
from ..engine.models import fetch_model, load_pipeline
from ..engine.request import OmniDiffusionSamplingParams, read_defaults
from ..engine.settings import OmniDiffusionConfig
from ..errors import ModelError, SettingError, nearest
from .methods import OUTLIERS, Method


class Task(NamedTuple):
    """One picture to be made."""

    prompt: str
    seed: int


def tasks_of(prompts: Sequence[str], num_seeds: int, first_seed: int) -> list[Task]:
    """Every prompt with so many seeds. No two pictures share one, so that no noise counts twice."""
    if type(num_seeds) is not int or num_seeds < 1:
        raise SettingError(f"{num_seeds!r} seeds for each prompt; a whole number from 1 upwards was expected.")
    pairs = [prompt for prompt in prompts for _ in range(num_seeds)]
    return [Task(prompt, first_seed + number) for number, prompt in enumerate(pairs)]


def keep_apart(tuning: Sequence[Task], testing: Sequence[Task]) -> None:
    """Refuse prompts that would judge what was chosen by them."""
    shared = {task.prompt for task in tuning} & {task.prompt for task in testing}
    if shared:
        raise SettingError(f"{min(shared)!r} is among the prompts for tuning and for testing. Keep them apart.")


class Made(NamedTuple):
    """What came of some tasks."""

    pictures: torch.Tensor
    """(N, 3, height, width) with values from 0 to 1, as float32, not rounded."""
    seconds: float
    forwards: float
    """Forwards of the denoisers that were computed, each of all pictures."""
    notes: Any = None
    """What the method says of it, as plain JSON values."""


@dataclass(frozen=True)
class StudioConfig:
    """Which model makes the pictures, and how."""

    model: str = "emoji"
    dtype: str = "auto"
    device: str | None = None
    params: OmniDiffusionSamplingParams = field(default_factory=OmniDiffusionSamplingParams)
    """What is not given is the model's own default."""
    batch: int = 1
    """So many pictures are made in one call."""

    def __post_init__(self) -> None:
        if type(self.batch) is not int or self.batch < 1:
            raise SettingError(f"batch={self.batch!r}; a whole number of pictures from 1 upwards was expected.")
        for name in ("seed", "num_outputs_per_prompt"):
            if getattr(self.params, name) is not None:
                raise SettingError(f"{name} is not a setting of the lab, which gives every picture a seed of its own.")
        self.engine()

    def engine(self) -> OmniDiffusionConfig:
        """The same for the engine, which checks it."""
        return OmniDiffusionConfig(self.model, dtype=self.dtype, device=self.device, cache="none")


class Studio:
    """A loaded pipeline, with nothing on it."""

    def __init__(self, config: StudioConfig, pipeline: Any = None) -> None:
        """`pipeline` is one that is loaded already, for those who have it."""
        self.config = config
        self.device = config.engine().execution_device()
        self.params = config.params
        if pipeline is None:
            folder = fetch_model(config.model)
            self.params = self.params.over(read_defaults(folder))
            pipeline = load_pipeline(folder, self._dtype()).to(self.device)
        self.pipeline: Any = pipeline
        self.pipeline.set_progress_bar_config(disable=True)
        self.denoisers: dict[str, torch.nn.Module] = find_denoisers(pipeline)
        takes = inspect.signature(self.pipeline.__call__).parameters
        for name in self.params.given():
            if name not in takes:
                raise SettingError(f"{type(pipeline).__name__} takes no {name}. {nearest(name, takes)}")
        if self.params.num_inference_steps is None:
            default = takes["num_inference_steps"].default if "num_inference_steps" in takes else None
            if not isinstance(default, int):
                raise SettingError(f"{type(pipeline).__name__} has no usual number of steps. Give one: steps.")
            self.params = replace(self.params, num_inference_steps=default)

    def _dtype(self) -> torch.dtype:
        name = self.config.dtype
        if name == "auto":
            name = "float32" if self.device.type == "cpu" else "bfloat16"
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def about(self) -> dict[str, Any]:
        """What figures that are made here depend on, but for the tasks. For JSON."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        names = ("samovar", "torch", "diffusers", "transformers")
        packages = {name: str(import_module(name).__version__) for name in names}
        return {
            "model": self.config.model,
            "pipeline": type(self.pipeline).__name__,
            "settings": self.params.given(),
            "dtype": str(next(next(iter(self.denoisers.values())).parameters()).dtype).removeprefix("torch."),
            "device": device,
            "batch": self.config.batch,
            **packages,
        }

    @property
    def steps(self) -> int:
        """Of an exact picture."""
        assert self.params.num_inference_steps is not None
        return self.params.num_inference_steps

    def batches(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """The tasks as calls of the pipeline."""
        return [tasks[i : i + self.config.batch] for i in range(0, len(tasks), self.config.batch)]

    @contextlib.contextmanager
    def under(self, method: Method) -> Iterator[Callable[[Sequence[Task]], Made]]:
        """Makes the pictures of some tasks in one call, with a method that is on the pipeline meanwhile."""
        with self._counted() as count, method.attached(self.pipeline) as notes:

            def make(tasks: Sequence[Task]) -> Made:
                before, started = count(), self._now()
                pictures = self._call(tasks, method.steps or self.steps)
                made = Made(pictures, self._now() - started, count() - before, notes())
                kinds = _kinds(made, len(tasks))
                return _joined([(own, make([tasks[number] for number in own])) for own in kinds]) if kinds else made

            yield make

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Let everything be loaded and chosen that the first call of this size would wait for."""
        self._call(tasks, min(2, self.steps))

    def _call(self, tasks: Sequence[Task], steps: int) -> torch.Tensor:
        call = {**self.params.given(), "num_inference_steps": steps}
        negative = call.pop("negative_prompt", None)
        if negative is not None:
            call["negative_prompt"] = [negative] * len(tasks)
        generators = [torch.Generator("cpu").manual_seed(task.seed) for task in tasks]
        prompts = [task.prompt for task in tasks]
        try:
            result = self.pipeline(prompt=prompts, generator=generators, output_type="pt", **call)
        except SettingError:
            raise
        except ValueError as error:  # How pipelines of diffusers refuse a setting.
            raise SettingError(f"{type(self.pipeline).__name__} refuses these settings: {error}") from error
        pictures = getattr(result, "images", None)
        if not isinstance(pictures, torch.Tensor) or pictures.ndim != 4:
            raise ModelError(f"{type(self.pipeline).__name__} makes no pictures, so there is nothing to compare.")
        return pictures.detach().float()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[], int]]:
        """Counts computed forwards, by what is innermost in a block that no cache runs on a skipped step."""
        count = 0

        def add(module: torch.nn.Module, args: Any) -> None:
            nonlocal count
            count += 1

        handles = [_witness(model).register_forward_pre_hook(add) for model in self.denoisers.values()]
        try:
            yield lambda: count
        finally:
            for handle in handles:
                handle.remove()


def _kinds(made: Made, count: int) -> list[list[int]]:
    """The places of easy and of hard pictures, where there are both: a batch of both is taken for hard. Made again by
    kind, each picture is what it would be alone, and no more is computed for it."""
    hard = made.notes.get(OUTLIERS, []) if isinstance(made.notes, dict) else []
    kinds = [[number for number in range(len(hard)) if hard[number] is kind] for kind in (False, True)]
    return kinds if len(hard) == count and all(kinds) else []


def _joined(parts: Sequence[tuple[list[int], Made]]) -> Made:
    """What came of parts of some tasks, in their order."""
    places = torch.tensor([number for own, _ in parts for number in own])
    pictures = torch.cat([made.pictures for _, made in parts])[places.argsort()]
    forwards = sum(len(own) * made.forwards for own, made in parts) / len(places)
    return Made(pictures, sum(made.seconds for _, made in parts), forwards, parts[0][1].notes)


def _witness(denoiser: torch.nn.Module) -> torch.nn.Module:
    """A layer that runs once in a computed forward: the last of the second block, as some caches always run the
    first. The block itself may be called on a skipped step too, and return at once."""
    bare = unwrapped(denoiser)
    stacks = [stack for stack in find_anatomy(bare).stacks if len(stack) > 1]
    if not stacks:
        raise ModelError(f"{type(bare).__name__} has no stack of blocks, so its computed steps cannot be counted.")
    block = bare.get_submodule(stacks[0].path)[1]  # type: ignore[index]
    layers = [module for module in unwrapped(block).modules() if isinstance(module, torch.nn.Linear)]
    if not layers:
        raise ModelError(f"The blocks of {type(bare).__name__} have no linear layer to count by.")
    return layers[-1]
