"""The contestants of `gpu_graphs.py`, with their settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import gpu_cache
import gpu_models as gpu
import torch

from samovar.cache import AutoConfig, TeaCacheConfig, apply_teacache_hook
from samovar.cache.config import CacheConfig
from samovar.graphs import apply_graphs
from samovar.hooks import HookRegistry

STEPS, COMPUTED = 28, 10
"""Of a whole run."""
SKIPS = 20
"""Steps that are skipped in a row, where that is measured by schedule."""

Attach = Callable[[torch.nn.Module], Any]


def compiled(mode: str | None) -> Attach:
    def attach_it(model: Any) -> None:
        if mode is None:
            model.compile_repeated_blocks()
        else:
            model.compile(mode=mode)

    return attach_it


def under(cache: Callable[[torch.nn.Module, bool], None], skips: bool, then: Attach | None = None) -> Attach:
    """A cache that computes every step, or skips all but the first ones, and what makes its forwards faster."""

    def attach_it(model: torch.nn.Module) -> None:
        cache(model, skips)
        if then is not None:
            then(model)

    return attach_it


SIGNAL = gpu_cache.samovar(3).attach
SCHEDULE = gpu_cache.samovar(scheduled=True).attach
COMPUTE: dict[str, Attach] = {
    "eager": lambda model: None,
    "graphs": apply_graphs,
    "schedule + graphs": under(SCHEDULE, False, apply_graphs),
    "signal + graphs": under(SIGNAL, False, apply_graphs),
    "auto + graphs": under(gpu_cache.auto, False, apply_graphs),
    "signal": under(SIGNAL, False),
    "compile": compiled(None),
    "FirstBlockCache + compile": under(gpu_cache.first_block_cache, False, compiled(None)),
    "DBCache + compile": under(gpu_cache.dbcache, False, compiled(None)),
    "reduce-overhead": compiled("reduce-overhead"),
}
"""By name, what is attached so that every step is computed; slow ones last."""
SKIP: dict[str, Attach] = {
    "signal + graphs": under(SIGNAL, True, apply_graphs),
    "signal": under(SIGNAL, True),
    "FirstBlockCache + compile": under(gpu_cache.first_block_cache, True, compiled(None)),
    "DBCache + compile": under(gpu_cache.dbcache, True, compiled(None)),
}
"""The same so that all steps after the first ones are skipped."""
IN_TURN: dict[str, dict[str, Any]] = {
    "schedule + graphs": {},
    "output schedule + graphs": {"forecast": "linear", "forecast_of": "output"},
}
"""Settings of caches that compute a step and then skip some, by schedule, again and again."""
FIRST = 4
"""Steps that they compute before."""


def in_turn(settings: dict[str, Any], rounds: int) -> Attach:
    def attach_it(model: torch.nn.Module) -> None:
        mask = "#" * FIRST + ("#" + "." * SKIPS) * rounds
        apply_teacache_hook(model, TeaCacheConfig(schedule=mask, **settings))
        apply_graphs(model)

    return attach_it


SLOW = tuple(name for name in COMPUTE if "compile" in name or name == "reduce-overhead")
"""They take minutes."""


def spread(count: int) -> list[bool]:
    """A schedule of a run: this number of computed steps, the first ones and then evenly."""
    last = [step * (count - 1) // STEPS for step in range(-1, STEPS)]
    return [step < 2 or last[step] != last[step + 1] for step in range(STEPS)]


def threshold_for(count: int, distances: list[float]) -> float:
    """Of the signal's changes from step to step, the threshold at which this number of steps is computed."""

    def computed(threshold: float) -> int:
        summed, found = 0.0, STEPS - len(distances)
        for distance in distances:
            summed += distance
            if summed >= threshold:
                summed, found = 0.0, found + 1
        return found

    thresholds = sorted(distance * factor for distance in distances for factor in (0.5, 1.5, 2.5, 3.5, 4.5))
    return min(thresholds, key=lambda threshold: abs(computed(threshold) - count))


def signal_for_runs(model: torch.nn.Module, inputs: list[dict[str, Any]]) -> TeaCacheConfig:
    """A threshold by which about 10 steps of a run are computed."""
    plain: dict[str, Any] = {"coefficients": (0, 0, 0, 1, 0), "last_steps": 0, "max_skips": None, "min_steps": 0}
    walk = Walk(model, inputs, lambda model: None)
    hook = apply_teacache_hook(walk.model, TeaCacheConfig(rel_l1_thresh=1e-30, first_steps=2, **plain))
    walk.run(hook)
    steps = hook.stats().branches["cond"].steps
    hook.detach()
    distances = [step.distance for step in steps if step.distance is not None]
    return TeaCacheConfig(rel_l1_thresh=threshold_for(COMPUTED, distances), first_steps=2, **plain)


RUNS: dict[str, Callable[..., CacheConfig]] = {
    "schedule + graphs": lambda *_: TeaCacheConfig(schedule=spread(COMPUTED)),
    "output schedule + graphs": lambda *_: TeaCacheConfig(
        schedule=spread(COMPUTED), forecast="linear", forecast_of="output"
    ),
    "signal + graphs": signal_for_runs,
    "auto + graphs": lambda *_: AutoConfig("fast"),
}
"""Caches that make whole runs."""


class Walk:
    """A model of its own, called step after step."""

    def __init__(self, model: torch.nn.Module, inputs: list[dict[str, Any]], put: Attach) -> None:
        self.model: Any = gpu.twin(model)
        self._all, self._inputs = inputs, itertools.cycle(inputs)
        put(self.model)

    def step(self) -> Any:
        with self.model.cache_context("cond"):
            return self.model(**next(self._inputs))

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def must_have_taken(self, mask: str) -> None:
        """See that the last steps were computed and skipped as they should have been, if there is a cache of ours."""
        hook: Any = HookRegistry.get_or_create(self.model).get_hook("teacache")
        found = mask if hook is None else hook.stats().branches["cond"].mask[-len(mask) :]
        if found != mask:
            raise RuntimeError(f"The last steps were {found}, and should have been {mask}.")

    @torch.no_grad()
    def run(self, hook: Any) -> None:
        """A run of a cache, from its first step on."""
        hook.refresh(self.model, STEPS)
        self._inputs = itertools.cycle(self._all)
        self.steps(STEPS)
