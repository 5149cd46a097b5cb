"""Two requests in one worker: the text of one is encoded, or its image decoded, while the other is denoised."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from asking import LIMIT_S, Asked, generate, is_step, pixels, wait_for
from PIL import Image
from test_supervisor import LONG, READY, Puppet

from pipelines import tiny_flux_pipeline
from samovar.core.errors import CancelledRequestError, SettingError, WorkerLostError
from samovar.engine import (
    GenerationResult,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    Request,
    Supervisor,
    Worker,
)
from samovar.engine.messages import Cancel, Ready, Run
from samovar.engine.request import Listener, Progress

STEPS = 8


def make_worker(folder: Path, **settings: Any) -> Worker:
    return Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **settings))


def asked(seed: int, **how: Any) -> Request:
    return Request(f"cat {seed}", OmniDiffusionSamplingParams(num_inference_steps=STEPS, seed=seed), **how)


class Watched:
    """A request that another thread runs, and its steps."""

    def __init__(self, threads: ThreadPoolExecutor, worker: Worker, request: Request) -> None:
        self.steps = 0
        self.has_step = threading.Event()
        self._future = threads.submit(worker.run, [request], Listener(self._note, lambda index: False))

    def _note(self, index: int, event: Any) -> None:
        self.steps += isinstance(event, Progress)
        self.has_step.set()

    def result(self) -> GenerationResult:
        (outcome,) = self._future.result(LIMIT_S)
        assert isinstance(outcome, GenerationResult), outcome
        return outcome


@pytest.fixture(
    scope="module", params=[None, {"tolerance": 0.3}, {"backend": "tea_cache", "rel_l1_thresh": 0.5}], ids=str
)
def pair(request: Any, folder: Path) -> Iterator[tuple[Worker, Worker]]:
    """A worker with two lanes, and one without."""
    workers = [make_worker(folder, cache=request.param, overlap=overlap) for overlap in (True, False)]
    workers[0].run([asked(0)])  # The first of a shape runs alone.
    yield workers[0], workers[1]
    for worker in workers:
        worker.close()


def test_an_image_is_decoded_and_a_text_encoded_beside_the_steps_of_another(
    pair: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, _ = pair
    vae, encoder = worker.pipeline.vae, worker.pipeline.text_encoder
    decode, encode = type(vae).decode, type(encoder).forward
    first_decodes, second_steps, others = threading.Event(), threading.Event(), []

    def slow_decode(*args: Any, **kwargs: Any) -> Any:
        if not first_decodes.is_set():
            first_decodes.set()
            others.append(second_steps.wait(LIMIT_S))
        return decode(vae, *args, **kwargs)

    monkeypatch.setattr(vae, "decode", slow_decode)
    with ThreadPoolExecutor(2) as threads:
        first = Watched(threads, worker, asked(1))
        assert first_decodes.wait(LIMIT_S)
        second = Watched(threads, worker, asked(2))
        assert second.has_step.wait(LIMIT_S), "it takes steps while the first one is decoded"
        second_steps.set()
        assert [len(each.result().images) for each in (first, second)] == [1, 1]
    assert others == [True]
    is_encoded, is_stepping = threading.Event(), threading.Event()

    def watched_encode(*args: Any, **kwargs: Any) -> Any:
        if is_stepping.is_set():
            is_encoded.set()
        return encode(encoder, *args, **kwargs)

    monkeypatch.setattr(encoder, "forward", watched_encode)

    def wait(index: int, event: Any) -> None:
        is_stepping.set()
        assert is_encoded.wait(LIMIT_S), "the text of the other is encoded during these steps"

    with ThreadPoolExecutor(2) as threads:
        third = threads.submit(worker.run, [asked(3)], Listener(wait, lambda index: False))
        assert is_stepping.wait(LIMIT_S)
        Watched(threads, worker, asked(4)).result()
        assert isinstance(third.result(LIMIT_S)[0], GenerationResult)


def test_every_image_and_its_figures_are_those_of_a_worker_alone(pair: tuple[Worker, Worker]) -> None:
    worker, alone = pair
    expected = [alone.run([asked(seed)])[0] for seed in range(6)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: worker.run([asked(seed)])[0], range(6)))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, GenerationResult), one
        assert isinstance(other, GenerationResult)
        assert np.array_equal(pixels(one), pixels(other))
        assert [stats.to_dict() for stats in one.cache] == [stats.to_dict() for stats in other.cache]


@pytest.mark.parametrize("how", [{"exact": True}, {"num_previews": 1}], ids=str)
def test_what_uses_more_than_its_stage_runs_alone(pair: tuple[Worker, Worker], how: dict[str, Any]) -> None:
    worker, alone = pair
    (expected,) = alone.run([asked(1, **how)])
    with ThreadPoolExecutor(2) as threads:
        others = [Watched(threads, worker, asked(seed)) for seed in (2, 3)]
        (found,) = worker.run([asked(1, **how)])
        for other in others:
            other.result()
    assert isinstance(found, GenerationResult)
    assert isinstance(expected, GenerationResult)
    assert np.array_equal(pixels(found), pixels(expected))


def test_a_call_that_fails_leaves_its_stage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(folder, overlap=True)
    monkeypatch.setattr(worker.pipeline.vae, "decode", lambda *args, **kwargs: 1 / 0)
    assert "ZeroDivisionError" in str(worker.run([asked(1)])[0])
    monkeypatch.undo()
    for _ in range(3):
        assert isinstance(worker.run([asked(1)])[0], GenerationResult)


def test_a_pipeline_that_draws_without_its_generator_never_overlaps(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, alone = make_worker(folder, overlap=True), make_worker(folder)
    for each in (worker, alone):
        encoder = each.pipeline.text_encoder
        forward = type(encoder).forward

        def draw(*args: Any, encoder: Any = encoder, forward: Any = forward, **kwargs: Any) -> Any:
            made = forward(encoder, *args, **kwargs)
            made.pooler_output += torch.randn_like(made.pooler_output)
            return made

        monkeypatch.setattr(encoder, "forward", draw)
    expected = [alone.run([asked(seed)])[0] for seed in range(4)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda seed: worker.run([asked(seed)])[0], range(4)))
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, GenerationResult), one
        assert isinstance(other, GenerationResult)
        assert np.array_equal(pixels(one), pixels(other))


def test_a_pipeline_that_holds_another_is_refused(folder: Path) -> None:
    pipe, other = tiny_flux_pipeline(), tiny_flux_pipeline()
    vars(pipe)["prior_pipe"] = other
    config = OmniDiffusionConfig(str(folder), device="cpu", progress=False, overlap=True)
    with pytest.raises(SettingError, match=r"made of others \(prior_pipe\). Leave out overlap") as caught:
        Worker(config, pipe)
    assert caught.value.param == "overlap"


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"offload": "layerwise"}, "offload"),
        ({"parallel": {"ulysses_degree": 2}}, "parallel"),
        ({"lora": {"pixel": "./pixel.safetensors"}}, "lora"),
        ({"compile": True}, "compile"),
        ({"cache": "cache_dit"}, "cache"),
    ],
    ids=str,
)
def test_what_cannot_overlap_is_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pixel.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingError, match=f"overlap cannot be combined with {name}") as caught:
        OmniDiffusionConfig(str(folder), device="cpu", overlap=True, **settings)
    assert caught.value.param == "overlap"


# ------------------------------------------------------------------------------------------------ in an engine


@pytest.fixture(scope="module")
def engine_with_lanes(folder: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, overlap=True))
    supervisor.start()
    yield supervisor
    supervisor.close()


def test_a_worker_has_two_requests_at_once_and_each_can_be_cancelled(
    engine_with_lanes: Supervisor, folder: Path
) -> None:
    engine = engine_with_lanes
    params = OmniDiffusionSamplingParams(num_inference_steps=3, seed=3)
    expected = pixels(generate(make_worker(folder), "a cat", params))
    first = Asked(engine, num_inference_steps=LONG)
    first.until(is_step)
    second, third = Asked(engine, num_inference_steps=3), Asked(engine, num_inference_steps=3)
    wait_for(lambda: engine.status().running == 2)
    assert (engine.position(second.job), engine.position(third.job)) == (0, 1)
    engine.cancel(first.job)
    with pytest.raises(CancelledRequestError):
        first.result()
    assert np.array_equal(pixels(second.result()), expected)
    assert np.array_equal(pixels(third.result()), expected)
    assert engine.status().restarts == 0


def test_a_worker_that_is_killed_costs_both_and_no_other(engine_with_lanes: Supervisor) -> None:
    engine = engine_with_lanes
    first = Asked(engine, num_inference_steps=LONG)
    first.until(is_step)
    second, third = Asked(engine), Asked(engine)
    wait_for(lambda: engine.status().running == 2)
    os.kill(engine.status().worker_ids[0], signal.SIGKILL)
    for each in (first, second):
        with pytest.raises(WorkerLostError, match="signal 9"):
            each.result()
    assert third.result().images


class Waiting(Puppet):
    """A worker of no process with two lanes, which loads at once and never answers."""

    orders: ClassVar[list[tuple[int, int]]] = []
    ready: ClassVar[Ready] = READY

    def does(self, order: Run | Cancel | None) -> None:
        if order is None:
            self.say(self.ready)
        elif isinstance(order, Run):
            self.orders.append((self.replica, len(order.requests)))


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> type[Waiting]:
    monkeypatch.setattr("samovar.engine.replica.WorkerGroup", Waiting)
    monkeypatch.setattr(Waiting, "orders", [])
    return Waiting


def started(ready: Ready, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Supervisor:
    monkeypatch.setattr(Waiting, "ready", ready)
    engine = Supervisor(OmniDiffusionConfig("emoji", device="cpu", progress=False, overlap=True, **settings))
    engine.start()
    return engine


def test_an_idle_replica_comes_before_a_second_lane(waiting: type[Waiting], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(READY._replace(num_lanes=2), monkeypatch, replicas=2)
    for count in range(1, 5):
        Asked(engine)
        wait_for(lambda count=count: len(waiting.orders) == count)  # type: ignore[misc]
    engine.close()
    assert sorted(replica for replica, _ in waiting.orders[:2]) == [0, 1]
    assert sorted(replica for replica, _ in waiting.orders[2:]) == [0, 1]


def test_a_second_lane_begins_with_a_full_batch(waiting: type[Waiting], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = started(READY._replace(num_lanes=2, max_batch=3), monkeypatch, max_batch=3)
    Asked(engine)
    wait_for(lambda: len(waiting.orders) == 1)
    asked = [Asked(engine) for _ in range(3)]
    wait_for(lambda: len(waiting.orders) == 2)
    last = Asked(engine)
    assert [engine.position(each.job) for each in (*asked, last)] == [0, 0, 0, 1]
    engine.close()
    assert waiting.orders == [(0, 1), (0, 3)], "two that wait would have been joined by none"


def test_an_image_that_comes_in_runs_alone() -> None:
    from samovar.engine.lanes import must_be_alone

    assert must_be_alone([Request("a cat"), Request("a cat", image=Image.new("RGB", (8, 8)))])
    assert not must_be_alone([Request("a cat")])
