"""What happens between steps, also on pipelines that do not call back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import generate

from pipelines import tiny_flux_pipeline
from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import CancelledRequestError, NanLatentsError, SamovarError
from samovar.engine import Event, Listener, OmniDiffusionConfig, Preview, Progress, Request, Worker
from samovar.engine.request import SILENT
from samovar.engine.steps import CALLBACK, StepWatch, preview_steps
from samovar.hooks import HookRegistry, ModelHook

REQUEST = Request("a cat", OmniDiffusionSamplingParams(num_inference_steps=6, seed=3), num_previews=2)


@pytest.fixture(scope="module", params=["callback", "hooks"])
def worker(request: pytest.FixtureRequest, folder: Path) -> Iterator[Worker]:
    cache = {"cache_backend": "tea_cache", "cache_config": {"schedule": "##.#.#"}}
    worker = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **cache))
    if request.param == "hooks":  # As if the pipeline took no callback.
        worker.facts = replace(worker.facts, takes=worker.facts.takes - {CALLBACK})
    yield worker
    worker.close()


def test_every_step_is_told_with_what_the_cache_did(worker: Worker) -> None:
    plain = generate(worker, "a cat", REQUEST.params)
    before = set(vars(worker.pipeline.transformer))
    events: list[Event] = []
    result = worker.make(REQUEST, Listener(events.append, lambda: False))
    assert not isinstance(result, SamovarError)
    steps = [event for event in events if isinstance(event, Progress)]
    assert [(step.step, step.num_steps) for step in steps] == [(step, 6) for step in range(1, 7)]
    assert [step.is_computed for step in steps] == [mark == "#" for mark in "##.#.#"]
    assert all(step.seconds > 0 for step in steps)
    assert [event.step for event in events if isinstance(event, Preview)] == [2, 4]
    assert set(vars(worker.pipeline.transformer)) == before
    assert np.array_equal(np.asarray(plain.images[0]), np.asarray(result.images[0]))


def test_nothing_takes_the_place_of_a_pipelines_tensors() -> None:
    """Some show latents in another form than they go on with, and would go on with what is returned."""
    pipe = tiny_flux_pipeline()
    watch = StepWatch(pipe, None, Request("a cat"), 0, SILENT, bool)
    assert watch.call_back(pipe, 0, None, {"latents": torch.zeros(1, 4)}) == {}


def test_a_request_that_is_cancelled_stops_after_the_step(worker: Worker) -> None:
    steps: list[int] = []
    calls: list[int] = []

    class Counted(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return args, kwargs

    def tell(event: Event) -> None:
        if isinstance(event, Progress):
            steps.append(event.step)

    registry = HookRegistry.get_or_create(worker.pipeline.transformer)
    registry.register_hook("zz counted", Counted())
    error = worker.make(REQUEST, Listener(tell, lambda: len(steps) >= 3))
    registry.remove_hook("zz counted")
    assert isinstance(error, CancelledRequestError)
    assert steps == [1, 2, 3]
    assert len(calls) <= 4, "at most one forward more than steps that were told"
    error = worker.make(REQUEST, Listener(tell, lambda: True))
    assert isinstance(error, CancelledRequestError)
    assert steps == [1, 2, 3], "nothing is begun for nobody"


def test_numbers_are_checked_at_every_step(worker: Worker) -> None:
    class Spoiled(ModelHook):
        def __init__(self) -> None:
            self.calls = 0

        def post_forward(self, module: Any, output: Any) -> Any:
            self.calls += 1
            return (output[0] * float("nan"), *output[1:]) if self.calls == 4 else output

    registry = HookRegistry.get_or_create(worker.pipeline.transformer)
    registry.register_hook("spoiled", Spoiled())
    (error,) = worker.run([REQUEST])
    registry.remove_hook("spoiled")
    assert isinstance(error, NanLatentsError)
    assert error.step == 4
    assert error.cache is not None
    assert "##.#" in error.cache


@pytest.mark.parametrize(
    ("num_previews", "num_steps", "expected"),
    [(0, 9, set()), (1, 4, {2}), (3, 4, {1, 2, 3}), (3, 28, {7, 14, 21}), (9, 3, {1, 2}), (2, 1, set())],
)
def test_previews_are_spread_evenly(num_previews: int, num_steps: int, expected: set[int]) -> None:
    assert preview_steps(num_previews, num_steps) == expected
