"""Checks, progress, previews and cancellation after each step of a run, as its scheduler makes it."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from PIL.Image import Image

from ..cache import CacheBackend, PipelineStats
from ..core.errors import CancelledRequestError, NanLatentsError
from ..hooks import Run
from .calling import replaced
from .events import Listener, Preview, Progress
from .previews import NoPreview, decode_latents, predict_clean
from .request import Request


class StepWatch:
    """Follows the steps of one run, which makes the output `index` of a request."""

    def __init__(
        self,
        pipeline: Any,
        request: Request,
        index: int,
        listener: Listener,
        cache: CacheBackend | None,
        size: tuple[int | None, int | None],
        agree: Callable[[bool], bool],
    ) -> None:
        """`size`: that of a request which gives none. `agree` turns this rank's flag into the one of all ranks."""
        self.pipeline, self._request, self._index, self._listener = pipeline, request, index, listener
        self._cache, self._size, self._agree = cache, size, agree
        self.no_preview = f"{type(pipeline).__name__} does not show its latents between steps"
        """Why there was no preview, if there was none."""
        self._run = Run(pipeline, None)
        self._loop: Any = object()
        self._leader: Any = None
        self._step = self._total = 0
        self._began = time.perf_counter()
        self._counts = 0, 0
        """The forwards that were computed, and that were skipped."""

    def end_step(self, scheduler: Any, latents: Any, before: Any) -> None:
        """A scheduler has ended a step with these latents, which it began with those `before`. Of several that take
        turns, as for a video and its sound, the first one counts."""
        if (loop := self._run.loop()) is not self._loop:  # Some pipelines have several, one after the other.
            self._loop, self._leader, self._step, self._total = loop, scheduler, 0, self._num_steps()
        if scheduler is not self._leader:
            return
        self._step += 1
        self._total = max(self._total, self._step)
        if not bool(torch.isfinite(latents).all()):  # This waits for the device.
            raise self._nan_error()
        seconds, count = time.perf_counter() - self._began, self._request.num_images
        is_computed = self._was_computed()
        self._listener.on_event(Progress(self._step, self._total, self._index, count, seconds, is_computed))
        self.check_cancelled()
        if self._request.num_previews:
            self._preview(latents, before)
        self._began = time.perf_counter()

    def check_cancelled(self) -> None:
        """Stop if the request was cancelled."""
        if self._agree(self._listener.is_cancelled()):
            raise CancelledRequestError("The request was cancelled.")

    def _num_steps(self) -> int:
        """How many steps there are, once the first one has ended: fewer than the scheduler has where an image is
        redrawn."""
        position, total = self._run.position(), self._run.total() or 1
        return total if position is None else min(total, position.total - position.step + 1)

    def _nan_error(self) -> NanLatentsError:
        cache = None if self._cache is None else str(self._cache.stats())
        return NanLatentsError(
            f"After step {self._step} of {self._total} the latents contain NaN or infinity. "
            f"{f'Cache: {cache}. Try without the cache, or' if cache else 'Try'} another dtype, such as float32; if "
            "that does not help, the weights may be damaged.",
            self._step,
            cache,
        )

    def _was_computed(self) -> bool | None:
        """Whether a denoiser computed the step that has ended; None if no cache says so."""
        stats = None if self._cache is None else self._cache.stats()
        if not isinstance(stats, PipelineStats):
            return None
        before, self._counts = self._counts, (stats.computed, stats.skipped)
        return None if self._counts == before else stats.computed > before[0]

    def _preview(self, latents: torch.Tensor, before: Any) -> None:
        due = preview_steps(self._request.num_previews, self._total)
        if not due:
            self.no_preview = f"there is none within {self._total} step{'s' * (self._total > 1)}"
        if self._step not in due:
            return
        params, arguments = self._request.params, (self._request.arguments or {}).values()
        height, width = next((value.size[::-1] for value in arguments if isinstance(value, Image)), self._size)
        try:
            clean = predict_clean(self._leader, before, latents)
            image = decode_latents(self.pipeline, clean[:1], (params.height or height, params.width or width))
        except NoPreview as error:
            self.no_preview = str(error)
        else:
            self.no_preview = ""
            self._listener.on_event(Preview(self._step, self._total, self._index, image))


def preview_steps(num_previews: int, num_steps: int) -> set[int]:
    """The steps, counted from 1, after which there is a preview: evenly spaced, and none after the last."""
    steps = (round(num_steps * number / (num_previews + 1)) for number in range(1, num_previews + 1))
    return {step for step in steps if 0 < step < num_steps}


def follow_steps(watch: StepWatch) -> contextlib.AbstractContextManager[None]:
    """Let a watch see each step of its pipeline's scheduler inside."""
    watch.check_cancelled()
    scheduler = getattr(watch.pipeline, "scheduler", None)
    if not hasattr(scheduler, "step"):
        return contextlib.nullcontext()
    return replaced(scheduler, "step", _FollowedStep(scheduler, watch))


class _FollowedStep:
    """The step of a scheduler that a watch follows. It has the signature of the scheduler's own, which pipelines look
    at. Copies that a pipeline makes of the scheduler are followed, too."""

    def __init__(self, scheduler: Any, watch: StepWatch) -> None:
        functools.update_wrapper(self, scheduler.step)
        self._scheduler, self._own, self._watch = scheduler, scheduler.step, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._own(*args, **kwargs)
        self._watch.end_step(self._scheduler, output[0], kwargs["sample"] if "sample" in kwargs else args[2])
        return output

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._scheduler))
        return self if copied is None else _FollowedStep(copied, self._watch)
