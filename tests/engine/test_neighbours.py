"""A request's image does not depend on the prompts beside it, whatever its pipeline does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipelines import PIPELINES
from pipelines.builder import build, pipeline_classes
from pipelines.recipes import RECIPES
from samovar.core.errors import EngineError
from samovar.engine import OmniDiffusionConfig, OmniDiffusionSamplingParams, Request, Worker
from samovar.engine.calling import call_pipeline
from samovar.engine.neighbours import length_of
from samovar.media import Video

SHORT, LONG = "a cat", "an owl with a tall hat that sits on a table in the garden and reads a book about trains"
HOW = {
    "negative_prompt": "a dog",
    "num_inference_steps": 2,
    "max_sequence_length": 16,
    **RECIPES["CogView4Pipeline"].call,
}


def cogview4() -> Any:
    """It pads prompts to the longest of a call, to the other side than a prompt alone, and masks nothing."""
    return build(pipeline_classes()["CogView4Pipeline"], RECIPES["CogView4Pipeline"])


def worker(pipe: Any, **settings: Any) -> Worker:
    pipe.set_progress_bar_config(disable=True)
    return Worker(OmniDiffusionConfig(device="cpu", progress=False, **{"max_batch": 3, **settings}), pipe)


def ask(prompt: str, seed: int = 5, **more: Any) -> Request:
    return Request(prompt, OmniDiffusionSamplingParams(**{**HOW, "seed": seed, **more}))


def made(outcomes: Any) -> list[Any]:
    return [np.asarray(each.frames if isinstance(each, Video) else each).astype(int)
            for outcome in outcomes for each in outcome.outputs]  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each call of a pipeline has."""
    sizes: list[int] = []

    def call(pipeline: Any, prompts: Any, *given: Any, **named: Any) -> Any:
        sizes.append(len(prompts))
        return call_pipeline(pipeline, prompts, *given, **named)

    monkeypatch.setattr("samovar.engine.worker.call_pipeline", call)
    return sizes


def test_prompts_that_would_change_others_have_calls_of_their_own(calls: list[int]) -> None:
    pipe = cogview4()
    one = worker(pipe)
    requests = [ask(SHORT), ask(LONG, 6), ask("a dog", 7)]
    alone = [made(one.run([request]))[0] for request in requests]
    for sizes in ([1, 2, 2, 1], [2, 1]):  # It is tried once.
        calls.clear()
        for image, expected in zip(made(one.run(requests)), alone, strict=True):
            assert np.abs(image - expected).max() <= 1
        assert calls == sizes
    together = pipe([SHORT, LONG], generator=[torch.Generator().manual_seed(seed) for seed in (5, 6)], **HOW).images
    assert np.abs(np.asarray(together[0]).astype(int) - alone[0]).max() > 1, "it is needed"


@pytest.mark.parametrize("name", ["flux", "qwen-image", "z-image", "wan", "sd3"])
def test_prompts_that_change_nothing_share_a_call(name: str, calls: list[int]) -> None:
    tiny = PIPELINES[name]
    settings = {key: value for key, value in tiny.settings.items() if key not in ("prompt", "negative_prompt")}
    pipe = tiny.build(0)
    one = worker(pipe)
    requests = [ask(SHORT, **settings), ask(LONG, 6, **settings)]
    alone = [made(one.run([request]))[0] for request in requests]
    for sizes in ([1, 2, 2], [2]):
        calls.clear()
        for image, expected in zip(made(one.run(requests)), alone, strict=True):
            assert np.abs(image - expected).max() <= 2
        assert calls == sizes


def test_nothing_is_tried_for_one_at_a_time_or_for_prompts_of_one_length(calls: list[int]) -> None:
    pipe = cogview4()
    worker(pipe).run([ask(SHORT), ask("a dog", 6)])
    worker(pipe, max_batch=1).run([ask(SHORT), ask(LONG, 6)])
    assert calls == [2, 1, 1]


def test_a_trial_that_fails_is_seen_by_the_request_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = cogview4()
    encode = pipe.encode_prompt

    def fail(prompt: Any, *given: Any, **named: Any) -> Any:
        if LONG in prompt:
            raise RuntimeError("no")
        return encode(prompt, *given, **named)

    monkeypatch.setattr(pipe, "encode_prompt", fail)
    first, second = worker(pipe).run([ask(SHORT), ask(LONG, 6)])
    assert made([first])
    assert isinstance(second, EngineError)


def test_the_length_is_that_for_each_tokenizer() -> None:
    pipe = PIPELINES["flux"].build(0)
    short, long = length_of(pipe, SHORT), length_of(pipe, LONG)
    assert len(short) == 2
    assert all(one < other for one, other in zip(short, long, strict=True))
    assert length_of(type("Bare", (), {"components": {}}), "abc") == (3,)
