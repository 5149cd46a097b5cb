"""Requests that meet at the denoiser: each gets what it gets alone, and what cannot be merged is not."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import generate

from pipelines import tiny_flux_pipeline
from pipelines.adapters import save_adapters
from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import CancelledRequestError, SamovarError, SettingError
from samovar.engine import GenerationResult, Listener, OmniDiffusionConfig, Progress, Request, Worker
from samovar.engine.meeting import Meeting
from samovar.engine.request import SILENT
from samovar.hooks import HookRegistry, ModelHook

ONE_LEVEL = 1
"""Of 255: what rounding may change in a pixel."""


def worker_of(folder: Path | None = None, pipe: Any = None, **settings: Any) -> Worker:
    """A worker on the tiny model, whose requests meet unless the settings say otherwise."""
    how = {"device": "cpu", "progress": False, "max_batch": 4, **settings}
    return Worker(OmniDiffusionConfig(*([] if folder is None else [str(folder)]), **how), pipe)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Worker:
    return worker_of(folder, max_batch=1)


@pytest.fixture(scope="module")
def meeting(folder: Path) -> Iterator[Worker]:
    worker = worker_of(folder)
    generate(worker, "a cat", OmniDiffusionSamplingParams(seed=1))  # After its calls, others may come in between.
    yield worker
    worker.close()


def ask(prompt: str = "a cat", *, how: dict[str, Any] | None = None, **params: Any) -> Request:
    return Request(
        prompt, OmniDiffusionSamplingParams(**{"seed": 3, "num_inference_steps": 5, **params}), **(how or {})
    )


def images(outcome: Any) -> list[Any]:
    if isinstance(outcome, SamovarError):
        raise outcome
    return [np.asarray(image).astype(int) for image in outcome.images]


def assert_near(outcome: Any, other: Any) -> None:
    pairs = zip(images(outcome), images(other), strict=True)
    assert max(np.abs(one - two).max() for one, two in pairs) <= ONE_LEVEL


def num_merged(worker: Worker) -> int:
    assert worker._meeting is not None
    return worker._meeting.num_merged


def together(tasks: list[Callable[[], Any]]) -> None:
    """Call these in threads of their own, all of them begun before any goes on."""
    gate = threading.Barrier(len(tasks))
    threads = [threading.Thread(target=lambda task=task: (gate.wait(), task())) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_mixed_requests_are_what_they_are_alone(meeting: Worker, alone: Worker) -> None:
    chance = random.Random(4)
    requests = [
        ask(
            chance.choice(("a cat", "an owl with a hat", "a dog")),
            num_inference_steps=chance.choice((2, 5, 9)),
            seed=number,
            guidance_scale=chance.choice((1.0, 3.5)),
            width=chance.choice((16, 32)),
            num_outputs_per_prompt=chance.choice((1, 1, 3)),
            **chance.choice(({}, {"negative_prompt": "a dog", "true_cfg_scale": 2.0})),
        )
        for number in range(12)
    ]
    before, threads = num_merged(meeting), set(threading.enumerate())
    for request, result in zip(requests, meeting.run(requests), strict=True):
        assert_near(result, alone.make(request))
        assert isinstance(result, GenerationResult)
        assert result.seeds == request.seeds
    assert num_merged(meeting) > before + 20
    assert {each for each in threading.enumerate() if "samovar" in each.name} <= threads, "none is left"
    assert meeting._pipelines.qsize() == meeting.max_runs


def test_a_request_alone_has_the_bits_of_the_pipeline_before_and_after_others(meeting: Worker) -> None:
    pipe = tiny_flux_pipeline()
    pipe.set_progress_bar_config(disable=True)
    call = {"height": 16, "width": 32, "num_inference_steps": 5, "max_sequence_length": 8}
    bare = np.asarray(pipe("a cat", generator=torch.Generator().manual_seed(3), **call).images[0])
    for _ in range(2):
        assert np.array_equal(images(meeting.make(ask()))[0], bare)
        meeting.run([ask(seed=number) for number in range(4)])


def test_the_first_that_meet_have_the_bits_of_each_alone(folder: Path, alone: Worker) -> None:
    worker = worker_of(folder)
    generate(worker, "a cat", OmniDiffusionSamplingParams(seed=1, num_inference_steps=2))
    requests = [ask(seed=number, num_inference_steps=1) for number in range(3)]
    for request, result in zip(requests, worker.run(requests), strict=True):
        assert np.array_equal(images(result)[0], images(alone.make(request))[0])
    worker.close()


class Shared:
    """Attention in which each row sees the keys of the first row too, as with StyleAligned."""

    def __init__(self, inner: Any, weight: float) -> None:
        self.inner, self.weight = inner, weight

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        mixed = hidden_states + self.weight * (hidden_states[:1] - hidden_states)
        return self.inner(attn, mixed, *args, **kwargs)


def test_rows_that_see_each_other_are_found_and_not_merged_also_when_that_changes(alone: Worker) -> None:
    pipe = tiny_flux_pipeline()
    pipe.set_progress_bar_config(disable=True)
    params = OmniDiffusionSamplingParams(height=16, width=32, max_sequence_length=8)
    requests = [Request("a cat", replace(params, seed=n, num_inference_steps=3 + n)) for n in range(4)]
    worker = worker_of(pipe=pipe)
    worker.run(requests[:1])
    plain = [images(alone.make(request))[0] for request in requests]
    for result, own in zip(worker.run(requests), plain, strict=True):
        assert np.abs(images(result)[0] - own).max() <= ONE_LEVEL
    merged = num_merged(worker)
    assert merged
    for block in pipe.transformer.transformer_blocks:
        block.attn.processor = Shared(block.attn.processor, 0.5)
    for result, own in zip(worker.run(requests), plain, strict=True):
        assert np.abs(images(result)[0] - own).max() <= ONE_LEVEL, "alone, a row sees itself alone"
    assert num_merged(worker) == merged
    worker.close()


def test_a_model_that_keeps_something_from_step_to_step_serves_one_at_a_time() -> None:
    class Counting(torch.nn.Module):
        """In the place of a layer: what it adds depends on the calls before."""

        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.count = inner, 0

        def forward(self, *args: Any) -> Any:
            self.count += 1
            return self.inner(*args)

    pipe = tiny_flux_pipeline()
    pipe.set_progress_bar_config(disable=True)
    pipe.transformer.x_embedder = Counting(pipe.transformer.x_embedder)
    worker = worker_of(pipe=pipe)
    params = {"height": 16, "width": 16, "max_sequence_length": 8}
    assert not any(isinstance(each, SamovarError) for each in worker.run([ask(**params, seed=n) for n in range(3)]))
    assert num_merged(worker) == 0
    why = "one request at a time: transformer.x_embedder keeps something from step to step"
    assert why in str(worker.explain())
    worker.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_batch": 1}, "max_batch is 1"),
        ({"cache": "tea_cache"}, "this cache decides inside of the model"),
    ],
)
def test_where_requests_cannot_meet_it_says_why(folder: Path, settings: dict[str, Any], why: str) -> None:
    worker = worker_of(folder, **settings)
    assert worker.max_batch == worker.max_runs == 1
    assert f"one request at a time: {why}" in str(worker.facts.explanation)
    worker.close()


def test_auto_decides_for_each_as_alone(folder: Path) -> None:
    worker = worker_of(folder, cache="auto")
    requests = [ask(seed=3, num_inference_steps=12), ask("an owl with a hat", seed=9, num_inference_steps=15)]
    requests = [*(replace(request, tolerance=1.0) for request in requests), replace(requests[0], exact=True)]
    own = [worker.make(request) for request in requests]
    told: list[list[bool | None]] = [[] for _ in requests]
    made: dict[int, Any] = {}

    def make(number: int) -> None:
        def note(event: Any) -> None:
            if isinstance(event, Progress):
                told[number].append(event.is_computed)

        made[number] = worker.make(requests[number], Listener(note, lambda: False))

    together([lambda number=number: make(number) for number in range(3)])  # type: ignore[misc]
    for number, alone in enumerate(own):
        assert_near(made[number], alone)
    for number in range(2):
        mine, theirs = (
            each.cache[0].denoisers["transformer"].branches["cond"].mask for each in (made[number], own[number])
        )
        assert mine == theirs
        assert "." in mine
        assert told[number] == [letter == "#" for letter in mine]
    assert made[2].cache == ()
    worker.close()


@pytest.mark.parametrize("offload", ["model", "layerwise"])
def test_streamed_weights_are_paid_once_for_all(folder: Path, alone: Worker, offload: str) -> None:
    worker = worker_of(folder, offload=offload)
    requests = [ask(seed=number) for number in range(4)]
    worker.run(requests)  # They are compared with each alone.
    start = worker.usage().bytes_moved
    results = worker.run(requests)
    merged = worker.usage().bytes_moved - start
    for request, result in zip(requests, results, strict=True):
        assert_near(result, alone.make(request))
    start = worker.usage().bytes_moved
    for request in requests:
        worker.make(request)
    assert merged < (worker.usage().bytes_moved - start) / (2 if offload == "layerwise" else 0.9)
    worker.close()


def test_other_adapters_do_not_merge(folder: Path, tmp_path: Path) -> None:
    lora = save_adapters(tiny_flux_pipeline(), tmp_path)
    worker = worker_of(folder, lora=lora)
    names = [None, *lora][:3]
    requests = [ask(seed=number, how={"lora": name}) for number in range(2) for name in names]
    own = [worker.make(request) for request in requests]
    for _ in range(2):
        for result, alone in zip(worker.run(requests), own, strict=True):
            assert_near(result, alone)
    assert num_merged(worker)
    assert len({images(each)[0].tobytes() for each in own[:3]}) == 3
    worker.close()


def test_one_that_fails_or_is_cancelled_takes_no_other_with_it(meeting: Worker, alone: Worker) -> None:
    steps: list[int] = []
    made: dict[str, Any] = {}
    is_left, has_begun = threading.Event(), threading.Event()

    def leave(event: Any) -> None:
        if isinstance(event, Progress) and event.step == 3:
            is_left.set()  # While the other one waits for its turn.

    def note(event: Any) -> None:
        if isinstance(event, Progress):
            steps.append(event.step)
            has_begun.set()

    good = ask(seed=1, num_inference_steps=9)
    other = ask("a dog", seed=4, num_inference_steps=7)
    tasks = {
        "good": lambda: meeting.make(good, Listener(leave, lambda: False)),
        "refused": lambda: meeting.make(ask(height=18)),
        "too long": lambda: meeting.make(ask(max_sequence_length=999)),
        "no list": lambda: meeting.make(ask(options={"sigmas": 1})),
        "other": lambda: meeting.make(other),
    }
    long = ask(seed=2, num_inference_steps=500)
    first = threading.Thread(target=lambda: made.update(cancelled=meeting.make(long, Listener(note, is_left.is_set))))
    first.start()  # Begun before the others, it comes to the denoiser before them at each step.
    has_begun.wait()
    together([lambda name=name: made.update({name: tasks[name]()}) for name in tasks])  # type: ignore[misc]
    first.join()
    assert isinstance(made["cancelled"], CancelledRequestError)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) < 500
    assert isinstance(made["refused"], SettingError)
    assert "refuses these settings" in str(made["too long"])
    assert isinstance(made["no list"], SettingError), "a mistake of whoever asks, not of the engine"
    assert_near(made["good"], alone.make(good))
    assert_near(made["other"], alone.make(other))
    assert meeting._pipelines.qsize() == meeting.max_runs


def test_a_merged_call_that_fails_is_computed_one_by_one(meeting: Worker, alone: Worker) -> None:
    class Narrow(ModelHook):
        """As a device without room for more than one."""

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args[0] if args else kwargs["hidden_states"]) > 1:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
            return args, kwargs

    requests = [ask(seed=number) for number in range(3)]
    meeting.run(requests)
    registry = HookRegistry.get_or_create(meeting.pipeline.transformer)
    registry.register_hook("narrow", Narrow())
    try:
        for request, result in zip(requests, meeting.run(requests), strict=True):
            assert_near(result, alone.make(request))
    finally:
        registry.remove_hook("narrow")


def test_higher_priorities_go_first_and_all_others_take_turns(meeting: Worker) -> None:
    """Of six with room for four at a time, the one with a priority is never left out."""
    order: list[int] = []

    def make(number: int) -> None:
        listener = Listener(lambda event: order.append(number), SILENT.is_cancelled)
        meeting.make(ask(seed=number, num_inference_steps=12), listener, priority=int(number == 5))

    together([lambda number=number: make(number) for number in range(6)])  # type: ignore[misc]
    last = {number: len(order) - order[::-1].index(number) for number in range(6)}
    assert last[5] == min(last.values())
    counts = {number: order[: len(order) // 2].count(number) for number in range(5)}
    assert max(counts.values()) - min(counts.values()) <= 3, "none waits for another to end"


def test_what_a_run_draws_without_its_generator_is_its_own(folder: Path) -> None:
    """Some pipelines draw from torch's own generator, which all threads share."""

    def noisy_step(step: Any) -> Callable[..., Any]:
        def noisy(output: Any, *args: Any, **kwargs: Any) -> Any:
            return step(output + 0.1 * torch.randn(output.shape), *args, **kwargs)

        return noisy

    worker = worker_of(folder)
    for pipeline in list(worker._pipelines.queue):
        pipeline.scheduler.step = noisy_step(pipeline.scheduler.step)
    requests = [ask(seed=number, num_inference_steps=3 + number) for number in range(4)]
    own = [worker.make(request) for request in requests]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for result, alone in zip(worker.run(requests), own, strict=True):
        assert_near(result, alone)
    assert torch.equal(torch.get_rng_state(), before), "the program's own numbers go on as if nothing had been drawn"
    worker.close()


class Tiny(torch.nn.Module):
    """Called as a UNet is: with one time for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(sample) * timestep.expand(len(sample))[:, None, None] + text
        return output


@torch.no_grad()
def test_one_time_for_all_rows_is_no_hindrance() -> None:
    model = Tiny()
    calls = [(torch.randn(2, 3, 4), torch.tensor(float(time)), torch.randn(2, 3, 4)) for time in range(4)]
    alone = [model(*call) for call in calls]
    met: dict[int, list[torch.Tensor]] = {}

    def run(number: int) -> None:
        with torch.no_grad(), meeting.member():
            met[number] = [model(*calls[number]) for _ in range(5)]

    with Meeting([model], {"unet": model}, 4) as meeting:
        together([lambda number=number: run(number) for number in range(4)])  # type: ignore[misc]
        assert meeting.num_merged > 8
    for number, own in enumerate(alone):
        for output in met[number]:
            assert torch.allclose(output, own, atol=1e-6)
