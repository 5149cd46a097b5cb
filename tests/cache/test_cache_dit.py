"""The package cache-dit as a backend, where it is installed and where it is not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from pipelines import PIPELINES
from samovar import attach
from samovar.cache import CacheBackend, make_cache_backend
from samovar.core.errors import SettingError
from simulated import SimulatedRecorder, recording_by

STEPS = 8
FAST = {"Fn_compute_blocks": 1, "max_warmup_steps": 2, "residual_diff_threshold": 0.5}
"""For a model of a few blocks and a run of a few steps."""
QWEN = PIPELINES["qwen-image"]


@pytest.fixture
def _cache_dit() -> Iterator[None]:
    """The package, told to be silent; and the class of the pipelines as it was, for cache-dit writes on that."""
    level, before = logging.root.manager.disable, dict(vars(QwenImagePipeline))
    logging.disable(logging.CRITICAL)
    pytest.importorskip("cache_dit")
    yield
    logging.disable(level)
    for name in set(vars(QwenImagePipeline)) - set(before):
        delattr(QwenImagePipeline, name)
    QwenImagePipeline.__call__ = before["__call__"]


needs_package = pytest.mark.usefixtures("_cache_dit")


def backend(**settings: Any) -> CacheBackend:
    made = make_cache_backend({"backend": "cache_dit", **FAST | settings})
    assert made is not None
    return made


def cached_steps(made: CacheBackend) -> list[int]:
    """How many steps were cached in each of the package's own reports."""
    return [len(stats.cached_steps) for stats in made.stats()]


@needs_package
def test_on_off_and_on_again() -> None:
    pipe = QWEN.build(0)
    bare, made, results = QWEN.run(pipe, STEPS), backend(), []
    assert isinstance(made, CacheBackend)
    for _ in range(2):
        handle = made.enable(pipe)
        results.append(QWEN.run(pipe, STEPS))
        assert all(0 < count < STEPS for count in cached_steps(made))
        handle.detach()
        assert torch.equal(QWEN.run(pipe, STEPS), bare)
        assert made.stats() == []
    assert torch.equal(*results)
    assert not torch.equal(results[0], bare)


@needs_package
def test_two_pipelines_of_one_class() -> None:
    """The package writes on their class, and takes all off with the first: so one at a time."""
    pipes = [QWEN.build(seed) for seed in range(2)]
    bare, made = [QWEN.run(pipe, STEPS) for pipe in pipes], backend()
    for one, two in ((0, 1), (1, 0)):
        pipe, other = pipes[one], pipes[two]
        handle = made.enable(pipe)
        assert torch.equal(QWEN.run(other, STEPS), bare[two]), "the other is left alone"
        with pytest.raises(SettingError, match="another of its class"):
            made.enable(other)
        assert not torch.equal(QWEN.run(pipe, STEPS), bare[one]), "that one is still on"
        handle.detach()
        assert [torch.equal(QWEN.run(p, STEPS), b) for p, b in zip(pipes, bare, strict=True)] == [True, True]


@needs_package
@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"residual_diff_treshold": 0.1}, "residual_diff_threshold"),
        ({"Fn_compute_block": 1}, "Fn_compute_blocks"),
        ({"rel_l1_thresh": 0.2}, "residual_diff_threshold"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest(settings: dict[str, Any], hint: str) -> None:
    with pytest.raises(
        SettingError, match=rf"'{next(iter(settings))}' is not a setting of the cache 'cache_dit'.*{hint}"
    ):
        make_cache_backend({"backend": "cache_dit", **settings})


def test_where_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cache_dit", None)
    with pytest.raises(SettingError, match=r"not installed: pip install cache-dit.*cache='tea_cache'"):
        make_cache_backend("cache_dit")
    assert make_cache_backend("tea_cache") is not None


@needs_package
def test_graphs_leave_its_decisions_to_it() -> None:
    pipe = QWEN.build(0)
    settings = {"backend": "cache_dit", **FAST}
    with attach(pipe, cache=settings):
        expected = QWEN.run(pipe, STEPS)
    simulated = recording_by(SimulatedRecorder(), torch.device("cpu"))
    with simulated, attach(pipe, cache=settings, compile="graphs") as attached:
        assert [torch.equal(QWEN.run(pipe, STEPS), expected) for _ in range(2)] == [True, True]
        stats = attached.stats().graphs["transformer"]
    assert stats.replayed == 0
    assert stats.reasons == ("cache-dit decides inside its forward what runs",)
