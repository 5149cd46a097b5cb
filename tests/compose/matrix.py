"""Combinations of features, a set that covers all pairs, and what one of them gives.

A case is run twice: with everything, and with the same cache on one rank and everything resident. Both must give the
same steps and the same picture, to the bit where no collective is involved.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from offload.foreseen import count_small_layers
from pipelines import PIPELINES
from samovar import attach
from samovar.hooks import HookRegistry
from samovar.offload.stats import TimeStats
from samovar.parallel import SequenceParallelConfig

STEPS = 6
MOST_DIFFERENT = 1e-5
"""Of the picture's norm, where ranks add up in another order."""

FACTORS: dict[str, tuple[str, ...]] = {
    "pipeline": ("flux", "qwen-image", "sd3", "wan"),
    "cache": ("none", "measured", "schedule"),
    "offload": ("none", "model", "layerwise", "budget"),
    "ranks": ("1 rank", "Ulysses 2", "ring 2", "CFG 2"),
    "guidance": ("none", "two branches"),
}
"""Two branches are two calls in Flux, Qwen-Image and Wan, and one batch in SD3."""


class Case(NamedTuple):
    """One combination."""

    pipeline: str
    cache: str
    offload: str
    ranks: str
    guidance: str

    @property
    def num_ranks(self) -> int:
        return 1 if self.ranks == "1 rank" else 2

    @property
    def steps(self) -> int:
        """Auto leaves runs of fewer than eight steps alone."""
        return 10 if self.cache == "auto" else STEPS

    @property
    def reference(self) -> Case:
        """The same cache decisions on one rank, everything resident."""
        return self._replace(offload="none", ranks="1 rank")

    def settings(self) -> dict[str, Any]:
        """The arguments of `attach`."""
        caches: dict[str, dict[str, Any]] = {
            "none": {},
            "measured": {"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.3, "min_steps": 1}},
            "schedule": {"cache": {"backend": "tea_cache", "schedule": "#.##.#"}},
            "auto": {"cache": {"backend": "auto", "tolerance": 1e6}},
        }
        offloads: dict[str, dict[str, Any]] = {
            "none": {},
            "model": {"offload": {"mode": "model", "device": "cpu"}},
            "layerwise": {"offload": {"mode": "layerwise", "device": "cpu"}},
            "ahead": {"offload": {"mode": "layerwise", "device": "cpu", "precompute": True}},
            "budget": {
                "offload": {"mode": "layerwise", "device": "cpu", "activations": _ACTIVATIONS},
                "gpu_memory": _budget(self.pipeline),
            },
        }
        ranks: dict[str, dict[str, Any]] = {
            "1 rank": {},
            "Ulysses 2": {"parallel": SequenceParallelConfig(ulysses_degree=2)},
            "ring 2": {"parallel": SequenceParallelConfig(ring_degree=2)},
            "CFG 2": {"parallel": {"cfg_parallel_size": 2}},
        }
        return caches[self.cache] | offloads[self.offload] | ranks[self.ranks]

    def call(self) -> dict[str, Any]:
        """What the pipeline is called with beside its usual arguments."""
        scale = "true_cfg_scale" if "true_cfg_scale" in PIPELINES[self.pipeline].settings else "guidance_scale"
        return {scale: 1.0} if self.guidance == "none" else {}


class Drawn(NamedTuple):
    """What a case gave on one rank."""

    picture: torch.Tensor
    masks: tuple[str, ...]
    """By denoiser and branch, the steps that were computed."""
    is_bare: bool
    """Whether the pipeline was again what it was when everything was off."""
    num_streamed: int
    """Blocks of denoisers that stream."""
    ahead: list[TimeStats]
    """What was computed ahead for each denoiser."""


def all_cases() -> list[Case]:
    return [Case(*levels) for levels in itertools.product(*FACTORS.values())]


def pairs(case: Sequence[str]) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    """Each two settings of a case."""
    one: tuple[tuple[int, str], ...] = tuple(enumerate(case))
    yield from itertools.combinations(one, 2)


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """Few cases in which every two settings meet: each time the case in which most meet that have not yet."""
    left = {pair for case in cases for pair in pairs(case)}
    chosen: list[Case] = []
    while left:
        best = max(cases, key=lambda case: len(left.intersection(pairs(case))))
        chosen.append(best)
        left.difference_update(pairs(best))
    return chosen


@functools.cache
def pipeline(name: str) -> Any:
    """One pipeline of each kind in a process: what is taken off leaves no trace, or the next case shows it."""
    pipe = PIPELINES[name].build(0)
    PIPELINES[name].run(pipe, 1)  # A pipeline has attributes that its first run gives it.
    return pipe


_ACTIVATIONS = 2**20


@functools.cache
def _budget(name: str) -> int:
    """A little less than the denoiser needs beside what its activations are taken to need: some blocks stream."""
    with attach(pipeline(name), offload={"mode": "layerwise", "device": "cpu"}) as attached:
        assert attached.offloaded is not None
        sizes = [part.num_bytes for part in attached.offloaded.plan.components if part.role == "denoiser"]
    return _ACTIVATIONS + max(sizes) - 1024


def draw(case: Case) -> Drawn:
    """Run a case in this process, which may be one of several ranks."""
    pipe = pipeline(case.pipeline)
    before = footprint(pipe)
    with pytest.MonkeyPatch.context() as patch:
        if case.offload == "ahead":
            count_small_layers(patch)
        with attach(pipe, **case.settings()) as attached:
            picture = PIPELINES[case.pipeline].run(pipe, case.steps, **case.call())
            stats, streamed = attached.stats(), _num_streamed(attached.offloaded)
    found = {} if stats.cache is None else stats.cache.denoisers
    masks = tuple(branch.mask for one in found.values() for branch in one.branches.values())
    ahead = [] if stats.offload is None or case.offload != "ahead" else list(stats.offload.ahead.values())
    return Drawn(picture, masks, footprint(pipe) == before and not num_hooks(pipe), streamed, ahead)


def draw_all(cases: Sequence[Case]) -> list[Drawn]:
    """For ranks, which are asked once for many cases."""
    torch.set_num_threads(1)
    return [draw(case) for case in cases]


def _num_streamed(offloaded: Any) -> int:
    if offloaded is None:
        return 0
    return sum(len(part.streamed) for part in offloaded.plan.components if part.role == "denoiser")


def difference(picture: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the expected one's norm; 0 means the same bits."""
    return 0.0 if torch.equal(picture, expected) else float((picture - expected).norm() / expected.norm())


def modules_of(pipe: Any) -> list[torch.nn.Module]:
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return [module for part in parts for module in part.modules()]


def footprint(pipe: Any) -> list[tuple[int, type, frozenset[str]]]:
    """What the pipeline and every module in it are and have."""
    return [(id(part), type(part), frozenset(vars(part))) for part in (pipe, *modules_of(pipe))]


def num_hooks(pipe: Any) -> int:
    return sum(len(HookRegistry.get_or_create(module).chain) for module in modules_of(pipe))
