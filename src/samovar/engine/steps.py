"""Checks, progress, previews and cancellation after each step of a run.

Most pipelines call back after a step. On the others, hooks on the denoisers see a step end when the next one begins.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from PIL.Image import Image

from ..arch import find_denoisers
from ..cache import CacheBackend, PipelineStats
from ..core.errors import CancelledRequestError, NanLatentsError
from ..hooks import HookOrder, ModelHook, Run, current_run, install_hook
from .events import Listener, Preview, Progress
from .previews import NoPreview, decode_latents, predict_clean
from .request import Request

HOOK_NAME = "samovar_steps"
CALLBACK = "callback_on_step_end"


class StepWatch:
    """Follows the steps of one run, which makes the output `index` of a request."""

    def __init__(
        self,
        pipeline: Any,
        request: Request,
        index: int,
        listener: Listener,
        cache: CacheBackend | None = None,
        size: tuple[int | None, int | None] = (None, None),
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`size`: that of a request which gives none. `agree` turns this rank's flag into the one of all ranks."""
        self.pipeline, self._request, self._index, self._listener = pipeline, request, index, listener
        self._cache, self._size, self._agree = cache, size, agree
        self.no_preview = f"{type(pipeline).__name__} does not show its latents between steps"
        """Why there was no preview, if there was none."""
        self._run = Run(pipeline, None)
        self._began = time.perf_counter()
        self._before: torch.Tensor | None = None
        self._counts = 0, 0
        """The forwards that were computed, and that were skipped."""

    def call_back(self, pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """The callback for the pipeline. What it returned would take the place of the pipeline's own tensors, and some
        have them in another form by then."""
        self.end_step(step, tensors.get("latents"))
        return {}

    def end_step(self, step: int, latents: Any, total: int | None = None) -> None:
        """Step `step` of `total`, counted from 0, has ended with these latents."""
        total = max(total or self._run.total() or 0, step + 1)
        latents = latents if isinstance(latents, torch.Tensor) else None
        if latents is not None and not bool(torch.isfinite(latents).all()):  # This waits for the device.
            raise self._nan_error(step + 1, total)
        seconds = time.perf_counter() - self._began
        count = self._request.num_images
        self._listener.on_event(Progress(step + 1, total, self._index, count, seconds, self._was_computed()))
        self.check_cancelled()
        if latents is not None and self._request.num_previews:
            self._preview(step, total, latents)
            self._before = latents.clone()  # Some schedulers write into their input.
        self._began = time.perf_counter()

    def check_cancelled(self) -> None:
        """Stop if the request was cancelled."""
        if self._agree(self._listener.is_cancelled()):
            raise CancelledRequestError("The request was cancelled.")

    def _nan_error(self, step: int, total: int) -> NanLatentsError:
        cache = None if self._cache is None else str(self._cache.stats())
        return NanLatentsError(
            f"After step {step} of {total} the latents contain NaN or infinity. "
            f"{f'Cache: {cache}. Try without the cache, or' if cache else 'Try'} another dtype, such as float32; if "
            "that does not help, the weights may be damaged.",
            step,
            cache,
        )

    def _was_computed(self) -> bool | None:
        """Whether a denoiser computed the step that has ended; None if no cache says so."""
        stats = None if self._cache is None else self._cache.stats()
        if not isinstance(stats, PipelineStats):
            return None
        before, self._counts = self._counts, (stats.computed, stats.skipped)
        return None if self._counts == before else stats.computed > before[0]

    def _preview(self, step: int, total: int, latents: torch.Tensor) -> None:
        due = preview_steps(self._request.num_previews, total)
        if not due:
            self.no_preview = f"there is none within {total} step{'s' * (total > 1)}"
        if step + 1 not in due:
            return
        params = self._request.params
        # What a denoiser is given may hold the latents once for each branch of the guidance.
        clean = predict_clean(getattr(self.pipeline, "scheduler", None), self._before, latents, step)[:1]
        try:
            arguments = (self._request.arguments or {}).values()
            like = next((value.size[::-1] for value in arguments if isinstance(value, Image)), self._size)
            image = decode_latents(self.pipeline, clean, (params.height or like[0], params.width or like[1]))
        except NoPreview as error:
            self.no_preview = str(error)
        else:
            self.no_preview = ""
            self._listener.on_event(Preview(step + 1, total, self._index, image))


def preview_steps(num_previews: int, num_steps: int) -> set[int]:
    """The steps, counted from 1, after which there is a preview: evenly spaced, and none after the last."""
    steps = (round(num_steps * number / (num_previews + 1)) for number in range(1, num_previews + 1))
    return {step for step in steps if 0 < step < num_steps}


@contextlib.contextmanager
def follow_steps(watch: StepWatch, calls_back: bool) -> Iterator[dict[str, Any]]:
    """Let a watch see every step of a pipeline call that is made within, with these arguments."""
    watch.check_cancelled()
    if calls_back:
        yield {CALLBACK: watch.call_back}
        return
    hook = _StepHook(watch)
    with contextlib.ExitStack() as undo:
        for denoiser in find_denoisers(watch.pipeline).values():  # Each takes its share of the steps.
            install_hook(undo, denoiser, f"{HOOK_NAME}_{id(hook)}", hook)
        yield {}
        hook.end()


class _StepHook(ModelHook):
    """Sees steps end on a pipeline without callbacks. Others may share its denoisers."""

    order = HookOrder.OUTERMOST

    def __init__(self, watch: StepWatch) -> None:
        self._run, self._watch = Run(watch.pipeline, None), watch
        self._step: int | None = None
        self._first = 0
        self._total: int | None = None

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        run = current_run()
        if run is None or run.pipeline is not self._watch.pipeline:
            return args, kwargs
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
