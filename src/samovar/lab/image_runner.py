"""Which images are made, and how, with a method on the pipeline; how long does that take, and how much is computed?"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module, resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arch import find_anatomy, find_denoisers
from ..arch.calls import call_parameters
from ..arch.modules import main_dtype, unwrapped
from ..arch.skeleton import read_skeleton
from ..core.errors import ModelError, SettingError, nearest
from ..core.files import check_names
from ..core.interop import COMPILED_CALL
from ..engine import Worker, call_pipeline
from ..engine.models import fetch_model
from ..engine.quantize import Quantization
from ..engine.request import OmniDiffusionSamplingParams, Request
from ..engine.settings import OmniDiffusionConfig
from ..hooks.handle import for_now
from .methods import OUTLIERS, Method

SHIPPED = ("testing", "tuning")
"""Lists of captions for the built-in model. No emoji is in both."""
ENGINE_SETTINGS = ("offload", "gpu_memory", "host_memory", "exclude", "quantization", "loss", "compile", "task",
                   "trust_remote_code")  # fmt: skip
"""Settings of `Omni` that leave a model's images what they are, or say which images are the exact ones."""


class Task(NamedTuple):
    """One image to make."""

    prompt: str
    seed: int


def make_tasks(prompts: Sequence[str], num_seeds: int, first_seed: int) -> list[Task]:
    """Every prompt with `num_seeds` seeds. No two images share a seed, so that no noise counts twice."""
    if type(num_seeds) is not int or num_seeds < 1:
        raise SettingError(f"seeds={num_seeds!r}; expected the number of images per prompt, at least 1.", param="seeds")
    repeated = [prompt for prompt in prompts for _ in range(num_seeds)]
    return [Task(prompt, first_seed + number) for number, prompt in enumerate(repeated)]


def check_disjoint(tuning: Sequence[Task], testing: Sequence[Task]) -> None:
    """Refuse to test a setting on prompts that it was tuned on."""
    shared = {task.prompt for task in tuning} & {task.prompt for task in testing}
    if shared:
        raise SettingError(f"The prompt {min(shared)!r} is in both lists, for tuning and for testing. Keep them apart.")


def read_prompts(source: str | Path, count: int | None = None) -> list[str]:
    """The prompts of a file, or of a shipped list by name; only the first `count` if given.

    A file has one prompt per line. Empty lines and lines that begin with `#` are ignored.
    """
    if isinstance(source, str) and source in SHIPPED:
        text = (resources.files(__package__) / "data" / f"{source}.txt").read_text(encoding="utf-8")
    else:
        file = Path(source).expanduser()
        if not file.is_file():
            hint = nearest(str(source), SHIPPED)
            raise SettingError(f"{str(source)!r} is neither a file of prompts nor a shipped list. {hint}")
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SettingError(f"{str(source)!r} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    lines = (line.strip() for line in text.splitlines())
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise SettingError(f"{str(source)!r} contains no prompts. Write one per line.")
    if count is not None and (type(count) is not int or not 1 <= count <= len(prompts)):
        raise SettingError(f"{count!r} prompts were asked for, but {str(source)!r} has {len(prompts)}.")
    return prompts[:count]


class Batch(NamedTuple):
    """The images of one call."""

    images: torch.Tensor
    """(N, 3, height, width), or (N, frames, 3, height, width) of videos, with values from 0 to 1, as float32, not
    rounded."""
    seconds: float
    forwards: float
    """Computed forwards of the denoisers, for an image on average."""
    notes: Any = None
    """The method's notes, as plain JSON values."""


class ImageRunner:
    """A loaded pipeline with nothing attached that changes its images."""

    def __init__(
        self,
        model: str = "emoji",
        params: OmniDiffusionSamplingParams | None = None,
        batch: int = 1,
        dtype: str = "auto",
        device: str | None = None,
        pipeline: Any = None,
        **engine: Any,
    ) -> None:
        """`params` that are not given take the model's defaults. `pipeline` is one that is already loaded. `engine`
        are settings of `Omni` for speed and memory: offload, gpu_memory, quantization, compile ..."""
        if type(batch) is not int or batch < 1:
            raise SettingError(f"batch={batch!r}; expected the number of images per call, at least 1.", param="batch")
        params = params or OmniDiffusionSamplingParams()
        if params.seed is not None or params.num_outputs_per_prompt is not None:
            raise SettingError("The lab gives each image its own seed: leave out seed and num_outputs_per_prompt.")
        check_names(engine, ENGINE_SETTINGS, "a setting of the lab's runner")
        self._engine = engine
        # No cache, not even one that the environment names: a method brings its own.
        settings = {"cache": "none", "defaults": params, "progress": False, "max_batch": 1, **engine}
        self._config = OmniDiffusionConfig(model, dtype=dtype, device=device, **settings)
        self._is_loaded_here = pipeline is None
        self._worker = Worker(self._config, pipeline)
        self.model, self.batch, self.device = model, batch, self._worker.device
        self.pipeline.set_progress_bar_config(disable=True)
        self._facts = self._worker.facts
        if self._facts.output.kind == "audio":
            message = f"{self._facts.class_name} makes {self._facts.output}; the lab compares images and videos."
            raise ModelError(f"{message} Use a model that makes these.")
        self.params = self._facts.completed(Request("", params))
        if self.params.num_inference_steps is None:
            takes = call_parameters(type(self.pipeline))
            default = takes["num_inference_steps"].default if "num_inference_steps" in takes else None
            if not isinstance(default, int):
                raise SettingError(
                    f"{self._facts.class_name} has no default number of steps. Give num_inference_steps.",
                    param="num_inference_steps",
                )
            self.params = replace(self.params, num_inference_steps=default)
        self._facts.check(Request("", self.params))

    @property
    def pipeline(self) -> Any:
        """The pipeline of the method that is on: with quantised weights it is another one."""
        return self._worker.pipeline

    @property
    def denoisers(self) -> dict[str, torch.nn.Module]:
        return find_denoisers(self.pipeline)

    def close(self) -> None:
        """Detach everything from the pipeline."""
        self._worker.close()

    def one_at_a_time(self) -> ImageRunner:
        """The same pipeline with one image per call."""
        single = copy.copy(self)
        single.batch = 1
        return single

    def about(self) -> dict[str, Any]:
        """Everything that figures made here depend on, except the tasks. For JSON."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        packages = ("samovar", "torch", "diffusers", "transformers")
        return {
            "model": self.model,
            "pipeline": type(self.pipeline).__name__,
            "settings": self.params.given(),
            "dtype": str(main_dtype(next(iter(self.denoisers.values())))).removeprefix("torch."),
            "device": device,
            "batch": self.batch,
            **({"engine": {name: str(value) for name, value in self._engine.items()}} if self._engine else {}),
            **{name: str(import_module(name).__version__) for name in packages},
        }

    @property
    def steps(self) -> int:
        """Number of steps of an exact image."""
        assert self.params.num_inference_steps is not None
        return self.params.num_inference_steps

    def batches(self, tasks: Sequence[Task]) -> list[Sequence[Task]]:
        """The tasks of each call."""
        return [tasks[i : i + self.batch] for i in range(0, len(tasks), self.batch)]

    @contextlib.contextmanager
    def under(self, method: Method) -> Iterator[Callable[[Sequence[Task]], Batch]]:
        """A function that makes the images of some tasks in one call, while a method is on the pipeline."""
        with self._quantised(method), self._counted() as count, method.attached(self.pipeline) as notes:

            def make(tasks: Sequence[Task]) -> Batch:
                before, started = count(), self._now()
                images = self._call(tasks, method.steps or self.steps)
                seconds, noted = self._now() - started, notes()
                made = Batch(images, seconds, count() - before, noted)
                kinds = _split_by_kind(made, len(tasks))
                return _join([(places, make([tasks[i] for i in places])) for places in kinds]) if kinds else made

            yield make

    @contextlib.contextmanager
    def _quantised(self, method: Method) -> Iterator[None]:
        """Quantised components in place of the exact ones, which wait on the host."""
        wanted = Quantization.read(method.quantization, self.device)
        if wanted is None:
            yield
            return
        if not self._is_loaded_here or self._config.quantised() is not None:
            what = "A loaded pipeline cannot be quantised" if not self._is_loaded_here else "The model is quantised"
            raise SettingError(f"{what}. Give the model's folder, and one quantization.", param="quantization")
        _, parts = read_skeleton(str(fetch_model(self.model)))
        exact, pipeline = self._worker, self.pipeline
        wanted.applied(parts)  # Refused before anything is moved.
        chosen = wanted.by_component(parts)
        others = {name: part for name, part in pipeline.components.items() if name not in chosen}
        exact.close()
        try:
            for name in chosen:
                getattr(pipeline, name).to("cpu")
            self._worker = Worker(replace(self._config, quantization=method.quantization), components=others)
            try:
                self.warm_up([Task("", 0)] * self.batch)
                yield
            finally:
                self._worker.close()
        finally:
            self._worker = Worker(replace(self._config, task=None), pipeline)

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Make everything load that the first call of this size would wait for."""
        self._call(tasks, min(2, self.steps))

    @property
    def fps(self) -> float | None:
        """Frames per second of its videos."""
        return self._facts.fps(self.params)

    def _call(self, tasks: Sequence[Task], steps: int) -> torch.Tensor:
        is_video = self._facts.output.kind == "video"
        how = {"num_inference_steps": steps, "output_type": "np" if is_video else "pt"}
        call = self._facts.check(Request("", self.params)) | how
        output = call_pipeline(self.pipeline, [task.prompt for task in tasks], [task.seed for task in tasks], call)
        images = getattr(output, self._facts.output.field)
        if is_video and len(images):  # (N, frames, height, width, 3), or a list of videos.
            images = torch.stack([torch.as_tensor(np.asarray(video)) for video in images]).movedim(-1, -3)
        if not isinstance(images, torch.Tensor) or images.ndim != (5 if is_video else 4):
            raise ModelError(
                f"{type(self.pipeline).__name__} makes no {'videos' if is_video else 'images'} to compare."
            )
        # Within a memory budget there may be no room to compare them beside the model.
        return images.detach().float().to("cpu" if self._config.attach_config.offload is not None else images.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[Callable[[], int]]:
        """Counts computed forwards by a layer that no cache runs on a skipped step."""
        count = 0

        def add(module: torch.nn.Module, args: Any) -> None:
            nonlocal count
            count += 1

        with contextlib.ExitStack() as undo:
            for model in self.denoisers.values():
                undo.enter_context(_counting(model, add))
            yield lambda: count


def _split_by_kind(made: Batch, count: int) -> list[list[int]]:
    """The places of ordinary images and of outliers, if a batch has both. Such a batch is treated as an outlier; made
    again by kind, each image is what it would be alone, and no more is computed for it."""
    outliers = made.notes.get(OUTLIERS, []) if isinstance(made.notes, dict) else []
    kinds = [[i for i, is_outlier in enumerate(outliers) if is_outlier is kind] for kind in (False, True)]
    return kinds if len(outliers) == count and all(kinds) else []


def _join(parts: Sequence[tuple[list[int], Batch]]) -> Batch:
    """One batch from the images at some places each, in order."""
    places = torch.tensor([place for places, _ in parts for place in places])
    images = torch.cat([made.images for _, made in parts])[places.argsort()]
    forwards = sum(len(places) * made.forwards for places, made in parts) / len(places)
    return Batch(images, sum(made.seconds for _, made in parts), forwards, parts[0][1].notes)


@contextlib.contextmanager
def _counting(denoiser: torch.nn.Module, add: Callable[[torch.nn.Module, Any], None]) -> Iterator[None]:
    """Call `add` once per computed forward: when the last layer of the second block runs, as some caches always run the
    first. The block itself may be called on a skipped step too, and return at once; a compiled one is not, and hides
    its layers."""
    bare = unwrapped(denoiser)
    stacks = [stack for stack in find_anatomy(bare).stacks if len(stack) > 1]
    block = unwrapped(stacks[0].modules(bare)[1] if stacks else torch.nn.Identity())
    layers = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
    if not layers:
        raise ModelError(f"{type(bare).__name__} has no blocks with linear layers to count computed steps by.")
    compiled = vars(block).get(COMPILED_CALL)
    if compiled is None:
        with layers[-1].register_forward_pre_hook(add):
            yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        add(block, args)
        return compiled(*args, **kwargs)

    with for_now(block, **{COMPILED_CALL: call}):
        yield
