"""How does the model's prediction change from step to step? Watched while exact images are made.

Predictions are not kept beyond the run: only the inner products of every two steps. A forecast is a weighted sum of
computed predictions, so the error of any forecast follows from these alone (`samovar.lab.fitting`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..arch import find_denoisers
from ..cache.config import EVERY_BRANCH
from ..core.errors import ModelError
from ..hooks import HookOrder, ModelHook, current_context, install_hook
from .fitting import Products, Vector, outlier_step
from .methods import EXACT, Method

_LARGEST_MISS = 1e-2
"""Predictions that differ from a weighted sum of the branches by no more than this are such sums, but rounded."""
_HOOK = "lab_outputs"

Outputs = dict[str, list[torch.Tensor]]


def read_products(notes: Sequence[Mapping[str, Any]]) -> list[Products]:
    """The products of each image, from the notes of each call with the method `WATCHED`: by branch if the pipeline
    names its branches and mixes them in fixed proportions, otherwise of the prediction."""
    images = [
        Products(tuple(note["guidance"]), tuple(note["guidance"].values()), tuple(note["sizes"]), np.array(values))
        for note in notes
        for values in note["products"]
    ]
    is_alike = all(image.branches == images[0].branches for image in images)
    return images if is_alike else [image.mixed() for image in images]


def early_products(images: Sequence[Products]) -> dict[str, Vector] | None:
    """By branch, the products of the first steps of each image: (images, steps, steps). They show outliers. None if the
    branches are not known."""
    branches, count = images[0].branches, len(images[0].sizes)
    if branches == (EVERY_BRANCH,):
        return None
    last = outlier_step(count) + 1
    own = {name: slice(number * count, number * count + last) for number, name in enumerate(branches)}
    return {name: np.stack([image.values[part, part] for image in images]) for name, part in own.items()}


class RunWatch(ModelHook):
    """Keeps the denoiser's outputs by branch, and the predictions that the scheduler gets, until the run is over."""

    order = HookOrder.OTHER  # It ends before the hook that knows the branch.

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.predictions: list[torch.Tensor] = []
        self.outputs: Outputs = {}

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        leaf = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        self.outputs.setdefault(current_context().branch or "", []).append(leaf.detach().clone())
        return output

    @contextlib.contextmanager
    def on_scheduler(self) -> Iterator[None]:
        own: Callable[..., Any] = self._scheduler.step

        @functools.wraps(own)
        def step(model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.predictions.append(model_output.detach().clone())
            return own(model_output, *args, **kwargs)

        vars(self._scheduler)["step"] = step
        try:
            yield
        finally:
            del vars(self._scheduler)["step"]

    def take_outputs(self) -> Outputs:
        """The outputs of the run that has ended, which is then forgotten."""
        outputs, self.outputs, self.predictions = self.outputs, {}, []
        return outputs

    def __call__(self) -> dict[str, Any]:
        """The notes: how far each step moves the latents, and the inner products of each image."""
        predictions, outputs = self.predictions, self.take_outputs()
        sizes = _sizes_of(self._scheduler)
        if len(predictions) != len(sizes):
            raise ModelError(
                f"{type(self._scheduler).__name__}.step was called for {len(predictions)} of {len(sizes)} steps, so "
                "the run cannot be watched: the pipeline uses a copy of its scheduler. It can be calibrated, but not "
                "tuned."
            )
        guidance = _guidance(outputs, predictions)
        if guidance is None:
            outputs, guidance = {EVERY_BRANCH: predictions}, {EVERY_BRANCH: 1.0}
        products = [
            Products.of({name: [o[i] for o in of] for name, of in outputs.items()}, sizes, guidance).values.tolist()
            for i in range(len(predictions[0]))
        ]
        return {"sizes": sizes, "guidance": guidance, "products": products}


@contextlib.contextmanager
def watch(pipeline: Any) -> Iterator[RunWatch]:
    """Watch the pipeline's scheduler and, if it has a single denoiser, its outputs."""
    denoisers = list(find_denoisers(pipeline).values())
    run = RunWatch(pipeline.scheduler)
    with contextlib.ExitStack() as undo:
        undo.enter_context(run.on_scheduler())
        if len(denoisers) == 1:
            install_hook(undo, denoisers[0], _HOOK, run)
        yield run


WATCHED = Method("exact, watched", EXACT.family, attached=watch)
"""The exact images, with notes for `read_products`."""


def _guidance(outputs: Outputs, predictions: Sequence[torch.Tensor]) -> dict[str, float] | None:
    """The weight of each branch in the predictions, by least squares. None if the predictions are not such sums, or
    the pipeline does not name its branches."""
    shapes = [prediction.shape for prediction in predictions]
    if "" in outputs or not outputs or any([o.shape for o in of] != shapes for of in outputs.values()):
        return None
    sums = torch.zeros(len(outputs), len(outputs), dtype=torch.float64)
    target, total = torch.zeros(len(outputs), 1, dtype=torch.float64), 0.0
    for step, prediction in enumerate(predictions):
        rows = torch.stack([of[step].flatten() for of in outputs.values()]).double()
        wanted = prediction.double().flatten()
        sums += (rows @ rows.T).cpu()
        target += (rows @ wanted).cpu()[:, None]
        total += float(wanted @ wanted)
    found = torch.linalg.lstsq(sums, target).solution
    missed = total - float((2 * target - sums @ found).T @ found)
    if missed > _LARGEST_MISS**2 * total:
        return None
    return dict(zip(outputs, (round(value, 6) for value in found.flatten().tolist()), strict=True))


def _sizes_of(scheduler: Any) -> list[float]:
    """How large each step of the last run was: the difference of noise levels, or 1 if the scheduler has none."""
    count = len(scheduler.timesteps)
    sigmas = getattr(scheduler, "sigmas", None)
    if not isinstance(sigmas, torch.Tensor) or len(sigmas) != count + 1:
        return [1.0] * count
    return [abs(a - b) for a, b in itertools.pairwise(sigmas.tolist())]
