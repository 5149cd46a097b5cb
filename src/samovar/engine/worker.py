"""Who owns the pipeline? One worker: it loads a model and makes pictures with it."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import (
    CancelledRequestError,
    EngineError,
    NanLatentsError,
    OutOfMemoryError,
    SamovarError,
    SettingError,
)
from .events import SILENT, Listener
from .facts import facts_of
from .models import fetch_model, find_loader, load_pipeline
from .request import GeneratedPictures, OmniDiffusionSamplingParams, Request, read_defaults
from .settings import OmniDiffusionConfig

if TYPE_CHECKING:
    import torch

    from ..cache import CacheBackend
    from .steps import Shot

Outcome = GeneratedPictures | SamovarError

_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, OSError, RuntimeError,
             TypeError)  # fmt: skip
"""What a pipeline raises that was asked for what it cannot do, or in which something is wrong."""
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation", "_STATUS_ALLOC_FAILED")
_NO_SIZE = ("Storage size calculation overflowed", "overflow")
_SHARED = (CancelledRequestError, NanLatentsError, SettingError)
"""What all ranks raise at the same place. After any other error the others may still be waiting for this one."""


class Usage(NamedTuple):
    """What a worker takes."""

    memory_bytes: int
    """Of the GPU, or of the host where there is none."""
    bytes_moved: int
    """Weights copied to the device so far."""


@dataclass(frozen=True)
class _Job:
    """A request that was found good."""

    request: Request
    params: OmniDiffusionSamplingParams
    call: dict[str, Any]
    seeds: tuple[int, ...]


class Worker:
    """A loaded pipeline and the model's defaults."""

    def __init__(self, config: OmniDiffusionConfig) -> None:
        from ..compose import Attached

        folder = fetch_model(config.model, trust_remote_code=config.trust_remote_code)
        defaults = read_defaults(folder)
        find_loader(folder, trust_remote_code=config.trust_remote_code)  # Imports are not what loading takes.
        started = time.perf_counter()
        self._pipeline = load_pipeline(folder, _dtype(config), trust_remote_code=config.trust_remote_code)
        if config.attach_config().offload is None:
            # What is offloaded stays on the host, and never passes through the device whole.
            self._pipeline.to(config.execution_device())
        self.facts = facts_of(self._pipeline, defaults)
        # None: shown on a terminal, not in a file.
        shows = config.progress and _rank() == 0
        self._pipeline.set_progress_bar_config(disable=None if shows else True, leave=False, desc="denoising")
        self._attached = Attached(self._pipeline, config.attach_config())
        self._device = config.execution_device()
        # A cache decides for a batch as a whole: a picture would depend on those beside it.
        self.max_batch = config.max_batch if self._attached.cache is None else 1
        self.load_seconds = time.perf_counter() - started
        self._turn = threading.Lock()
        """One call at a time: they share a scheduler, which counts the steps."""

    def generate(self, prompt: str, params: OmniDiffusionSamplingParams) -> GeneratedPictures:
        """Pictures of a prompt. Every one is the same whether it is made alone or among others."""
        (outcome,) = self.make([Request(prompt, params)])
        if isinstance(outcome, SamovarError):
            raise outcome
        return outcome

    def make(self, requests: Sequence[Request], listener: Listener | None = None) -> list[Outcome]:
        """Pictures for requests that fit together, in as few calls as may be; for each that fails, its error. One
        that fails among others is made again alone, so that nobody suffers for it but itself."""
        with self._turn:
            return self._make(requests, listener or SILENT)

    def is_sound(self) -> bool:
        """Whether its GPU still obeys: after some errors it never does again, in this process."""
        import torch

        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def usage(self) -> Usage:
        """What is taken now."""
        import torch

        offloaded = self._attached.offloaded
        moved = 0 if offloaded is None else offloaded.stats().sent_bytes
        on_gpu = self._device.type == "cuda"
        return Usage(torch.cuda.memory_allocated() if on_gpu else _resident_bytes(), moved)

    def close(self) -> None:
        """Take everything off the pipeline, so that its memory is given back."""
        self._attached.detach()

    # ------------------------------------------------------------------------------------------ one call, or several

    def _make(self, requests: Sequence[Request], listener: Listener) -> list[Outcome]:
        outcomes: dict[int, Outcome] = {}
        jobs: dict[int, _Job] = {}
        for index, request in enumerate(requests):
            try:
                jobs[index] = self._job(request)
            except SamovarError as error:
                outcomes[index] = error
        apart: SamovarError | None = None
        if len(jobs) > 1:
            try:
                outcomes |= self._make_together(jobs, listener)
            except SamovarError as error:
                apart = self._unshared(error)
        for index, job in jobs.items():
            if index not in outcomes:
                outcome = apart or self._make_alone(index, job, listener)
                outcomes[index] = outcome
                apart = self._unshared(outcome) if isinstance(outcome, SamovarError) else None
        return [outcomes[index] for index in range(len(requests))]

    def _unshared(self, error: SamovarError) -> SamovarError | None:
        """An error that other ranks may not have: after it, nothing can be made in step with them."""
        return None if self._attached.config.num_ranks == 1 or isinstance(error, _SHARED) else error

    def _job(self, request: Request) -> _Job:
        call = self.facts.check(request)
        params = self.facts.completed(request)
        if params.seed is None:
            params = replace(params, seed=self._draw_seed())
        first = params.seed or 0
        return _Job(request, params, call, tuple(range(first, first + (params.num_outputs_per_prompt or 1))))

    def _make_alone(self, index: int, job: _Job, listener: Listener) -> Outcome:
        try:
            return self._make_together({index: job}, listener)[index]
        except SamovarError as error:
            return error

    def _make_together(self, jobs: dict[int, _Job], listener: Listener) -> dict[int, Outcome]:
        from .steps import Shot

        shots = [
            Shot(index, picture, len(job.seeds), seed, job.request.num_previews)
            for index, job in jobs.items()
            for picture, seed in enumerate(job.seeds)
        ]
        images: dict[int, list[Any]] = {index: [] for index in jobs}
        cache: list[Any] = []
        started = time.perf_counter()
        for first in range(0, len(shots), self.max_batch):
            together = shots[first : first + self.max_batch]
            for shot, image in zip(together, self._call(jobs, together, listener), strict=True):
                images[shot.request].append(image)
            backend = self._cache_for(jobs[together[0].request].request)
            if backend is not None:
                cache.append(backend.stats())
        seconds = time.perf_counter() - started
        outcomes: dict[int, Outcome] = {}
        for index, job in jobs.items():
            pictures, notes = tuple(images[index]), self._notes(job)
            outcomes[index] = GeneratedPictures(
                job.request.prompt, pictures, job.seeds, job.params, seconds, notes, tuple(cache)
            )
        return outcomes

    def _call(self, jobs: dict[int, _Job], shots: Sequence[Shot], listener: Listener) -> list[Any]:
        """One call of the pipeline."""
        import torch

        lead = jobs[shots[0].request]
        call = dict(lead.call)
        generators = [torch.Generator("cpu").manual_seed(shot.seed) for shot in shots]
        prompts = [jobs[shot.request].request.prompt for shot in shots]
        if len(shots) == 1:
            call |= {"prompt": prompts[0], "generator": generators[0]}
        else:
            call |= {"prompt": prompts, "generator": generators}
            if "negative_prompt" in call:
                call["negative_prompt"] = [call["negative_prompt"]] * len(shots)
        problem = ""
        try:
            with self._watched(call, shots, listener, lead.request):
                return list(self._pipeline(**call).images)
        except SamovarError:
            raise
        except ValueError as error:  # How pipelines of diffusers refuse a setting.
            raise SettingError(f"{self.facts.class_name} refuses these settings: {error}") from error
        except MemoryError as error:
            problem = str(error) or "no memory is left"
        except _FAILURES as error:
            if not any(words in str(error) for words in (*_NO_MEMORY, *_NO_SIZE)):
                raise EngineError(f"{self.facts.class_name} failed: {type(error).__name__}: {error}") from error
            problem = str(error).splitlines()[0]
        # Only here, where the error and with it every frame of the call is gone, can its memory be given back.
        self._free_memory()
        raise OutOfMemoryError(f"There is not enough memory for {_size_of(lead.params, len(shots))}: {problem}")

    @contextlib.contextmanager
    def _watched(
        self, call: dict[str, Any], shots: Sequence[Shot], listener: Listener, request: Request
    ) -> Iterator[None]:
        """A call whose steps are followed, by its callback or by hooks, and computed if that was asked for."""
        from ..arch import find_denoisers
        from .steps import CALLBACK, StepHook, StepWatch

        size = call.get("height"), call.get("width")
        watch = StepWatch(self._pipeline, self._cache_for(request), shots, listener, self._agree, size)
        watch.check_cancelled()
        with self._attached.exactly() if request.exact else contextlib.nullcontext():
            if CALLBACK in self.facts.takes:
                call[CALLBACK] = watch.call_back
                yield
                return
            denoisers = list(find_denoisers(self._pipeline).values())
            hook = StepHook(self._pipeline, watch)
            hook.attach(denoisers)
            try:
                yield
                hook.end()
            finally:
                hook.detach(denoisers)

    def _cache_for(self, request: Request) -> CacheBackend | None:
        return None if request.exact else self._attached.cache

    def _free_memory(self) -> None:
        import torch

        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------ with other ranks

    def _agree(self, word: bool) -> bool:
        """What the first rank says, which alone hears of requests that are taken back."""
        if self._attached.config.num_ranks == 1:
            return word
        import torch
        import torch.distributed as dist

        said = torch.tensor([int(word)], device=self._device)
        dist.broadcast(said, src=0)
        return bool(said.item())

    def _draw_seed(self) -> int:
        """A seed by chance, the same on all ranks."""
        drawn = random.randrange(2**32)
        if self._attached.config.num_ranks == 1:
            return drawn
        import torch
        import torch.distributed as dist

        said = torch.tensor([drawn], dtype=torch.int64, device=self._device)
        dist.broadcast(said, src=0)
        return int(said.item())

    # ------------------------------------------------------------------------------------------ what had no effect

    def _notes(self, job: _Job) -> tuple[str, ...]:
        """Words beyond those that the model reads, and guidance that it does not know."""
        notes = self._length_notes(job.request.prompt, job.params)
        config = getattr(getattr(self._pipeline, "transformer", None), "config", {})
        if job.request.params.guidance_scale is not None and config.get("guidance_embeds") is False:
            notes += ("guidance_scale has no effect on this model, which is not distilled: use true_cfg_scale",)
        return notes

    def _length_notes(self, prompt: str, params: OmniDiffusionSamplingParams) -> tuple[str, ...]:
        tokenizer = getattr(self._pipeline, "tokenizer_2", None) or getattr(self._pipeline, "tokenizer", None)
        if tokenizer is None:
            return ()
        limit = params.max_sequence_length or tokenizer.model_max_length
        length = len(tokenizer(prompt, truncation=False, verbose=False).input_ids)
        if length <= limit:
            return ()
        return (f"the prompt is {length} tokens long, and the model read the first {limit}",)


def _dtype(config: OmniDiffusionConfig) -> torch.dtype:
    import torch

    auto = "float32" if config.execution_device().type == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, auto if config.dtype == "auto" else config.dtype)
    return dtype


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _resident_bytes() -> int:
    """The memory of this process, where the system says so."""
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096
    return 0


def _size_of(params: OmniDiffusionSamplingParams, count: int) -> str:
    size = f" of {params.width} x {params.height} pixels" if params.width and params.height else " of the default size"
    return f"{count} picture{'s' * (count > 1)}{size}"
