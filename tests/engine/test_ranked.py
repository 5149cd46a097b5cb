"""Workers in processes of their own: the same pictures, the same errors, and an end whatever happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pipelines import tiny_flux_pipeline
from samovar import OmniDiffusionSamplingParams
from samovar.engine import EngineConfig, RankedWorkers, Worker, is_under_torchrun, start_worker
from samovar.errors import SettingError
from samovar.parallel import RankError

PARAMS = OmniDiffusionSamplingParams(
    height=16, width=24, num_inference_steps=5, max_sequence_length=8, negative_prompt="a dog", true_cfg_scale=2.0,
    seed=3,
)  # fmt: skip
CACHE: dict[str, Any] = {"cache_backend": "tea_cache", "cache_config": {"schedule": "#.#.#"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_flux_pipeline().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def workers(folder: str) -> Iterator[RankedWorkers]:
    config = EngineConfig(
        folder, device="cpu", progress=False, cfg_parallel_size=2, enable_layerwise_offload=True, **CACHE
    )
    started = start_worker(config)
    assert isinstance(started, RankedWorkers)
    yield started
    started.close()


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def test_branches_on_two_ranks_give_the_picture_of_one(workers: RankedWorkers, folder: str) -> None:
    alone = Worker(EngineConfig(folder, device="cpu", progress=False, **CACHE)).generate("a cat", PARAMS)
    result = workers.generate("a cat", PARAMS)
    apart = np.asarray(result.images[0]).astype(float) - np.asarray(alone.images[0])
    assert np.abs(apart).max() / 255 <= 1e-3
    assert result.cache[0].denoisers["transformer"].branches["cond"].mask == "#.#.#"
    assert workers.defaults == OmniDiffusionSamplingParams()
    assert workers.load_seconds > 0


def test_what_is_refused_is_refused_as_by_one_and_the_ranks_go_on(workers: RankedWorkers) -> None:
    with pytest.raises(SettingError, match="height must be a multiple of 4 for this model, not 18"):
        workers.generate("a cat", OmniDiffusionSamplingParams(height=18).over(PARAMS))
    with pytest.raises(SettingError, match="FluxPipeline refuses these settings"):
        workers.generate("a cat", OmniDiffusionSamplingParams(max_sequence_length=1000).over(PARAMS))
    assert workers.generate("a cat", PARAMS).seeds == (3,)


def test_a_seed_by_chance_is_that_of_all_ranks(workers: RankedWorkers) -> None:
    unseeded = OmniDiffusionSamplingParams(**{**PARAMS.given(), "seed": None})
    result = workers.generate("a cat", unseeded)
    again = workers.generate("a cat", OmniDiffusionSamplingParams(seed=result.seeds[0]).over(PARAMS))
    assert np.array_equal(np.asarray(result.images[0]), np.asarray(again.images[0]))


def test_a_rank_that_dies_is_named_and_all_end(workers: RankedWorkers) -> None:
    first, second = workers.process_ids
    os.kill(second, signal.SIGKILL)
    with pytest.raises(RankError, match=r"Rank 1 of 2 failed, and all were ended\. .*exit code -9") as caught:
        workers.generate("a cat", PARAMS)
    assert caught.value.rank == 1
    assert workers.process_ids == []
    deadline = time.monotonic() + 30.0
    while is_alive(first) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(first)
    with pytest.raises(RankError, match="These ranks have ended"):
        workers.generate("a cat", PARAMS)


def test_a_process_alone_needs_no_ranks(folder: str) -> None:
    assert isinstance(start_worker(EngineConfig(folder, device="cpu", progress=False)), Worker)


def test_degrees_must_make_up_the_world_of_torchrun(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_under_torchrun()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert is_under_torchrun()
    with pytest.raises(SettingError, match=r"3 ranks are running, and the degrees need 2 \(cfg 1 x ring 1 x ulysses 2"):
        start_worker(EngineConfig(folder, device="cpu", ulysses_degree=2))
    with pytest.raises(SettingError, match="the degrees need 1"):
        start_worker(EngineConfig(folder, device="cpu"))
