"""Workers in processes of their own: the same images, the same errors, and others in their place when one dies."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asking import generate, is_alive, wait_for

from pipelines import tiny_flux_pipeline
from pipelines.adapters import save_adapters
from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import CancelledRequestError, SettingError, WorkerLostError
from samovar.engine import (
    Event,
    Failed,
    GenerationResult,
    Listener,
    MultirankWorker,
    OmniDiffusionConfig,
    Progress,
    Request,
    Worker,
    is_under_torchrun,
    start_worker,
)
from samovar.engine.request import SILENT

PARAMS = OmniDiffusionSamplingParams(
    height=16, width=24, num_inference_steps=5, max_sequence_length=8, negative_prompt="a dog", true_cfg_scale=2.0,
    seed=3,
)  # fmt: skip
CACHE: dict[str, Any] = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.3}}


def ask(**changes: Any) -> Request:
    return Request("a cat", OmniDiffusionSamplingParams(**changes).over(PARAMS))


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def workers(folder: Path, lora: dict[str, str]) -> Iterator[MultirankWorker]:
    how: dict[str, Any] = {"cfg_parallel_size": 2, "enable_layerwise_offload": True, "lora": lora, **CACHE}
    config = OmniDiffusionConfig(str(folder), device="cpu", progress=False, **how)
    started = start_worker(config)
    assert isinstance(started, MultirankWorker)
    yield started
    started.close()


def one(workers: MultirankWorker, request: Request, listener: Listener | None = None) -> GenerationResult:
    outcome = workers.make(request, listener or SILENT)
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def test_branches_on_two_ranks_give_the_image_of_one(workers: MultirankWorker, folder: Path) -> None:
    alone = generate(Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **CACHE)), "a cat", PARAMS)
    steps: list[Event] = []
    result = one(workers, ask(), Listener(steps.append, lambda: False))
    apart = np.asarray(result.images[0]).astype(float) - np.asarray(alone.images[0])
    assert np.abs(apart).max() / 255 <= 1e-3
    masks = [each.cache[0].denoisers["transformer"].branches["cond"].mask for each in (result, alone)]
    assert masks[0] == masks[1]
    assert [event.is_computed for event in steps if isinstance(event, Progress)] == [mark == "#" for mark in masks[0]]
    assert workers.facts.defaults.width == 32
    assert workers.load_seconds > 0


def test_all_ranks_use_the_adapters_of_a_request(workers: MultirankWorker, folder: Path, lora: dict[str, str]) -> None:
    alone = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, lora=lora, **CACHE))
    made: dict[str | None, Any] = {}
    for name in ("pixel", None, "ink", "pixel"):
        request = Request("a cat", PARAMS, lora=name)
        (expected,) = alone.run([request])
        assert isinstance(expected, GenerationResult)
        image = np.asarray(one(workers, request).images[0])
        assert np.abs(image.astype(float) - np.asarray(expected.images[0])).max() / 255 <= 1e-3, name
        assert np.array_equal(made.setdefault(name, image), image), "the same after another"
    assert len({image.tobytes() for image in made.values()}) == 3


def test_what_is_refused_is_refused_as_by_one_and_the_ranks_go_on(workers: MultirankWorker) -> None:
    processes = workers.process_ids
    with pytest.raises(SettingError, match="height must be a multiple of 4 for this model, not 18"):
        one(workers, ask(height=18))
    with pytest.raises(SettingError, match="FluxPipeline refuses these settings"):
        one(workers, ask(max_sequence_length=1000))
    assert one(workers, ask()).seeds == (3,)
    assert workers.process_ids == processes


def test_a_seed_by_chance_is_that_of_all_ranks(workers: MultirankWorker) -> None:
    unseeded = OmniDiffusionSamplingParams(**{**PARAMS.given(), "seed": None})
    result = one(workers, Request("a cat", unseeded))
    again = one(workers, ask(seed=result.seeds[0]))
    assert np.array_equal(np.asarray(result.images[0]), np.asarray(again.images[0]))


def test_all_ranks_stop_at_the_same_step(workers: MultirankWorker) -> None:
    processes = workers.process_ids
    steps: list[Event] = []
    listener = Listener(steps.append, lambda: len(steps) >= 2)
    with pytest.raises(CancelledRequestError):
        one(workers, ask(num_inference_steps=500), listener)
    assert one(workers, ask()).seeds == (3,)
    assert workers.process_ids == processes


def test_a_rank_that_dies_is_named_and_all_end(workers: MultirankWorker) -> None:
    assert not any(map(is_alive, kill_one_of(workers)))


@pytest.mark.slow
def test_the_next_request_finds_new_ranks(workers: MultirankWorker) -> None:
    expected = np.asarray(one(workers, ask()).images[0])
    before = kill_one_of(workers)
    assert np.array_equal(np.asarray(one(workers, ask()).images[0]), expected)
    assert not set(before) & set(workers.process_ids)


def kill_one_of(workers: MultirankWorker) -> tuple[int, ...]:
    first, second = workers.process_ids
    killed: list[int] = []

    def tell(event: Event) -> None:
        if not killed:
            killed.append(second)
            os.kill(second, signal.SIGKILL)

    with pytest.raises(WorkerLostError, match=rf"rank 1 of 2, process {second}, signal 9\), after step \d+ of 500"):
        one(workers, ask(num_inference_steps=500), Listener(tell, lambda: False))
    wait_for(lambda: not is_alive(first) and not is_alive(second))
    return first, second


def test_a_process_alone_needs_no_ranks(folder: Path) -> None:
    assert isinstance(start_worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False)), Worker)


def test_a_loaded_pipeline_cannot_go_to_other_processes(folder: Path) -> None:
    config = OmniDiffusionConfig(str(folder), device="cpu", cfg_parallel_size=2)
    with pytest.raises(SettingError, match="These settings need 2 processes, and a loaded pipeline cannot be sent"):
        start_worker(config, pipeline=object())


def test_degrees_must_make_up_the_world_of_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_under_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert is_under_torchrun()
    with pytest.raises(SettingError, match=r"3 ranks are running, and parallel=.* needs 2"):
        start_worker(OmniDiffusionConfig(str(folder), device="cpu", ulysses_degree=2))
    with pytest.raises(SettingError, match="needs 1"):
        start_worker(OmniDiffusionConfig(str(folder), device="cpu"))


def test_a_request_is_cancelled_while_nothing_happens() -> None:
    class Silent:
        """A supervisor whose worker loads for ever."""

        def submit(self, request: Request, deliver: Any) -> Any:
            error = CancelledRequestError("The request was taken back.")
            return SimpleNamespace(cancel=lambda: deliver(Failed(error)))

    workers = MultirankWorker.__new__(MultirankWorker)
    workers._supervisor = Silent()  # type: ignore[assignment]
    glances: queue.SimpleQueue[bool] = queue.SimpleQueue()
    for is_left in (False, False, True):
        glances.put(is_left)
    outcome = workers.make(ask(), Listener(lambda event: None, lambda: glances.get(timeout=1.0)))
    assert isinstance(outcome, CancelledRequestError)
