"""A loaded pipeline that serves requests. They meet at its denoiser, or are served one at a time."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..arch import ModuleDiscovery
from ..arch.modular import is_modular
from ..arch.modules import unwrapped
from ..cache import AutoConfig
from ..compose import Attached, Explanation, tiled_if_needed
from ..compose.explain import Feature
from ..core.errors import (
    CancelledRequestError,
    EngineError,
    NanLatentsError,
    OutOfMemoryError,
    SamovarError,
    SettingError,
)
from ..hooks import hook_pipeline, pipeline_hooks, running
from .calling import call_pipeline, failure, notes_on
from .embeddings import Embeddings
from .events import SILENT, GenerationResult, Listener, Outcome
from .facts import PipelineFacts, facts_of
from .lora import Adapters
from .meeting import DENOISER, ENCODER, Meeting
from .models import Loaded, adopt, load_model
from .outputs import take_outputs
from .request import OmniDiffusionSamplingParams, Request, saved_defaults
from .settings import OmniDiffusionConfig
from .steps import StepWatch, follow_steps

T = TypeVar("T")
RUNS_PER_PLACE = 2
"""Requests that are begun for each that is computed at a time: a short one need not wait for the end of long ones."""
RAISED_BY_ALL_RANKS = (CancelledRequestError, NanLatentsError, SettingError)
"""All ranks raise these at the same place. After other errors, the other ranks may wait for the one that failed."""


class Usage(NamedTuple):
    """The resources of one worker process."""

    memory_bytes: int
    """GPU memory, or host memory without a GPU."""
    bytes_moved: int
    """Weights copied to the device so far."""
    alone: str = ""
    """Why requests are served one at a time, if they are."""


class Worker:
    """A pipeline with features attached."""

    def __init__(
        self, config: OmniDiffusionConfig, pipeline: Any = None, components: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model, but for `components` that are loaded already, or take a pipeline that is."""
        self.config = config
        self._tuned = saved_defaults(config.cache)
        self._pipelines: queue.LifoQueue[Any] = queue.LifoQueue()
        """Those that no run has."""
        with contextlib.ExitStack() as undo:
            loaded = load_model(config, components) if pipeline is None else adopt(config, pipeline)
            undo.callback(loaded.restore)
            self.pipeline, self.device = loaded.pipeline, loaded.device
            self._attach(loaded, undo)
            self.load_seconds = time.perf_counter() - loaded.started
            self._undo = undo.pop_all()

    def _attach(self, loaded: Loaded, undo: contextlib.ExitStack) -> None:
        """Attach the features to the pipeline, and know what it takes and makes."""
        pipeline, config, defaults = self.pipeline, self.config, loaded.defaults
        cache, offload = config.attach_config.cache, config.attach_config.offload
        self._switch: Callable[[Any], None] = lambda adapters: None
        if config.lora:
            self._switch = undo.enter_context(Adapters(pipeline, config.lora)).use
        # Offloaded weights never pass through the device as a whole. A name that is none is refused below.
        kept: list[Any] = [pipeline] if offload is None else [getattr(pipeline, name, None) for name in offload.exclude]
        for part in kept:
            if hasattr(part, "to"):
                part.to(self.device)
        facts = facts_of(pipeline, defaults)
        self._alone = why_alone(config, pipeline)
        self.max_batch = 1 if self._alone else config.max_batch
        self._is_auto = cache is not None and isinstance(cache.settings, AutoConfig)
        features = config.attach_config
        if not self._alone and offload is not None:  # Those who meet are at different times.
            features = replace(features, offload=replace(offload, precompute=False))
        size = {"height": defaults.height, "width": defaults.width, "frames": defaults.num_frames}
        features = tiled_if_needed(pipeline, features.for_requests(**size, batch=self.max_batch))
        self._attached = undo.enter_context(Attached(pipeline, features))
        self._why_quantised = loaded.why_quantised
        offloaded = self._attached.offloaded
        has_budget = offloaded is not None and offloaded.plan.budget_bytes is not None
        self.max_runs = self.max_batch * (1 if self._alone or has_budget else RUNS_PER_PLACE)
        """Requests that it can have at once: some wait while others are computed."""
        self._meeting = self._open_meeting(undo)
        self._embeddings = Embeddings(partial(self._meeting.wait_for, ENCODER))
        for _ in range(self.max_runs - 1):
            self._pipelines.put(self._copied(undo))
        self._pipelines.put(pipeline)  # Last in, so that it is what a request alone is made with.
        self.facts: PipelineFacts = replace(
            facts,
            adapters=tuple(config.lora or ()),
            has_tolerance=self._is_auto,
            scheduled_steps=config.scheduled_steps,
            max_side=min(filter(None, (loaded.max_side, facts.max_side)), default=None),
            explanation=self.explain(),
        )

    def _open_meeting(self, undo: contextlib.ExitStack) -> Meeting:
        """Where requests take turns, and meet at the denoiser if they may."""
        doors, offloaded = dict[str, list[torch.nn.Module]](), self._attached.offloaded
        if not self._alone:
            found = ModuleDiscovery.discover(self.pipeline)
            doors[DENOISER] = list(map(unwrapped, found.dits))
            if offloaded is not None and offloaded.plan.take_turns:  # Some are called by their parts, as VAEs are.
                for role, modules in {ENCODER: found.encoders, "vae": found.vaes}.items():
                    doors[role] = [part for module in modules for part in (module, *module.children())]
        return undo.enter_context(Meeting(doors, self.pipeline, self.max_batch, self._switch))

    def _copied(self, undo: contextlib.ExitStack) -> Any:
        """The pipeline with the same parts and hooks, but what a call keeps in itself, as its scheduler does."""
        copied = copy.copy(self.pipeline)
        copied.set_progress_bar_config(disable=True)
        for name, part in self.pipeline.components.items():
            if hasattr(part, "set_timesteps"):
                setattr(copied, name, copy.deepcopy(part))
        if self._attached.cache is not None:
            undo.enter_context(self._attached.cache.enable(copied))
        for name, hook in pipeline_hooks(self.pipeline).items():
            if name not in pipeline_hooks(copied):
                undo.enter_context(hook_pipeline(copied, name, hook))
        return copied

    @property
    def why_alone(self) -> str:
        """Why requests are served one at a time; empty if they meet."""
        return self._alone or self._meeting.problem

    def explain(self) -> Explanation:
        """What is attached now, and what it has done."""
        found = self._attached.explain().because(self._why_quantised)
        problem = self.why_alone
        how = f"one request at a time: {problem}" if problem else f"up to {self.max_batch} at a time"
        why = "requests meet at the denoiser: calls of one form are computed together"
        return replace(found, features=(*found.features, Feature("requests", how, why)))

    # ------------------------------------------------------------------------------------------ requests

    def run(self, requests: Sequence[Request]) -> list[Outcome]:
        """What each request makes, or its error. They run at once where they can."""
        return self._each([partial(self.make, request) for request in requests])

    def make(self, request: Request, listener: Listener = SILENT) -> Outcome:
        """What a request makes, or its error. Events go to the listener from here or from other threads."""
        try:
            return self._make(self.facts.check(request), listener)
        except SamovarError as error:
            return error

    def _each(self, tasks: Sequence[Callable[[], T]]) -> list[T]:
        if len(tasks) < 2 or self.max_runs == 1:
            return [task() for task in tasks]
        with ThreadPoolExecutor(min(len(tasks), self.max_runs), "samovar request") as threads:
            return list(threads.map(lambda task: task(), tasks))

    def _make(self, request: Request, listener: Listener) -> GenerationResult:
        started = time.perf_counter()
        request = replace(request, params=replace(request.params, seed=self._agree(request.params.seed or 0)))
        tasks = [partial(self._run, request, index, listener) for index in range(request.num_images)]
        outputs, stats, notes = zip(*self._each(tasks), strict=True)
        return GenerationResult(
            request.prompt,
            tuple(chain.from_iterable(outputs)),
            tuple(seed for seed, made in zip(request.seeds, outputs, strict=True) for _ in made),
            request.params,
            time.perf_counter() - started,
            notes=tuple(dict.fromkeys(chain.from_iterable(notes))),
            cache=tuple(each for each in stats if each is not None),
            lora=request.lora,
        )

    def _run(self, request: Request, index: int, listener: Listener) -> tuple[Sequence[Any], Any, Sequence[str]]:
        """One output of a request, by a call of the pipeline; what the cache did for it; and notes."""
        pipeline, cache = self._pipelines.get(), None if request.exact else self._attached.cache
        watch = StepWatch(pipeline, request, index, listener, cache, self.facts.size or (None, None), self._agree)
        deadline = math.inf if request.deadline_s is None else time.monotonic() + request.deadline_s
        turn = self._meeting.member(
            is_cancelled=listener.is_cancelled, adapters=request.lora, priority=request.priority, deadline=deadline
        )
        try:
            with turn, self._precision(request), running(pipeline):
                with self._embeddings.kept(pipeline), follow_steps(watch):
                    output = call_pipeline(pipeline, [request.prompt], [request.seeds[index]], request.arguments or {})
                outputs = take_outputs(self.facts.output, output, self.facts.fps(request.params))
                stats = None if cache is None else cache.stats()
                notes = [*notes_on(request, outputs, pipeline, self._tuned)]
            if request.num_previews and watch.no_preview:
                notes.insert(0, f"there was no preview: {watch.no_preview}")
            return outputs, stats, notes
        except BaseException as error:
            if isinstance(error, SamovarError) or not isinstance(error, Exception):
                raise
            problem = failure(error, self.facts, request)
            if not isinstance(problem, OutOfMemoryError):
                raise problem from error
        finally:
            self._pipelines.put(pipeline)
        # The error held every frame of the call. Memory can be freed only now that it is gone.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise problem

    def _precision(self, request: Request) -> contextlib.AbstractContextManager[None]:
        if request.exact and not self._is_auto:
            return self._attached.exactly()
        return self._attached.tolerating(0.0 if request.exact else request.tolerance)

    def warm_up(self) -> float:
        """Make an image of the default size, and return how many seconds it took. Two steps show everything, unless a
        cache learns from all of them."""
        started = time.perf_counter()
        steps = None if self._attached.cache is not None or "num_inference_steps" not in self.facts.takes else 2
        params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=steps)
        inputs = self.facts.inputs.blanks(self.facts.defaults.width or 512, self.facts.defaults.height or 512)
        outcome = self.make(Request("warm-up" if self.facts.takes_prompt else "", params, inputs=inputs))
        if isinstance(outcome, SamovarError):
            raise EngineError(f"The warm-up failed: {outcome} To start without one, give warm_up=False.") from outcome
        return time.perf_counter() - started

    # ------------------------------------------------------------------------------------------ the process

    def is_healthy(self) -> bool:
        """Whether the GPU still works: after some errors it never does again in this process."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                return False
        return True

    def usage(self) -> Usage:
        offloaded = self._attached.offloaded
        moved = 0 if offloaded is None else offloaded.stats().sent_bytes
        memory = torch.cuda.memory_allocated() if self.device.type == "cuda" else _resident_bytes()
        return Usage(memory, moved, self.why_alone)

    def close(self) -> None:
        """Detach everything from the pipeline, which frees its memory."""
        self._undo.close()

    def _agree(self, value: T) -> T:
        """Rank 0's value, on all ranks. It draws seeds, and alone hears of cancelled requests."""
        values = [value]
        if self.config.num_ranks > 1:
            dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]


def why_alone(config: OmniDiffusionConfig, pipeline: Any) -> str:
    """Why requests are served one at a time, if they must be."""
    cache, offload, name = config.attach_config.cache, config.attach_config.offload, type(pipeline).__name__
    inner = [part for part, value in vars(pipeline).items() if hasattr(value, "components")]
    reasons = {
        "several ranks compute one image": config.num_ranks > 1,
        f"{name} is a modular pipeline": is_modular(type(pipeline)),
        f"{name} is made of others ({', '.join(inner)})": bool(inner),
        f"{name} cannot be copied": not callable(getattr(pipeline, "set_progress_bar_config", None)),
        "this cache decides inside of the model": cache is not None and not isinstance(cache.settings, AutoConfig),
        "compiled blocks are made for the sizes of one request": config.attach_config.compiles,
        "layers are computed ahead for one request": offload is not None and bool(offload.precompute),
        "max_batch is 1": config.max_batch == 1,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def _resident_bytes() -> int:
    """The memory of this process, on Linux."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
    return 0
