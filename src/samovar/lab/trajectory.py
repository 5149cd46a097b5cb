"""How does what a model predicts change from step to step? Watched while exact pictures are made.

Of the predictions themselves nothing is kept beyond the run: only how they lie to each other, the inner products of
every two steps. As a forecast is a weighted sum of computed predictions, the error of any of them at any step
follows from these alone (`samovar.lab.fitting`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from ..arch import find_denoisers
from ..cache.config import EVERY_BRANCH
from ..errors import ModelError
from ..hooks import HookOrder, HookRegistry, ModelHook, current_context
from .fitting import Products, Vector, outlier_step
from .methods import EXACT, Method, Notes

LARGEST_MISS = 1e-2
"""Predictions that are off from a sum of the branches by no more, relatively, are such sums, of rounded numbers."""
_HOOK = "lab_branches"


@dataclass(frozen=True)
class Trajectory:
    """Some pictures of one model and number of steps."""

    places: tuple[float, ...]
    """Where each step is, in the cache's terms: less noise is further on."""
    sizes: tuple[float, ...]
    """How much each step's prediction counts for in the picture."""
    products: torch.Tensor
    """(pictures, steps, steps): inner products of the predictions of every two steps, as float64."""
    by_branch: Products | None = None
    """The same of what each branch gave, on average over pictures, where the pipeline names its branches and mixes
    them in fixed proportions."""
    early: Mapping[str, Vector] | None = None
    """(pictures, steps, steps) by branch, of the first steps: what tells hard pictures. With `by_branch`."""

    @property
    def together(self) -> Products:
        """On average over pictures, in the form of the cache: one branch that stands for all."""
        return Products((EVERY_BRANCH,), (1.0,), self.sizes, self.products.mean(0).numpy())

    @property
    def steps(self) -> int:
        return len(self.places)

    def reuse_errors(self) -> torch.Tensor:
        """(steps, steps): the error of using step i's prediction at step j, relative to that of step j, on average."""
        squares = torch.diagonal(self.products, dim1=1, dim2=2)
        distances = squares[:, :, None] + squares[:, None, :] - 2 * self.products
        return (distances.clamp_min(0) / squares[:, None, :].clamp_min(1e-30)).sqrt().mean(0)

    @staticmethod
    def read(notes: Sequence[Mapping[str, Any]]) -> Trajectory:
        """From what `watched_exact` noted of each call."""
        first = notes[0]
        products = [torch.tensor(note["products"], dtype=torch.float64) for note in notes]
        sizes = tuple(first["sizes"])
        by_branch = _mean_by_branch(notes, sizes)
        names = by_branch.branches if by_branch is not None else ()
        early = {name: np.concatenate([np.array(note["branches"]["early"][name]) for note in notes]) for name in names}
        return Trajectory(tuple(first["places"]), sizes, torch.cat(products), by_branch, early or None)


def watched_exact() -> Method:
    """The exact pictures, with notes for `Trajectory.read`."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Notes]:
        denoisers = find_denoisers(pipeline)
        branches = BranchWatchHook()
        watch = _SchedulerWatch(pipeline.scheduler, branches)
        with contextlib.ExitStack() as undo:
            undo.enter_context(watch.on())
            if len(denoisers) == 1:
                registry = HookRegistry.get_or_create(*denoisers.values())
                registry.register_hook(_HOOK, branches)
                undo.callback(registry.remove_hook, _HOOK)
            yield watch.notes

    return Method("exact, watched", EXACT.family, {}, attached)


class BranchWatchHook(ModelHook):
    """Keeps what a denoiser gave in each branch that the pipeline names, until the run is over."""

    order = HookOrder.OTHER

    def __init__(self) -> None:
        self._outputs: dict[str, list[torch.Tensor]] = {}

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        leaf = next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))
        self._outputs.setdefault(current_context().branch or "", []).append(leaf.detach().clone())
        return output

    def take(self, predictions: Sequence[torch.Tensor]) -> dict[str, Any] | None:
        """What the branches of the run that has ended have to do with each other and with its predictions."""
        outputs, self._outputs = self._outputs, {}
        shapes = [prediction.shape for prediction in predictions]
        if "" in outputs or not outputs or any([o.shape for o in of] != shapes for of in outputs.values()):
            return None
        guidance = _guidance(list(outputs.values()), predictions)
        if guidance is None:
            return None
        means: Any = 0.0
        early: dict[str, list[Any]] = {name: [] for name in outputs}
        last, count = outlier_step(len(predictions)) + 1, len(predictions)
        for picture in range(len(predictions[0])):
            rows = torch.stack([o[picture].flatten() for of in outputs.values() for o in of]).double()
            products = rows @ rows.T
            means = means + products / len(predictions[0])
            for number, of in enumerate(early.values()):
                own = slice(number * count, number * count + last)
                of.append(products[own, own].tolist())
        return {
            "names": list(outputs), "guidance": guidance, "products": means.cpu().tolist(), "early": early,
            "pictures": len(predictions[0]),
        }  # fmt: skip


def _guidance(branches: Sequence[Sequence[torch.Tensor]], predictions: Sequence[torch.Tensor]) -> list[float] | None:
    """What each branch counts for in the predictions, found by least squares; None if they are no such sums."""
    sums = torch.zeros(len(branches), len(branches), dtype=torch.float64)
    target, total = torch.zeros(len(branches), 1, dtype=torch.float64), 0.0
    for step, prediction in enumerate(predictions):
        rows = torch.stack([of[step].flatten() for of in branches]).double()
        wanted = prediction.double().flatten()
        sums += (rows @ rows.T).cpu()
        target += (rows @ wanted).cpu()[:, None]
        total += float(wanted @ wanted)
    found = torch.linalg.lstsq(sums, target).solution
    missed = total - float((2 * target - sums @ found).T @ found)
    is_sum = missed <= LARGEST_MISS**2 * total
    return [round(value, 6) for value in found.flatten().tolist()] if is_sum else None


def _mean_by_branch(notes: Sequence[Mapping[str, Any]], sizes: tuple[float, ...]) -> Products | None:
    branches = [note["branches"] for note in notes]
    first = branches[0]
    if any(of is None or of["names"] != first["names"] for of in branches):
        return None
    count = sum(of["pictures"] for of in branches)
    values = sum(np.array(of["products"]) * (of["pictures"] / count) for of in branches)
    guidance = [sum(of["guidance"][n] for of in branches) / len(branches) for n in range(len(first["names"]))]
    return Products(tuple(first["names"]), tuple(guidance), sizes, np.asarray(values))


class _SchedulerWatch:
    """Sees what the scheduler is given: the prediction of all branches together, as guidance has mixed them."""

    def __init__(self, scheduler: Any, branches: BranchWatchHook) -> None:
        self._scheduler, self._branches = scheduler, branches
        self._predictions: list[torch.Tensor] = []

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        own: Callable[..., Any] = self._scheduler.step

        @functools.wraps(own)
        def step(model_output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._predictions.append(model_output.detach().clone())
            return own(model_output, *args, **kwargs)

        vars(self._scheduler)["step"] = step
        try:
            yield
        finally:
            del vars(self._scheduler)["step"]

    def notes(self) -> dict[str, Any]:
        """Of the run that has ended, which is then forgotten."""
        predictions, self._predictions = self._predictions, []
        of_branches = self._branches.take(predictions)
        places, sizes = _places(self._scheduler)
        if len(predictions) != len(places):
            raise ModelError(
                f"{type(self._scheduler).__name__} was asked for {len(predictions)} of {len(places)} steps by name, so "
                "they cannot be watched. A pipeline that uses a copy of its scheduler can be calibrated by branches, "
                "but not tuned."
            )
        products = _products(predictions).tolist()
        return {"places": places, "sizes": sizes, "products": products, "branches": of_branches}


def _places(scheduler: Any) -> tuple[list[float], list[float]]:
    """Where the steps of the last run were, and how large each was."""
    count = len(scheduler.timesteps)
    sigmas = getattr(scheduler, "sigmas", None)
    if not isinstance(sigmas, torch.Tensor) or len(sigmas) != count + 1:  # A scheduler that does not think in noise.
        return [float(step) for step in range(count)], [1.0] * count
    noise = [float(sigma) for sigma in sigmas.tolist()]
    return [-sigma for sigma in noise[:-1]], [abs(a - b) for a, b in itertools.pairwise(noise)]


def _products(predictions: Sequence[torch.Tensor]) -> torch.Tensor:
    """(pictures, steps, steps). As 64 bit numbers: errors are small differences of them."""
    pictures = len(predictions[0])
    rows = [torch.stack([p[index].flatten() for p in predictions]).double() for index in range(pictures)]
    return torch.stack([row @ row.T for row in rows]).cpu()
