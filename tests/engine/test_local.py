"""A worker of several processes: the same images, the same errors, and others in their place when one dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import ask, is_alive, pixels, result_of, wait_for, worker_of

from pipelines import tiny_flux_pipeline
from pipelines.adapters import save_adapters
from samovar.core.errors import CancelledRequestError, SettingError, WorkerLostError
from samovar.engine import (
    Event,
    Listener,
    MultirankWorker,
    OmniDiffusionConfig,
    Progress,
    Worker,
    is_under_torchrun,
    start_worker,
)

GUIDED = ask(height=16, width=24, negative_prompt="a dog", true_cfg_scale=2.0)
SETTINGS: dict[str, Any] = {"cfg_parallel_size": 2, "offload": "layerwise", "cache": {"backend": "tea_cache",
                            "rel_l1_thresh": 0.3}, "device": "cpu", "progress": False}  # fmt: skip


def long(**params: Any) -> Any:
    return replace(GUIDED, params=replace(GUIDED.params, num_inference_steps=500, **params))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def ranks(folder: Path, lora: dict[str, str]) -> Iterator[MultirankWorker]:
    started = start_worker(OmniDiffusionConfig(str(folder), lora=lora, **SETTINGS))
    assert isinstance(started, MultirankWorker)
    yield started
    started.close()


def test_branches_on_two_ranks_give_the_image_of_one_with_any_adapter(
    ranks: MultirankWorker, folder: Path, lora: dict[str, str]
) -> None:
    alone, made = worker_of(folder, lora=lora, cache=SETTINGS["cache"]), dict[Any, Any]()
    for name in ("pixel", None, "ink", "pixel"):
        request, steps = replace(GUIDED, lora=name), list[Event]()
        result, own = result_of(ranks.make(request, Listener(steps.append, lambda: False))), alone.make(request)
        assert np.abs(pixels(result) - pixels(own)).max() <= 1, name
        masks = [each.cache[0].denoisers["transformer"].branches["cond"].mask for each in (result, result_of(own))]
        assert masks[0] == masks[1]
        told = [event.is_computed for event in steps if isinstance(event, Progress)]
        assert told == [mark == "#" for mark in masks[0]]
        assert np.array_equal(made.setdefault(name, pixels(result)), pixels(result)), "the same after another"
    assert len({image.tobytes() for image in made.values()}) == 3
    assert "several ranks compute one image" in str(ranks.explain())


def test_what_is_refused_or_cancelled_ends_alike_and_the_ranks_go_on(ranks: MultirankWorker) -> None:
    processes, steps = ranks.process_ids, list[Event]()
    for params, message in (
        ({"height": 18}, "height must be a multiple of 4"),
        ({"max_sequence_length": 999}, "refuses"),
    ):
        with pytest.raises(SettingError, match=message):
            result_of(ranks.make(ask(**params)))
    with pytest.raises(CancelledRequestError):
        result_of(ranks.make(long(), Listener(steps.append, lambda: len(steps) >= 2)))
    drawn = result_of(ranks.make(ask(seed=None)))
    assert np.array_equal(pixels(drawn), pixels(ranks.make(ask(seed=drawn.seeds[0])))), "a seed is that of all ranks"
    assert ranks.process_ids == processes


def test_a_rank_that_dies_is_named_all_end_and_others_take_their_place(ranks: MultirankWorker) -> None:
    expected, (first, second), killed = pixels(ranks.make(GUIDED)), ranks.process_ids, list[int]()

    def kill(event: Event) -> None:
        if not killed:
            killed.append(second)
            os.kill(second, signal.SIGKILL)

    with pytest.raises(WorkerLostError, match=rf"rank 1 of 2, process {second}, signal 9\), after step \d+ of 500"):
        result_of(ranks.make(long(), Listener(kill, lambda: False)))
    wait_for(lambda: not is_alive(first) and not is_alive(second))
    assert np.array_equal(pixels(ranks.make(GUIDED)), expected)
    assert not {first, second} & set(ranks.process_ids)


def test_a_process_alone_needs_no_ranks_and_a_loaded_pipeline_cannot_be_sent(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(pipeline: Any = None, **settings: Any) -> Any:
        return start_worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **settings), pipeline)

    assert isinstance(start(), Worker)
    with pytest.raises(SettingError, match="These settings need 2 processes, and a loaded pipeline cannot be sent"):
        start(object(), cfg_parallel_size=2)
    with pytest.raises(SettingError, match="replicas=2 is for AsyncOmni and samovar serve"):
        start(replicas=2)
    assert not is_under_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "3")
    for degree, message in ((2, r"3 ranks are running, and parallel=.* needs 2"), (None, "needs 1")):
        with pytest.raises(SettingError, match=message):
            start(**{"ulysses_degree": degree} if degree else {})
