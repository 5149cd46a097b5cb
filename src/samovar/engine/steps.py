"""Checks, progress, previews and cancellation after each step of a run.

Most pipelines call back after a step. On the others, hooks on the denoisers see a step end when the next one begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from ..arch import find_denoisers
from ..cache import CacheBackend, PipelineStats
from ..core.errors import CancelledRequestError, NanLatentsError
from ..hooks import ModelHook, Run, install_hook
from ..media import upright_size
from .previews import NoPreview, decode_latents, predict_clean
from .request import Listener, Preview, Progress, Request

HOOK_NAME = "samovar_steps"
CALLBACK = "callback_on_step_end"


class StepWatch:
    """Follows the steps of one run, which makes the image `index` of a request.

    `agree` turns this rank's flag into the one that all ranks share; `size` is that of a request which gives none.
    """

    def __init__(
        self,
        pipeline: Any,
        cache: CacheBackend | None,
        request: Request,
        index: int,
        listener: Listener,
        agree: Callable[[bool], bool],
        size: tuple[int, int] | None = None,
    ) -> None:
        self.no_preview = f"{type(pipeline).__name__} does not show its latents between steps"
        """Why there was no preview, if there was none."""
        self._size = size or (None, None)
        self._pipeline = pipeline
        self._cache = cache
        self._request = request
        self._index = index
        self._listener = listener
        self._agree = agree
        self._run = Run(pipeline, None)
        self._began = time.perf_counter()
        self._before: torch.Tensor | None = None
        self._counts: dict[str, tuple[int, int]] = {}
        """By denoiser: the steps that were computed, and that were skipped."""

    def call_back(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The callback for the pipeline. What it returned would take the place of the pipeline's own tensors, and some
        have them in another form by then."""
        self.end_step(step, tensors.get("latents"))
        return {}

    def end_step(self, step: int, latents: Any, total: int | None = None) -> None:
        """Step `step` of `total`, counted from 0, has ended with these latents."""
        total = max(total or self._run.total() or 0, step + 1)
        if isinstance(latents, torch.Tensor):
            self._check(latents, step, total)  # Waits for the device, so the time below is right.
        seconds = time.perf_counter() - self._began
        count = self._request.num_images
        self._listener.on_event(Progress(step + 1, total, self._index, count, seconds, self._was_computed()))
        self.check_cancelled()
        if isinstance(latents, torch.Tensor) and self._request.num_previews:
            self._preview(step, total, latents)
            self._before = latents.clone()  # Some schedulers write into their input.
        self._began = time.perf_counter()

    def check_cancelled(self) -> None:
        """Stop if the request was cancelled."""
        if self._agree(self._listener.is_cancelled()):
            raise CancelledRequestError("The request was cancelled.")

    def _check(self, latents: torch.Tensor, step: int, total: int) -> None:
        if bool(torch.isfinite(latents).all()):
            return
        cache = None if self._cache is None else str(self._cache.stats())
        raise NanLatentsError(
            f"After step {step + 1} of {total} the latents contain NaN or infinity. "
            f"{f'Cache: {cache}. Try without the cache, or' if cache else 'Try'} another dtype, such as float32; if "
            "that does not help, the weights may be damaged.",
            step + 1,
            cache,
        )

    def _was_computed(self) -> bool | None:
        """Whether a denoiser computed the step that has ended; None if no cache says so."""
        stats = None if self._cache is None else self._cache.stats()
        if not isinstance(stats, PipelineStats):
            return None
        before = self._counts
        self._counts = {name: (each.computed, each.skipped) for name, each in stats.denoisers.items()}
        ran = [each for name, each in stats.denoisers.items() if self._counts[name] != before.get(name, (0, 0))]
        records = [record for each in ran for branch in each.branches.values() for record in branch.steps[-1:]]
        return any(record.computed for record in records) if records else None

    def _preview(self, step: int, total: int, latents: torch.Tensor) -> None:
        due = preview_steps(self._request.num_previews, total)
        if not due:
            self.no_preview = f"there is none within {total} step{'s' * (total > 1)}"
        if step + 1 not in due:
            return
        scheduler = getattr(self._pipeline, "scheduler", None)
        params = self._request.params
        latents, before = (_first_branch(each) for each in (latents, self._before))
        clean = predict_clean(scheduler, before, latents, step)
        height, width = params.height or self._size[0], params.width or self._size[1]
        if height is None and self._request.images:  # Of the same shape, as a rule.
            width, height = upright_size(self._request.images[0])
        try:
            images = decode_latents(self._pipeline, clean, height, width)
            if len(images) != 1:
                raise NoPreview(f"there are {len(images)} latents for one output")
        except NoPreview as error:
            self.no_preview = str(error)
            return
        self.no_preview = ""
        self._listener.on_event(Preview(step + 1, total, self._index, images[0]))


def _first_branch(latents: Any) -> Any:
    """What a denoiser is given may hold the latents once for each branch of the guidance."""
    if latents is None or len(latents) == 1:
        return latents
    first, *others = latents.split(1)
    return first if all(torch.equal(first, other) for other in others) else latents


def preview_steps(num_previews: int, num_steps: int) -> set[int]:
    """The steps, counted from 1, after which there is a preview: evenly spaced, and none after the last."""
    steps = (round(num_steps * number / (num_previews + 1)) for number in range(1, num_previews + 1))
    return {step for step in steps if 0 < step < num_steps}


@contextlib.contextmanager
def follow_steps(watch: StepWatch, pipeline: Any, call: dict[str, Any], takes: Collection[str]) -> Iterator[None]:
    """Let a watch see every step of a pipeline call that is made within."""
    watch.check_cancelled()
    if CALLBACK in takes:
        call[CALLBACK] = watch.call_back
        yield
        return
    hook = _StepHook(pipeline, watch)
    with contextlib.ExitStack() as undo:
        for denoiser in find_denoisers(pipeline).values():  # Each takes its share of the steps.
            install_hook(undo, denoiser, HOOK_NAME, hook)
        yield
        hook.end()


class _StepHook(ModelHook):
    """Sees steps end on a pipeline without callbacks."""

    def __init__(self, pipeline: Any, watch: StepWatch) -> None:
        self._run = Run(pipeline, None)
        self._watch = watch
        self._step: int | None = None
        self._first = 0
        self._total: int | None = None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        position = self._run.position()
        if position is None:  # The scheduler keeps no count; a request can still be cancelled.
            self._watch.check_cancelled()
        elif self._step is None:
            self._step = self._first = position.step
            left = position.total - position.step  # Fewer than the scheduler has where an image is redrawn.
            self._total = min(left, self._run.total() or left)
        elif position.step > self._step:
            latents = args[0] if args else kwargs.get("hidden_states")
            self._watch.end_step(self._step - self._first, latents, self._total)
            self._step = position.step
        return args, kwargs

    def end(self) -> None:
        """Report the last step, which no later call ends."""
        if self._step is not None:
            self._watch.end_step(self._step - self._first, None, self._total)
