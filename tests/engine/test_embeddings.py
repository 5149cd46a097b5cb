"""Prompts that were encoded before wake no encoder, and give the same bits; what may have changed is encoded again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, pixels, result_of, together, wait_for, worker_of

from pipelines import PIPELINES, tiny_flux_pipeline
from pipelines.adapters import save_adapters
from samovar.engine import Listener, Worker
from samovar.engine.embeddings import Embeddings
from samovar.hooks import HookRegistry, ModelHook


class Counted(ModelHook):
    def __init__(self) -> None:
        self.calls = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs


class Served:
    """A worker whose encoder calls are counted."""

    def __init__(self, worker: Worker, encoder: str = "text_encoder_2") -> None:
        self.worker, self.hook = worker, Counted()
        HookRegistry.get_or_create(getattr(worker.pipeline, encoder)).register_hook("zz counted", self.hook)

    def make(self, prompt: str = "a cat", how: dict[str, Any] | None = None, **params: Any) -> tuple[Any, int]:
        """The image, and how often the encoder was called for it."""
        before = self.hook.calls
        made = pixels(self.worker.make(ask(prompt, how, **params)))
        return made, self.hook.calls - before


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    worker = worker_of(folder)
    yield Served(worker)
    worker.close()


def test_a_prompt_is_encoded_once_and_the_bits_are_the_same(served: Served) -> None:
    bare = tiny_flux_pipeline()
    call = {"height": 16, "width": 32, "num_inference_steps": 5, "max_sequence_length": 8}
    expected = np.asarray(bare("a cat", generator=torch.Generator().manual_seed(3), **call).images[0])
    for calls in (1, 0, 0):
        made, counted = served.make()
        assert np.array_equal(made, expected)
        assert counted == calls
    assert served.make(seed=4, num_inference_steps=2)[1] == 0, "another seed, other steps"
    assert served.make("a dog")[1] == 1
    both = {"negative_prompt": "a dog", "true_cfg_scale": 2.0}
    assert served.make(**both)[1] == 0, "a negative prompt is one that was encoded before"
    assert served.make(max_sequence_length=6)[1] == 1
    assert "encode_prompt" not in vars(served.worker.pipeline), "the pipeline is as it was"


def test_what_has_changed_is_encoded_again(served: Served) -> None:
    pipe = served.worker.pipeline
    first, _ = served.make()
    with torch.no_grad():
        next(pipe.text_encoder_2.parameters()).mul_(1.5)
    second, calls = served.make()
    assert calls == 1
    assert not np.array_equal(first, second)
    assert served.make()[1] == 0
    pipe.tokenizer_2.add_tokens(["catlike"])
    assert served.make()[1] == 1
    pipe.own_setting = 3
    assert served.make()[1] == 1


def test_each_choice_of_adapters_has_its_own(tmp_path: Path) -> None:
    lora = save_adapters(tiny_flux_pipeline(), tmp_path)
    served = Served(worker_of(pipe=tiny_flux_pipeline(), lora=lora))
    size = {"height": 16, "width": 16, "max_sequence_length": 8}
    order = ("pixel", None, "pixel", None, {"name": "pixel", "scale": 0.5})
    assert [served.make(how={"lora": name}, **size)[1] for name in order] == [1, 1, 0, 0, 1]
    served.worker.close()


@pytest.mark.parametrize("offload", [None, "model", "layerwise"])
def test_requests_that_meet_share_what_was_encoded_also_with_offload(folder: Path, offload: str | None) -> None:
    served, single = Served(worker_of(folder, max_batch=4, offload=offload)), worker_of(folder)
    served.make()
    requests = [ask("a cat" if number % 2 else "a dog", seed=number) for number in range(6)]
    meeting: Any = served.worker._meeting
    have_come = threading.Event()

    def until_all_have_come(event: Any) -> None:
        wait_for(lambda: have_come.is_set() or len(meeting._open) == len(requests))
        have_come.set()

    def make(number: int) -> Any:
        if number:  # The others come while the first denoises, which has its turn until all are there.
            wait_for(lambda: bool(meeting._open))
            return served.worker.make(requests[number])
        return served.worker.make(requests[1], Listener(until_all_have_come, lambda: False))

    before = served.hook.calls
    outcomes = together([lambda number=number: make(number) for number in range(6)])  # type: ignore[misc]
    for number, outcome in enumerate(outcomes):
        assert np.abs(pixels(outcome) - pixels(single.make(requests[number or 1]))).max() <= 1
    assert served.hook.calls - before == 1, "the dog"
    served.worker.close()


@pytest.mark.parametrize("name", ["sd3", "wan"])
def test_any_pipeline_with_an_encode_prompt_of_its_own(name: str) -> None:
    tiny = PIPELINES[name]
    served = Served(worker_of(pipe=tiny.build(0)), "text_encoder")
    settings = {key: value for key, value in tiny.settings.items() if key not in ("prompt", "num_inference_steps")}
    request = ask(num_inference_steps=2, **settings)
    outputs = [result_of(served.worker.make(request)).outputs[0] for _ in range(2)]
    calls = served.hook.calls
    again = result_of(served.worker.make(request)).outputs[0]
    assert served.hook.calls == calls
    first, last = (np.asarray(each.frames if hasattr(each, "frames") else each) for each in (outputs[0], again))
    assert np.array_equal(first, last)
    served.worker.close()


class Encoding:
    """A pipeline of which only the encoding matters."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}
        self.inner: Any = lambda prompt: torch.full((1, 4), float(len(prompt)))

    def encode_prompt(self, prompt: Any, image: Any = None) -> Any:
        return self.inner(prompt)


def test_what_cannot_be_compared_or_draws_is_encoded_each_time_and_what_is_given_out_is_a_copy() -> None:
    pipe, kept, calls = Encoding(), Embeddings(), list[str]()
    pipe.inner = lambda prompt: calls.append(prompt) or torch.full((1, 4), 5.0)

    def encoded(prompt: Any, **more: Any) -> Any:
        with kept.kept(pipe):
            return pipe.encode_prompt(prompt, **more)

    for _ in range(3):
        assert encoded("a cat").eq(5).all(), "what one run writes, no other sees"
        encoded("a cat").zero_()
    assert len(calls) == 1
    for _ in range(2):
        encoded("a cat", image=torch.zeros(1))
    assert len(calls) == 3
    pipe.inner = lambda prompt: torch.rand(1, 4)
    assert not encoded("a dog").equal(encoded("a dog"))


def test_the_store_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    pipe, kept, calls = Encoding(), Embeddings(max_bytes=3 * 16), list[str]()
    pipe.inner = lambda prompt: calls.append(prompt) or torch.zeros(1, 4)
    for prompt in "abcadbacd":
        with kept.kept(pipe):
            pipe.encode_prompt(prompt)
    assert "".join(calls) == "abcdbcd"
