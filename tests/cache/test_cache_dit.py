"""The package cache-dit as a backend, where it is installed and where it is not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline

from pipelines import PIPELINES
from samovar import attach
from samovar.cache import CacheBackend, make_cache_backend
from samovar.core.errors import SettingError
from samovar.hooks import PipelineHook, hook_pipeline
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
def test_neutral_settings_give_the_bits_of_the_bare_pipeline() -> None:
    pipe, made = QWEN.build(0), backend(residual_diff_threshold=0.0)
    bare = QWEN.run(pipe, STEPS)
    handle = made.enable(pipe)
    assert torch.equal(QWEN.run(pipe, STEPS), bare)
    handle.detach()


@needs_package
def test_refresh_begins_a_run() -> None:
    pipe, made = QWEN.build(0), backend()
    handle = made.enable(pipe)
    first = QWEN.run(pipe, STEPS)
    made.refresh(pipe, STEPS)
    assert torch.equal(QWEN.run(pipe, STEPS), first)
    handle.detach()


@needs_package
def test_a_bare_transformer() -> None:
    pipe, made = QWEN.build(0), backend()
    bare = QWEN.run(pipe, STEPS)
    handle = made.enable(pipe.transformer)
    made.refresh(pipe.transformer, STEPS)
    assert not torch.equal(QWEN.run(pipe, STEPS), bare)
    assert cached_steps(made)
    handle.detach()
    assert torch.equal(QWEN.run(pipe, STEPS), bare)


@needs_package
def test_enabling_twice_is_refused_and_disabling_twice_is_not() -> None:
    pipe, made = QWEN.build(0), backend()
    bare = QWEN.run(pipe, STEPS)
    handle = made.enable(pipe)
    expected = QWEN.run(pipe, STEPS)
    with pytest.raises(SettingError, match="already on this QwenImagePipeline"):
        made.enable(pipe)
    assert torch.equal(QWEN.run(pipe, STEPS), expected)
    handle.detach()
    handle.detach()
    assert torch.equal(QWEN.run(pipe, STEPS), bare)


@needs_package
def test_another_backend_of_its_kind_is_refused_too() -> None:
    """Else the second would be taken off with the first, or the first left on with the second."""
    pipe, one, other = QWEN.build(0), backend(), backend()
    bare = QWEN.run(pipe, STEPS)
    handle = one.enable(pipe)
    with pytest.raises(SettingError, match="already"):
        other.enable(pipe)
    handle.detach()
    assert torch.equal(QWEN.run(pipe, STEPS), bare)


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
@pytest.mark.parametrize("hooked_first", [True, False])
def test_a_pipeline_that_has_hooks_of_ours(hooked_first: bool) -> None:
    pipe, made = QWEN.build(0), backend()
    bare = QWEN.run(pipe, STEPS)
    handles = [made.enable(pipe)]
    expected = QWEN.run(pipe, STEPS)
    handles.pop().detach()
    steps: list[Callable[[], Any]] = [
        lambda: handles.append(hook_pipeline(pipe, "mine", PipelineHook())),
        lambda: handles.append(made.enable(pipe)),
    ]
    for step in steps if hooked_first else reversed(steps):
        step()
    assert torch.equal(QWEN.run(pipe, STEPS), expected)
    assert torch.equal(QWEN.run(pipe, STEPS), expected), "and again"
    for handle in handles:
        handle.detach()
    assert torch.equal(QWEN.run(pipe, STEPS), bare)


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


@needs_package
def test_a_pipeline_without_a_denoiser_is_refused_and_not_noted() -> None:
    class Nothing:
        pass

    made, pipe = backend(), Nothing()
    with pytest.raises(ValueError, match=r".+"):
        made.enable(pipe)
    assert made.stats() == []


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
