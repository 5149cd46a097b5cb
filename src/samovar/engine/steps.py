"""What happens between two steps? The latents are checked, progress is told, and a request that was taken back stops.

Most pipelines call back at the end of a step. On those that do not, hooks on the denoisers see a step end when the
next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..cache import CacheBackend, PipelineStats
from ..errors import CancelledRequestError, NanLatentsError
from ..hooks import HookRegistry, ModelHook, Run
from .events import Listener, Preview, Progress
from .previews import clean, decoded

HOOK_NAME = "samovar_steps"
CALLBACK = "callback_on_step_end"


class Shot(NamedTuple):
    """One picture of a call of the pipeline."""

    request: int
    """Whose it is, among the requests that are made together."""
    picture: int
    num_pictures: int
    seed: int
    num_previews: int


class StepWatch:
    """Follows one call of a pipeline."""

    def __init__(
        self,
        pipeline: Any,
        cache: CacheBackend | None,
        shots: Sequence[Shot],
        listener: Listener,
        agree: Callable[[bool], bool],
        size: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """`agree` makes of this rank's word that of all, as all must stop at the same step."""
        self._pipeline = pipeline
        self._cache = cache
        self._shots = shots
        self._listener = listener
        self._agree = agree
        self._size = size
        self._run = Run(pipeline, None)
        self._began = time.perf_counter()
        self._before: torch.Tensor | None = None
        self._counts = (0, 0)
        self._wants_previews = any(shot.num_previews for shot in shots)

    def call_back(self, pipeline: Any, step: int, when: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        """What a pipeline is given as its callback."""
        self.end_step(step, tensors.get("latents"))
        return tensors

    def end_step(self, step: int, latents: Any) -> None:
        """Step `step`, counted from 0, has ended with these latents."""
        total = max(self._run.total() or 0, step + 1)
        if isinstance(latents, torch.Tensor):
            self._check(latents, step, total)  # This waits for the device, so that the time told is the true one.
        now = time.perf_counter()
        is_computed = self._is_computed()
        for shot in self._first_of_each():
            told = Progress(step + 1, total, shot.picture, shot.num_pictures, now - self._began, is_computed)
            self._listener.tell(shot.request, told)
        self.check_cancelled()
        if isinstance(latents, torch.Tensor) and self._wants_previews:
            self._preview(step, total, latents)
            self._before = latents.clone()  # Some schedulers write into what they are given.
        self._began = time.perf_counter()

    def check_cancelled(self) -> None:
        """Stop if nobody waits for any picture of this call."""
        if self._agree(all(self._listener.is_cancelled(shot.request) for shot in self._shots)):
            raise CancelledRequestError("The request was taken back.")

    def _first_of_each(self) -> list[Shot]:
        seen: dict[int, Shot] = {}
        for shot in self._shots:
            seen.setdefault(shot.request, shot)
        return list(seen.values())

    def _check(self, latents: torch.Tensor, step: int, total: int) -> None:
        if bool(torch.isfinite(latents).all()):
            return
        cache = None if self._cache is None else str(self._cache.stats())
        raise NanLatentsError(
            f"After step {step + 1} of {total} the latents hold values that are infinite or no numbers. "
            f"{'Cache: ' + cache + '. Try it without the cache, or' if cache else 'Try'} another dtype, such as "
            "float32; if that does not help, the weights may be damaged.",
            step + 1,
            cache,
        )

    def _is_computed(self) -> bool | None:
        stats = None if self._cache is None else self._cache.stats()
        if not isinstance(stats, PipelineStats):
            return None
        before, self._counts = self._counts, (stats.computed, stats.skipped)
        return None if self._counts == before else self._counts[0] > before[0]

    def _preview(self, step: int, total: int, latents: torch.Tensor) -> None:
        due = [i for i, shot in enumerate(self._shots) if step + 1 in preview_steps(shot.num_previews, total)]
        if not due:
            return
        images = decoded(self._pipeline, clean(self._scheduler, self._before, latents, step), *self._size)
        if len(images) == len(self._shots):
            for i in due:
                shot = self._shots[i]
                self._listener.tell(shot.request, Preview(step + 1, total, shot.picture, images[i]))

    @property
    def _scheduler(self) -> Any:
        return getattr(self._pipeline, "scheduler", None)


def preview_steps(num_previews: int, num_steps: int) -> set[int]:
    """After which steps, counted from 1, there are previews: evenly spaced, and none after the last."""
    steps = (round(num_steps * number / (num_previews + 1)) for number in range(1, num_previews + 1))
    return {step for step in steps if 0 < step < num_steps}


class StepHook(ModelHook):
    """Sees steps end on a pipeline that does not say so itself."""

    def __init__(self, pipeline: Any, watch: StepWatch) -> None:
        self._run = Run(pipeline, None)
        self._watch = watch
        self._step: int | None = None
        self._first = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        position = self._run.position()
        if position is None:  # The scheduler does not say where it is; a request can be taken back all the same.
            self._watch.check_cancelled()
        elif self._step is None:
            self._step = self._first = position.step
        elif position.step > self._step:
            self._watch.end_step(self._step - self._first, args[0] if args else kwargs.get("hidden_states"))
            self._step = position.step
        return args, kwargs

    def end(self) -> None:
        """After the run: its last step has no next one that would tell."""
        if self._step is not None:
            self._watch.end_step(self._step - self._first, None)

    def attach(self, denoisers: Sequence[torch.nn.Module]) -> None:
        """One hook for all denoisers of a pipeline, as each takes its share of the steps."""
        for denoiser in denoisers:
            HookRegistry.get_or_create(denoiser).register_hook(HOOK_NAME, self)

    @staticmethod
    def detach(denoisers: Sequence[torch.nn.Module]) -> None:
        for denoiser in denoisers:
            HookRegistry.get_or_create(denoiser).remove_hook(HOOK_NAME)
