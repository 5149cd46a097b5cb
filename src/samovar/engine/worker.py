"""A loaded pipeline that serves requests: it calls the pipeline, and names what went wrong."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..arch import find_denoisers
from ..arch.modular import adapt, is_modular
from ..arch.modules import unwrapped
from ..builtin import BUILTIN_MODELS, MAX_SIDE
from ..cache import AutoConfig, TunedFor
from ..compose import AttachConfig, Attached, Explanation, tiled_if_needed
from ..compose.explain import Feature
from ..core.errors import (
    CancelledRequestError,
    EngineError,
    NanLatentsError,
    OutOfMemoryError,
    SamovarError,
    SettingError,
)
from ..core.settings import parse_bytes
from ..hooks import hook_pipeline, pipeline_hooks, running
from .calling import call_pipeline
from .controlnet import controlnet_bytes, read_controlnets
from .facts import facts_of
from .failures import described, failure, is_out_of_memory
from .lora import Adapters
from .meeting import Meeting
from .models import fetch_model, find_loader, load_pipeline, resolve_dtype
from .notes import notes_on, notes_on_model
from .outputs import output_fields, take_outputs
from .planning import choose_quantization
from .quantize import Quantization
from .request import SILENT, GenerationResult, Listener, OmniDiffusionSamplingParams, Request, saved_defaults
from .settings import OmniDiffusionConfig
from .steps import StepWatch, follow_steps

Outcome = GenerationResult | SamovarError
T = TypeVar("T")
RUNS_PER_PLACE = 2
"""Requests that are begun for each that is computed at a time: a short one need not wait for the end of long ones."""

RAISED_BY_ALL_RANKS = (CancelledRequestError, NanLatentsError, SettingError)
"""All ranks raise these at the same place. After other errors, the other ranks may wait for the one that failed."""


class Made(NamedTuple):
    """What one call of the pipeline has made."""

    outputs: Sequence[Any]
    stats: Any
    """The cache's, if there is one."""
    notes: Sequence[str]


class Usage(NamedTuple):
    """The resources of one worker process."""

    memory_bytes: int
    """GPU memory, or host memory without a GPU."""
    bytes_moved: int
    """Weights copied to the device so far."""
    alone: str = ""
    """Why requests are served one at a time, if they are."""


def _check_not_for_loading(config: OmniDiffusionConfig, pipeline: Any) -> None:
    """Refuse settings that come too late for a pipeline that is loaded."""
    name = type(pipeline).__name__
    if config.task is not None:
        raise SettingError(f"This {name} is loaded, so its task is decided. Leave out task.", param="task")
    if config.controlnet is not None:
        raise SettingError(f"This {name} is loaded. Load it with its ControlNet.", param="controlnet")
    if config.quantised() is not None or config.loss not in (None, "exact"):
        raise SettingError(
            f"Weights are quantised while they are loaded, and this {name} is loaded. Give the model's name or folder, "
            "or load it with a quantization_config of diffusers and leave out quantization and loss.",
            param="quantization" if config.loss is None else "loss",
        )


def _folder_of(config: OmniDiffusionConfig) -> Path:
    """Where the model is. A cache that was tuned for another is refused now, before weights are loaded."""
    folder = fetch_model(config.model, trust_remote_code=config.trust_remote_code)
    tuned = TunedFor.read(config.cache)
    if tuned is not None:
        tuned.check_folder(folder)
    return folder


class Worker:
    """A pipeline with features attached. Requests meet at its denoiser, or are served one at a time."""

    def __init__(
        self, config: OmniDiffusionConfig, pipeline: Any = None, components: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model, but for `components` that are loaded already, or take a pipeline that is."""
        self._tuned = saved_defaults(config.cache)
        self._restore: Callable[[], None] = lambda: None
        self.device = config.execution_device()
        defaults, self._why_quantised = config.sampling_defaults(None), ""
        started = time.perf_counter()
        is_builtin = pipeline is None and config.model in BUILTIN_MODELS
        if pipeline is None:
            folder = _folder_of(config)
            defaults = config.sampling_defaults(folder)
            which = {"task": config.task, "controlnets": read_controlnets(config.controlnet)}
            loader = find_loader(folder, trust_remote_code=config.trust_remote_code, **which)  # type: ignore[arg-type]
            if loader.__name__ != "DiffusionPipeline":  # Otherwise the class comes with the model.
                output_fields(loader)
            started = time.perf_counter()  # Imports do not count as loading.
            dtype = resolve_dtype(config.dtype, self.device)
            quantised, self._why_quantised = self._quantization(config, folder, dtype, defaults)
            how = {"trust_remote_code": config.trust_remote_code, "quantization": quantised, **which}
            pipeline = load_pipeline(folder, dtype, components=components, **how)  # type: ignore[arg-type]
            # A bar is shown on a terminal (None), not in a file.
            is_shown = config.progress and os.environ.get("RANK", "0") == "0"
            pipeline.set_progress_bar_config(disable=None if is_shown else True, leave=False, desc="denoising")
        else:
            _check_not_for_loading(config, pipeline)
            self._restore = adapt(pipeline)
            if config.device is None:
                self.device = pipeline.device  # Where its owner put it.
        self.pipeline = pipeline
        try:
            self._attach(config, defaults, is_builtin)
        except BaseException:
            self._restore()
            raise
        self.load_seconds = time.perf_counter() - started

    def _attach(self, config: OmniDiffusionConfig, defaults: OmniDiffusionSamplingParams, is_builtin: bool) -> None:
        """Attach the features to the pipeline, and know what it takes and makes."""
        pipeline = self.pipeline
        self.facts = facts_of(pipeline, defaults)
        if is_builtin:
            self.facts = replace(self.facts, max_side=MAX_SIDE)
        self._adapters = Adapters(pipeline, config.lora, config.lora_bytes) if config.lora else None
        offload = config.attach_config.offload
        if offload is None:  # Offloaded weights never pass through the device as a whole.
            pipeline.to(self.device)
        for name in offload.exclude if offload is not None else ():
            part = getattr(pipeline, name, None)  # A name that is none is refused below.
            if isinstance(part, torch.nn.Module):
                part.to(self.device)
        if self._adapters is not None:
            self.facts = replace(self.facts, adapters=dict(self._adapters.bytes), lora_bytes=config.lora_bytes)
        cache = config.attach_config.cache
        is_auto = cache is not None and isinstance(cache.settings, AutoConfig)
        self.facts = replace(self.facts, has_tolerance=is_auto, scheduled_steps=config.scheduled_steps)
        self._alone = self._why_alone(config)
        self.max_batch = 1 if self._alone else config.max_batch
        frames = defaults.num_frames
        size = {"height": defaults.height, "width": defaults.width, "frames": frames, "batch": self.max_batch}
        try:
            features = config.attach_config
            if not self._alone and features.offload is not None:  # Those who meet are at different times.
                features = replace(features, offload=replace(features.offload, precompute=False))
            features = tiled_if_needed(pipeline, features.for_requests(**size))
            self._attached = Attached(pipeline, self._with_room(features))
        except BaseException:
            self._unload_adapters()
            raise
        self._open_meeting()
        self.facts = replace(self.facts, explanation=self.explain())

    def _why_alone(self, config: OmniDiffusionConfig) -> str:
        """Why requests are served one at a time, if they must be."""
        pipeline, cache, offload = self.pipeline, config.attach_config.cache, config.attach_config.offload
        inner = [name for name, value in vars(pipeline).items() if hasattr(value, "components")]
        most = self.facts.lora_bytes
        reasons = {
            "max_batch is 1": config.max_batch == 1,
            "several ranks compute one image": config.num_ranks > 1,
            f"{type(pipeline).__name__} is a modular pipeline": is_modular(type(pipeline)),
            f"{type(pipeline).__name__} is made of others ({', '.join(inner)})": bool(inner),
            f"{type(pipeline).__name__} cannot be copied": not callable(
                getattr(pipeline, "set_progress_bar_config", 0)
            ),
            "this cache decides inside of the model": cache is not None and not isinstance(cache.settings, AutoConfig),
            "compile records the work of one request": bool(config.compile),
            "layers are computed ahead for one request": offload is not None and bool(offload.precompute),
            "lora_memory has no room for all adapters": most is not None and sum(self.facts.adapters.values()) > most,
        }
        return next((reason for reason, is_so in reasons.items() if is_so), "")

    def _open_meeting(self) -> None:
        """Let requests meet at the denoiser, each with a copy of the pipeline."""
        self._meeting: Meeting | None = None
        self._copies = contextlib.ExitStack()
        self._pipelines: queue.LifoQueue[Any] = queue.LifoQueue()
        if not self._alone:
            use = self._adapters.use if self._adapters is not None else lambda adapters: None
            parts = {name: part for name, part in self.pipeline.components.items() if part is not None}
            denoisers = list(map(unwrapped, find_denoisers(self.pipeline).values()))
            self._meeting = self._copies.enter_context(Meeting(denoisers, parts, self.max_batch, use))
            for _ in range(self.max_runs - 1):
                self._pipelines.put(self._copied())
        self._pipelines.put(self.pipeline)  # Last in, so that it is what a request alone is made with.

    def _copied(self) -> Any:
        """The pipeline with the same parts and hooks, but what a call keeps in itself, as its scheduler does."""
        copied = copy.copy(self.pipeline)
        copied.set_progress_bar_config(disable=True)
        for name, part in self.pipeline.components.items():
            if hasattr(part, "set_timesteps"):
                setattr(copied, name, copy.deepcopy(part))
        if self._attached.cache is not None:
            self._copies.enter_context(self._attached.cache.enable(copied))
        for name, hook in pipeline_hooks(self.pipeline).items():
            if name not in pipeline_hooks(copied):
                self._copies.enter_context(hook_pipeline(copied, name, hook))
        return copied

    @property
    def why_alone(self) -> str:
        """Why requests are served one at a time; empty if they meet."""
        return self._alone if self._meeting is None else self._meeting.problem

    def explain(self) -> Explanation:
        """What is attached now, and what it has done."""
        found = self._attached.explain().because(self._why_quantised)
        problem = self.why_alone
        how = f"one request at a time: {problem}" if problem else f"up to {self.max_batch} at a time"
        why = "requests meet at the denoiser: calls of one form are computed together"
        return replace(found, features=(*found.features, Feature("requests", how, why)))

    def _with_room(self, config: AttachConfig) -> AttachConfig:
        """The same, with room within a memory budget for adapters that may be loaded later in place of smaller ones."""
        most, offload = self.facts.lora_bytes, config.offload
        if self._adapters is None or most is None or offload is None or offload.gpu_memory is None:
            return config
        missing = max(0, min(most, sum(self._adapters.bytes.values())) - self._adapters.loaded_bytes)
        budget = (parse_bytes(offload.gpu_memory, "gpu_memory") or 0) - missing
        return replace(config, offload=replace(offload, gpu_memory=budget))

    def _quantization(
        self, config: OmniDiffusionConfig, folder: Path, dtype: Any, defaults: OmniDiffusionSamplingParams
    ) -> tuple[Quantization | None, str]:
        """What to quantise, and why."""
        attached, quantised, offload = config.attach_config, config.quantised(), config.attach_config.offload
        if config.loss in (None, "exact") or offload is None:
            return quantised, "asked for" if quantised is not None else ""
        frames = defaults.num_frames
        size = {"height": defaults.height, "width": defaults.width, "frames": frames, "batch": config.max_batch}
        if config.controlnet is not None and offload.gpu_memory is not None:
            beside = controlnet_bytes(read_controlnets(config.controlnet))
            budget = parse_bytes(offload.gpu_memory, "gpu_memory") or 0
            attached = replace(attached, offload=replace(offload, gpu_memory=max(1, budget - beside)))
        return choose_quantization(folder, dtype, self.device, attached, size, config.loss)

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """Serve requests together where they can meet, else one after the other; an error for each that fails."""
        is_over = threading.Event()
        listener = Listener(lambda event: None, is_over.is_set)
        try:
            return self._each([partial(self.make, request, listener) for request in requests])
        finally:  # If this thread is interrupted, the others stop at their next step.
            is_over.set()

    def make(self, request: Request, listener: Listener = SILENT, priority: int = 0) -> Outcome:
        """Serve one request; its error if it fails. Where requests can meet, any number of threads may call this."""
        try:
            return self._make(request, listener, priority)
        except SamovarError as error:
            return error

    @property
    def max_runs(self) -> int:
        """Calls of `make` that go on at the same time."""
        return 1 if self._meeting is None else RUNS_PER_PLACE * self.max_batch

    def _each(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        if len(tasks) == 1 or self._meeting is None:
            return [task() for task in tasks]
        with ThreadPoolExecutor(min(len(tasks), self.max_runs), "samovar request") as threads:
            return list(threads.map(lambda task: task(), tasks))

    def warm_up(self) -> float:
        """Make an image of the default size, and return how many seconds it took. Two steps show everything, unless a
        cache learns from all of them."""
        started = time.perf_counter()
        steps = None if self._attached.cache is not None or "num_inference_steps" not in self.facts.takes else 2
        params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=steps)
        inputs = self.facts.inputs.blanks(self.facts.defaults.width or 512, self.facts.defaults.height or 512)
        image = inputs.pop("image", None)
        outcome = self.make(Request("warm-up" if self.facts.takes_prompt else "", params, image, inputs=inputs))
        if isinstance(outcome, SamovarError):
            raise EngineError(f"The warm-up failed: {outcome} To start without one, give warm_up=False.") from outcome
        return time.perf_counter() - started

    def is_healthy(self) -> bool:
        """Whether the GPU still works: after some errors it never does again in this process."""
        if self.device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def usage(self) -> Usage:
        offloaded = self._attached.offloaded
        moved = 0 if offloaded is None else offloaded.stats().sent_bytes
        on_gpu = self.device.type == "cuda"
        return Usage(torch.cuda.memory_allocated() if on_gpu else _resident_bytes(), moved, self.why_alone)

    def close(self) -> None:
        """Detach everything from the pipeline, which frees its memory."""
        self._copies.close()
        self._attached.detach()
        self._unload_adapters()
        self._restore()

    def _unload_adapters(self) -> None:
        if self._adapters is not None:
            self._adapters.close()

    def _make(self, request: Request, listener: Listener, priority: int) -> GenerationResult:
        call = self.facts.check(request)
        params = self.facts.completed(request)
        seed = self._from_first_rank(random.randrange(2**32)) if params.seed is None else params.seed
        full = replace(request, params=replace(params, seed=seed))
        started = time.perf_counter()
        runs = self._each(
            [partial(self._run, full, index, call, listener, priority) for index in range(full.num_images)]
        )
        outputs = tuple(output for run in runs for output in run.outputs)
        notes = (
            note for run in runs for note in (*run.notes, *notes_on(run.outputs, request, full.params, self.facts))
        )
        return GenerationResult(
            request.prompt,
            outputs,
            tuple(full.seeds[index] for index, run in enumerate(runs) for _ in run.outputs),
            full.params,
            time.perf_counter() - started,
            cache=tuple(run.stats for run in runs if run.stats is not None),
            lora=request.lora,
            notes=tuple(dict.fromkeys(notes)),
        )

    def _run(self, request: Request, index: int, call: dict[str, Any], listener: Listener, priority: int) -> Made:
        """One output of a request, by a call of the pipeline."""
        cache, pipeline = None if request.exact else self._attached.cache, self._pipelines.get()
        missing = ""
        try:
            with contextlib.ExitStack() as stack:
                if self._meeting is not None:
                    stack.enter_context(self._meeting.member(priority, listener.is_cancelled, request.lora))
                elif self._adapters is not None:
                    self._adapters.use(request.lora)
                if request.exact:
                    is_auto = isinstance(getattr(self._attached.config.cache, "settings", None), AutoConfig)
                    stack.enter_context(self._attached.tolerating(0.0) if is_auto else self._attached.exactly())
                else:
                    stack.enter_context(self._attached.tolerating(request.tolerance))
                call = call | self.facts.inputs_of(request)
                missing = " and no ".join(self.facts.inputs.missing(call))
                stack.enter_context(running(pipeline))  # So that the cache knows whose figures are asked for.
                watch = StepWatch(pipeline, cache, request, index, listener, self._agree, self.facts.size)
                stack.enter_context(follow_steps(watch, pipeline, call, self.facts.takes))
                output = call_pipeline(pipeline, [request.prompt], [request.seeds[index]], call, missing)
                (made,) = take_outputs(self.facts.output, output, 1, self.facts.fps(request.params))
                stats = None if cache is None else cache.stats()
                notes = notes_on_model(request, pipeline, self._tuned)
            if request.num_previews and watch.no_preview:
                notes = [f"there was no preview: {watch.no_preview}", *notes]
            return Made(made, stats, notes)
        except SamovarError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                raise  # Ctrl-C.
            problem = next(iter(str(error).splitlines()), type(error).__name__)
            if not is_out_of_memory(error):
                raise failure(error, self.facts.class_name, request.params.options, missing) from error
        finally:
            self._pipelines.put(pipeline)
        # The error held every frame of the call. Memory can be freed only now that it is gone.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        what = described(request.params, 1, self.facts.output.kind)
        raise OutOfMemoryError(f"There is not enough memory for {what}: {problem}")

    def _agree(self, flag: bool) -> bool:
        return bool(self._from_first_rank(flag))

    def _from_first_rank(self, value: int) -> int:
        """Rank 0's value, on all ranks. It draws seeds, and alone hears of cancelled requests."""
        if self._attached.config.num_ranks == 1:
            return value
        shared = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.broadcast(shared, src=0)
        return int(shared.item())


def _resident_bytes() -> int:
    """The memory of this process, on Linux."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
    return 0
