"""Layers that are computed ahead go with caches and with several ranks: the bits are those without offload."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from pipelines import PIPELINES
from ranks import Ranks
from samovar import OffloadConfig, SequenceParallelConfig, attach
from samovar.offload import time_layers
from samovar.offload.stats import TimeStats
from samovar.trace import time_only

STEPS = 6
CACHES: dict[str, dict[str, Any]] = {
    "measured": {"backend": "tea_cache", "rel_l1_thresh": 0.3, "min_steps": 1},
    "schedule": {"backend": "tea_cache", "schedule": "#.##.#"},
    "linear": {"backend": "tea_cache", "schedule": "###.##", "forecast": "linear", "forecast_of": "output"},
    "auto": {"backend": "auto", "tolerance": 1e6},
    "cache_dit": {
        "backend": "cache_dit",
        "Fn_compute_blocks": 1,
        "max_warmup_steps": 2,
        "residual_diff_threshold": 0.5,
    },
}
RANKS: dict[str, Any] = {
    "Ulysses 2": SequenceParallelConfig(ulysses_degree=2),
    "ring 2": SequenceParallelConfig(ring_degree=2),
    "CFG 2": {"cfg_parallel_size": 2},
}


@contextlib.contextmanager
def small_layers_count() -> Iterator[None]:
    with (
        mock.patch.object(time_layers, "MIN_IN_BLOCKS", 64),
        mock.patch.object(time_layers, "MIN_OUTSIDE", 64),
        mock.patch.object(time_only, "SMALL_OUTPUT", 64.0),
    ):
        yield


def draw(name: str, mode: str | None, settings: dict[str, Any]) -> tuple[list[torch.Tensor], list[TimeStats]]:
    """Two runs and one of a batch, and what was computed ahead for each denoiser."""
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    offload = {} if mode is None else {"offload": OffloadConfig(mode, device="cpu", precompute=True)}  # type: ignore[arg-type]
    many = "num_videos_per_prompt" if "num_frames" in tiny.settings else "num_images_per_prompt"
    with small_layers_count(), attach(pipe, **settings, **offload) as attached:
        drawn = [tiny.run(pipe, STEPS), tiny.run(pipe, STEPS, seed=1), tiny.run(pipe, STEPS, **{many: 2})]
        offloaded = attached.stats().offload
    return drawn, [] if offloaded is None else list(offloaded.ahead.values())


def check(bare: list[torch.Tensor], drawn: list[torch.Tensor], stats: list[TimeStats], live: bool = False) -> None:
    """`live`: the first forward of each form runs a second time, to be compared, and computes its layers then."""
    assert all(map(torch.equal, bare, drawn))
    assert stats
    assert all(one.found_forwards and not one.surprises and (live or not one.live_calls) for one in stats), stats


@pytest.mark.parametrize("mode", ["layerwise", "model"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", ["flux", "wan"])
def test_caches(name: str, cache: str, mode: str) -> None:
    if cache == "cache_dit":
        pytest.importorskip("cache_dit")
    settings = {"cache": CACHES[cache]}
    bare, _ = draw(name, None, settings)
    check(bare, *draw(name, mode, settings))


def _on_a_rank(cases: list[tuple[str, str, dict[str, Any]]]) -> list[Any]:
    return [(draw(name, None, settings)[0], *draw(name, mode, settings)) for name, mode, settings in cases]


CASES = [
    (name, mode, {"parallel": RANKS[ranks]} | extra)
    for name, mode in (("flux", "layerwise"), ("sd3", "layerwise"), ("wan", "model"))
    for ranks in RANKS
    for extra in ({}, {"cache": CACHES["measured"]})
    if not (name == "sd3" and ranks == "CFG 2")  # Its branches are one batch.
]


FEW = [case for case in CASES if case == ("flux", "layerwise", {"parallel": RANKS["Ulysses 2"]})]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [FEW, CASES], ids=["few", "all"])
def test_two_ranks(ranks: Ranks, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    assert cases
    for results in ranks.call(_on_a_rank, cases, limit_s=900.0):
        assert len(results) == len(cases)
        for result in results:
            check(*result, live=True)
