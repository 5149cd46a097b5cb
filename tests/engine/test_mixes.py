"""Random mixes of requests that meet: each gets what it gets alone, and nothing of it is left.

A mix has prompts, sizes, steps, guidance, seeds, adapters, tolerances, cancellations and failures at random. SEED and
NUM_MIXES of the environment choose other ones.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import ask, pixels, result_of, together, worker_of

from pipelines import tiny_flux_pipeline
from pipelines.adapters import save_adapters
from samovar.core.errors import CancelledRequestError, EngineError, SettingError
from samovar.engine import Listener, Progress, Request, Worker
from samovar.hooks import HookRegistry, ModelHook

SEED, NUM_MIXES = int(os.environ.get("SEED", "7")), int(os.environ.get("NUM_MIXES", "40"))
SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "auto": {"cache": "auto"},
    "turns": {"offload": "model"},
    "streams": {"offload": "layerwise", "cache": "auto"},
}


class Failing(ModelHook):
    """Fails for calls with one sample, whose request is marked by its size."""

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs["hidden_states"].shape[1] == FAILING_TOKENS:
            raise RuntimeError("a failure that was asked for")
        return args, kwargs


FAILING_TOKENS = 3  # 4 x 12 pixels.


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(tiny_flux_pipeline(), tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module", params=SETTINGS)
def workers(request: pytest.FixtureRequest, folder: Path, lora: dict[str, str]) -> Iterator[tuple[Worker, Worker]]:
    """One whose requests meet, and one that serves them alone."""
    made = [worker_of(folder, lora=lora, max_batch=count, **SETTINGS[request.param]) for count in (4, 1)]
    for worker in made:
        HookRegistry.get_or_create(worker.pipeline.transformer).register_hook("zz failing", Failing())
    yield made[0], made[1]
    for worker in made:
        worker.close()


def drawn(chance: random.Random, has_cache: bool) -> tuple[Request, int | None]:
    """A request, and the step after which it is cancelled, if it is."""
    kind = chance.choices(("good", "cancelled", "refused", "too late", "failing"), (12, 3, 1, 1, 1))[0]
    size = {"width": chance.choice((8, 16, 32)), "height": chance.choice((8, 16))}
    how: dict[str, Any] = {"lora": chance.choice((None, None, "pixel", "ink", {"name": "ink", "scale": 0.5}))}
    how["priority"] = chance.choice((0, 0, 0, 2))
    if has_cache:
        how["tolerance"] = chance.choice((None, "exact", 0.5))
    guidance = chance.choice(({}, {"negative_prompt": chance.choice(("", "a dog")), "true_cfg_scale": 2.0}))
    if kind == "refused":
        size["width"] = 10
    if kind == "too late":
        guidance = {"max_sequence_length": 1000}
    if kind == "failing":
        size = {"width": 12, "height": 4}
    request = ask(
        chance.choice(("a cat", "a dog", "an owl with a hat")), how, seed=chance.randrange(5), **size, **guidance,
        num_inference_steps=chance.choice((1, 2, 4, 7, 12)), num_outputs_per_prompt=chance.choice((1, 1, 1, 2)),
    )  # fmt: skip
    return request, chance.randrange(1, 4) if kind == "cancelled" else None


def made(worker: Worker, request: Request, cancel_after: int | None) -> tuple[Any, list[Progress]]:
    """What a worker makes of a request, and the steps it reported."""
    steps: list[Progress] = []

    def note(event: Any) -> None:
        if isinstance(event, Progress):
            steps.append(event)

    listener = Listener(note, lambda: cancel_after is not None and len(steps) >= cancel_after)
    return worker.make(request, listener), steps


@pytest.mark.parametrize("mix", [0, 1, 2, *(pytest.param(mix, marks=pytest.mark.slow) for mix in range(3, NUM_MIXES))])
def test_in_any_mix_each_gets_what_it_gets_alone(workers: tuple[Worker, Worker], mix: int) -> None:
    meeting, alone = workers
    chance = random.Random(f"{SEED} {mix}")
    asked = [drawn(chance, meeting.facts.has_tolerance) for _ in range(chance.randrange(2, 11))]
    threads = set(threading.enumerate())
    hooks = {
        path: list(HookRegistry.get_or_create(part).chain)
        for path, part in meeting.pipeline.transformer.named_modules()
    }
    outcomes = together([lambda each=each: made(meeting, *each) for each in asked])  # type: ignore[misc]
    for (request, after), (outcome, steps) in zip(asked, outcomes, strict=True):
        own, own_steps = made(alone, request, after)
        if isinstance(own, (SettingError, CancelledRequestError, EngineError)):
            # One that ends before the cancellation is seen is as good.
            is_made = after is not None and not isinstance(outcome, Exception)
            assert type(outcome) is type(own) or is_made, (mix, request)
            continue
        mine, theirs = (
            [each.denoisers["transformer"].branches["cond"].mask for each in result.cache] for result in (outcome, own)
        )
        assert mine == theirs, "the cache decides as alone"
        reported = [
            sorted((each.image_index, each.step, each.is_computed) for each in each) for each in (steps, own_steps)
        ]
        assert reported[0] == reported[1], "each hears of its own steps"
        # Forecasts of skipped steps enlarge what rounding changes.
        most = 8 if any("." in mask for mask in theirs) else 2
        for index in range(request.num_images):
            apart = np.abs(pixels(outcome, index) - pixels(own, index)).max()
            assert apart <= most, (SEED, mix, request, apart)
        assert result_of(outcome).seeds == request.seeds
    assert set(threading.enumerate()) <= threads, "no thread is left"
    assert meeting._pipelines.qsize() == meeting.max_runs, "no run is left"
    assert hooks == {
        path: list(HookRegistry.get_or_create(part).chain)
        for path, part in meeting.pipeline.transformer.named_modules()
    }
    assert not any((meeting._meeting._open, meeting._meeting._holder))
    assert meeting._meeting.num_merged or mix > 0, (
        "others may have nothing to share; where workers steal tests, each runs alone"
    )
