"""How does a loaded pipeline serve requests? A worker owns it, calls it, and names what went wrong."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..arch.modular import adapt
from ..cache import AutoConfig, TunedFor
from ..compose import AttachConfig, Attached, Explanation, tiled_if_needed
from ..core.errors import (
    CancelledRequestError,
    EngineError,
    NanLatentsError,
    OutOfMemoryError,
    SamovarError,
    SettingError,
)
from ..core.settings import parse_bytes
from .calling import call_pipeline
from .controlnet import controlnet_bytes, read_controlnets
from .facts import facts_of
from .failures import described, is_out_of_memory, reason_of
from .lanes import Lanes, must_be_alone
from .lora import Adapters
from .models import fetch_model, find_loader, load_pipeline, resolve_dtype
from .neighbours import is_same_alone, length_of
from .notes import num_tokens, with_notes
from .outputs import output_fields, take_outputs
from .patience import shape_of
from .planning import choose_quantization
from .quantize import Quantization
from .request import SILENT, GenerationResult, Listener, OmniDiffusionSamplingParams, Request, saved_defaults
from .settings import OmniDiffusionConfig
from .steps import Slot, StepWatch, follow_steps, stats_of

Outcome = GenerationResult | SamovarError

RAISED_BY_ALL_RANKS = (CancelledRequestError, NanLatentsError, SettingError)
"""All ranks raise these at the same place. After other errors, the other ranks may wait for the one that failed."""


class Usage(NamedTuple):
    """The resources of one worker process."""

    memory_bytes: int
    """GPU memory, or host memory without a GPU."""
    bytes_moved: int
    """Weights copied to the device so far."""


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
    """A pipeline with features attached, which serves one batch of requests at a time."""

    def __init__(
        self, config: OmniDiffusionConfig, pipeline: Any = None, components: Mapping[str, Any] | None = None
    ) -> None:
        """Load the model, but for `components` that are loaded already, or take a pipeline that is."""
        self._tuned = saved_defaults(config.cache)
        self._restore: Callable[[], None] = lambda: None
        self.device = config.execution_device()
        defaults, self._why_quantised = config.sampling_defaults(None), ""
        started = time.perf_counter()
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
            self._attach(config, defaults)
        except BaseException:
            self._restore()
            raise
        self.load_seconds = time.perf_counter() - started
        self._mixes: bool | None = None
        """Whether prompts of different lengths may be in one batch; None if that was not tried yet."""
        self._lock = threading.Lock()
        """One call at a time, without lanes: they share the scheduler, which counts the steps."""

    def _attach(self, config: OmniDiffusionConfig, defaults: OmniDiffusionSamplingParams) -> None:
        """Attach the features to the pipeline, and know what it takes and makes."""
        pipeline = self.pipeline
        self.facts = facts_of(pipeline, defaults)
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
        # Another cache decides for a batch as a whole, so an output would depend on those beside it.
        is_batched = self.facts.takes_prompt and (cache is None or is_auto)
        self.max_batch = config.max_batch if is_batched else 1
        frames = defaults.num_frames
        size = {"height": defaults.height, "width": defaults.width, "frames": frames, "batch": self.max_batch}
        try:
            features = tiled_if_needed(pipeline, config.attach_config.for_requests(**size))
            self._attached = Attached(pipeline, self._with_room(features))
        except BaseException:
            self._unload_adapters()
            raise
        self.facts = replace(self.facts, explanation=self.explain())
        self._lanes = Lanes(pipeline, self.device, self._attached.cache, 2 if config.overlap else 1)

    def explain(self) -> Explanation:
        """What is attached now, and what it has done."""
        return self._attached.explain().because(self._why_quantised)

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

    def run(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Outcome]:
        """Serve requests that fit together in as few pipeline calls as possible; an error for each that fails. If a
        call for several fails, each is tried alone."""
        with self._lock if self.num_lanes == 1 else contextlib.nullcontext():
            return self._run(requests, listener or SILENT)

    @property
    def num_lanes(self) -> int:
        """Calls of `run` that go on at the same time, from as many threads."""
        return self._lanes.count

    def warm_up(self) -> float:
        """Make an image of the default size, and return how many seconds it took. Two steps show everything, unless a
        cache learns from all of them."""
        started = time.perf_counter()
        steps = None if self._attached.cache is not None or "num_inference_steps" not in self.facts.takes else 2
        params = OmniDiffusionSamplingParams(seed=0, num_inference_steps=steps)
        inputs = self.facts.inputs.blanks(self.facts.defaults.width or 512, self.facts.defaults.height or 512)
        image = inputs.pop("image", None)
        (outcome,) = self.run([Request("warm-up" if self.facts.takes_prompt else "", params, image, inputs=inputs)])
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
        return Usage(torch.cuda.memory_allocated() if on_gpu else _resident_bytes(), moved)

    def close(self) -> None:
        """Detach everything from the pipeline, which frees its memory."""
        self._lanes.close()
        self._attached.detach()
        self._unload_adapters()
        self._restore()

    def _unload_adapters(self) -> None:
        if self._adapters is not None:
            self._adapters.close()

    def _run(self, requests: Sequence[Request], listener: Listener) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        ready: dict[int, Request] = {}
        lengths: dict[int, int] = {}
        for index, request in enumerate(requests):
            try:
                self.facts.check(request)
            except SettingError as error:
                outcomes[index] = error
                continue
            with self._lanes.before_steps():
                lengths[index] = num_tokens(self.pipeline, request.prompt)
            params = self.facts.completed(request)
            seed = self._from_first_rank(random.randrange(2**32)) if params.seed is None else params.seed
            ready[index] = replace(request, params=replace(params, seed=seed))
        for attempt in self._attempts(ready):
            batch = {index: ready[index] for index in attempt if index not in outcomes}
            try:
                outcomes |= self._run_batch(batch, listener) if batch else {}
            except SamovarError as error:
                if self._attached.config.num_ranks > 1 and not isinstance(error, RAISED_BY_ALL_RANKS):
                    outcomes |= dict.fromkeys(ready.keys() - outcomes.keys(), error)
                elif len(batch) == 1:
                    outcomes |= dict.fromkeys(batch, error)
        for index, outcome in outcomes.items():
            if isinstance(outcome, GenerationResult):
                about = requests[index], lengths[index], self.pipeline, self.facts, self._tuned
                outcomes[index] = with_notes(outcome, *about)
        return [outcomes[index] for index in range(len(requests))]

    def _attempts(self, ready: Mapping[int, Request]) -> Iterator[list[int]]:
        """The requests that are tried together: all, or those with prompts of one length if others would change their
        images; then each that is left alone."""
        lengths = {index: length_of(self.pipeline, one.prompt) for index, one in ready.items() if self.max_batch > 1}
        if len(set(lengths.values())) > 1 and not self._may_mix(ready, lengths):
            yield from ([index for index in ready if lengths[index] == each] for each in sorted(set(lengths.values())))
        else:
            yield list(ready)
        yield from ([index] for index in ready)

    def _may_mix(self, ready: Mapping[int, Request], lengths: Mapping[int, Any]) -> bool:
        """Whether prompts of other lengths leave an image as it is; tried once."""
        if self._mixes is not None:
            return self._mixes
        short, long = min(ready, key=lengths.__getitem__), max(ready, key=lengths.__getitem__)
        pair = {index: replace(ready[index], exact=True) for index in (short, long)}
        try:
            found = is_same_alone(self.pipeline, lambda *which: self._call(pair, [(each, 0) for each in which], SILENT),
                                  short, long)  # fmt: skip
        except SamovarError:
            if self._attached.config.num_ranks > 1:
                raise  # Other ranks may wait for this one.
            return False  # What is wrong is seen again when they are made.
        self._mixes = bool(self._from_first_rank(found))
        return self._mixes

    def _run_batch(self, batch: Mapping[int, Request], listener: Listener) -> dict[int, Outcome]:
        slots = [(index, number) for index, request in batch.items() for number in range(request.num_images)]
        made: dict[int, list[tuple[Any, int]]] = {index: [] for index in batch}
        stats, started = {index: list[Any]() for index in batch}, time.perf_counter()
        for first in range(0, len(slots), self.max_batch):
            together = slots[first : first + self.max_batch]
            called, found, why = self._call(batch, together, listener)
            for (index, number), outputs in zip(together, called, strict=True):
                made[index] += [(output, batch[index].seeds[number]) for output in outputs]
            for index in found:
                stats[index].append(found[index])
        seconds = time.perf_counter() - started
        return {
            index: GenerationResult(
                request.prompt,
                tuple(output for output, _ in made[index]),
                tuple(seed for _, seed in made[index]),
                request.params,
                seconds,
                cache=tuple(stats[index]),
                lora=request.lora,
                notes=(f"there was no preview: {why}",) if request.num_previews and why else (),
            )
            for index, request in batch.items()
        }

    def _call(
        self, batch: Mapping[int, Request], slots: Sequence[Slot], listener: Listener
    ) -> tuple[list[list[Any]], dict[int, Any], str]:
        """What one pipeline call makes for each slot, what the cache did by request, and why there was no preview."""
        lead = batch[slots[0][0]]
        call = self.facts.check(lead) | self.facts.inputs_of(lead)
        if self.facts.output.kind == "video" and "output_type" in self.facts.takes:
            call["output_type"] = "np"
        prompts = [batch[index].prompt for index, _ in slots]
        seeds = [batch[index].seeds[number] for index, number in slots]
        cache, agree = None if lead.exact else self._attached.cache, lambda flag: bool(self._from_first_rank(flag))
        try:
            shape = shape_of([lead], self.facts), len(slots)
            with self._lanes.calling(shape, must_be_alone(batch.values())) as lane:
                if self._adapters is not None:
                    self._adapters.use(lead.lora)
                exactly = self._attached.exactly() if lead.exact else contextlib.nullcontext()
                tolerating = self._attached.tolerating(lead.tolerance)
                watch = StepWatch(lane.pipeline, cache, batch, slots, listener, agree, lane.end_steps, self.facts.size)
                with exactly, tolerating, follow_steps(watch, lane.pipeline, call, self.facts.takes):
                    output = call_pipeline(lane.pipeline, prompts, seeds, call, lane.note_draws, is_alone=lane.is_alone)
                    made = take_outputs(self.facts.output, output, len(slots), self.facts.fps(lead.params))
                    # Of two lanes, another call may have begun since the steps of this one.
                    found = (watch.last_stats if self.num_lanes > 1 else None) or (cache and cache.stats())
                    stats = {index: stats_of(found, slots, index) for index in dict(slots) if cache is not None}
                    return made, stats, watch.no_preview
        except SamovarError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                raise  # Ctrl-C.
            problem = next(iter(str(error).splitlines()), type(error).__name__)
            if not is_out_of_memory(error):
                raise EngineError(f"{self.facts.class_name} failed: {reason_of(error)}") from error
        # The error holds every frame of the call. Memory can be freed only now that it is gone.
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        what = described(lead.params, len(slots), self.facts.output.kind)
        raise OutOfMemoryError(f"There is not enough memory for {what}: {problem}")

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
