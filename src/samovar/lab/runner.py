"""A loaded pipeline that makes the images of tasks, with a method on it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from ..arch import find_denoisers
from ..arch.calls import call_parameters
from ..arch.modules import main_dtype
from ..arch.skeleton import read_skeleton
from ..core.errors import ModelError, SamovarError, SettingError
from ..core.files import check_names
from ..core.settings import count, read_as
from ..engine import Worker, call_pipeline
from ..engine.calling import failure
from ..engine.models import fetch_model
from ..engine.quantize import Quantization
from ..engine.request import OmniDiffusionSamplingParams, Request
from ..engine.settings import OmniDiffusionConfig
from .methods import Method
from .tasks import Task

ENGINE_SETTINGS = ("offload", "gpu_memory", "host_memory", "exclude", "quantization", "loss", "compile", "task",
                   "trust_remote_code")  # fmt: skip
"""Settings of `Omni` that leave a model's images what they are, or say which images are the exact ones."""


class Made(NamedTuple):
    """What one call of the pipeline has made."""

    images: torch.Tensor
    """(N, 3, height, width), or (N, frames, 3, height, width) of videos, with values from 0 to 1, as float32, not
    rounded."""
    seconds: float
    report: Mapping[str, Any]
    """What the method says of the call."""


Make = Callable[[Sequence[Task]], Made]


class Runner:
    """A pipeline to which nothing is attached that changes its images."""

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
        read_as(count(1), batch, "batch")
        params = params or OmniDiffusionSamplingParams()
        if params.seed is not None or params.num_outputs_per_prompt is not None:
            raise SettingError("The lab gives each image its own seed: leave out seed and num_outputs_per_prompt.")
        check_names(engine, ENGINE_SETTINGS, "a setting of the lab's runner")
        self._engine = engine
        # No cache, not even one that the environment names: a method brings its own.
        settings = {"cache": "none", "defaults": params, "progress": False, "max_batch": 1, **engine}
        self._config = OmniDiffusionConfig(model, dtype=dtype, device=device, **settings)
        offload = self._config.attach_config.offload
        if offload is not None and batch > 1:
            moved = replace(offload, batch=batch)
            self._config = replace(self._config, offload=moved, gpu_memory=None, host_memory=None, exclude=None)
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

    @property
    def steps(self) -> int:
        """Number of steps of an exact image."""
        assert self.params.num_inference_steps is not None
        return self.params.num_inference_steps

    @property
    def fps(self) -> float | None:
        """Frames per second of its videos."""
        return self._facts.fps(self.params)

    def close(self) -> None:
        """Detach everything from the pipeline."""
        self._worker.close()

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

    @contextlib.contextmanager
    def under(self, method: Method) -> Iterator[Make]:
        """A function that makes the images of some tasks in one call, while a method is on the pipeline."""
        with self._quantised(method), method.attached(self.pipeline) as report:
            steps = method.steps or self.steps

            def make(tasks: Sequence[Task]) -> Made:
                started = self._now()
                images = self._call(tasks, steps)
                return Made(images, self._now() - started, report())

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
                yield
            finally:
                self._worker.close()
        finally:
            self._worker = Worker(replace(self._config, task=None), pipeline)

    def _call(self, tasks: Sequence[Task], steps: int) -> torch.Tensor:
        request = self._facts.check(Request("", self.params))
        call = {**(request.arguments or {}), "num_inference_steps": steps, "output_type": "np"}
        try:
            output = call_pipeline(self.pipeline, [task.prompt for task in tasks], [task.seed for task in tasks], call)
        except SamovarError:
            raise
        except ValueError as error:  # A pipeline of diffusers refuses a setting.
            raise failure(error, self._facts, request) from error
        made = [torch.as_tensor(np.asarray(one)) for one in getattr(output, self._facts.output.field)]
        if not made or made[0].ndim not in (3, 4):
            raise ModelError(f"{type(self.pipeline).__name__} makes no images or videos to compare.")
        images = torch.stack(made).movedim(-1, -3).float().contiguous()
        # Within a memory budget there may be no room to compare them beside the model.
        return images if self._config.attach_config.offload is not None else images.to(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
