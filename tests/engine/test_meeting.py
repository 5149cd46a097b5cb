"""Requests that meet at the denoiser: each gets what it gets alone, and what cannot be merged is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, pixels, result_of, together, wait_for, worker_of

from pipelines import tiny_flux_pipeline
from samovar.core.errors import CancelledRequestError
from samovar.engine import Listener, Progress, Worker
from samovar.engine.meeting import CHANGES_PER_WAIT, Meeting, Member, choose_role
from samovar.hooks import HookRegistry, ModelHook
from simulated import SimulatedRecorder, recording_by

ONE_LEVEL = 1
"""Of 255: what rounding may change in a pixel."""


@pytest.fixture(scope="module")
def alone(folder: Path) -> Worker:
    return worker_of(folder)


@pytest.fixture(scope="module")
def meeting(folder: Path) -> Iterator[Worker]:
    worker = worker_of(folder, max_batch=4)
    worker.make(ask())  # After its calls, others may come in between.
    yield worker
    worker.close()


def assert_near(outcome: Any, other: Any) -> None:
    one, two = result_of(outcome), result_of(other)
    assert max(np.abs(pixels(one, i) - pixels(two, i)).max() for i in range(len(two.images))) <= ONE_LEVEL


def met(worker: Worker) -> Meeting:
    return worker._meeting


def test_a_request_alone_has_the_bits_of_the_pipeline_before_and_after_others(meeting: Worker) -> None:
    call = {"height": 16, "width": 32, "num_inference_steps": 5, "max_sequence_length": 8}
    bare = np.asarray(tiny_flux_pipeline()("a cat", generator=torch.Generator().manual_seed(3), **call).images[0])
    for _ in range(2):
        assert np.array_equal(pixels(meeting.make(ask())), bare)
        meeting.run([ask(seed=number) for number in range(4)])


def test_the_first_that_meet_have_the_bits_of_each_alone(folder: Path, alone: Worker) -> None:
    worker = worker_of(folder, max_batch=4)
    worker.make(ask(num_inference_steps=2))
    requests = [ask(seed=number, num_inference_steps=1) for number in range(3)]
    for request, result in zip(requests, worker.run(requests), strict=True):
        assert np.array_equal(pixels(result), pixels(alone.make(request)))
    worker.close()


class Shared:
    """Attention in which each row sees the keys of the first row too, as with StyleAligned."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner(attn, (hidden_states + hidden_states[:1]) / 2, *args, **kwargs)


def test_rows_that_see_each_other_are_found_and_not_merged_also_when_that_changes(alone: Worker) -> None:
    pipe = tiny_flux_pipeline()
    size = {"height": 16, "width": 32, "max_sequence_length": 8}
    requests = [ask(**size, seed=n, num_inference_steps=3 + n) for n in range(4)]
    worker = worker_of(pipe=pipe, max_batch=4)
    worker.make(requests[0])
    plain = [alone.make(request) for request in requests]
    for result, own in zip(worker.run(requests), plain, strict=True):
        assert_near(result, own)
    merged = met(worker).num_merged
    assert merged
    for block in pipe.transformer.transformer_blocks:
        block.attn.processor = Shared(block.attn.processor)
    for result, own in zip(worker.run(requests), plain, strict=True):
        assert_near(result, own)  # Alone, a row sees itself alone.
    assert met(worker).num_merged == merged
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
    pipe.transformer.x_embedder = Counting(pipe.transformer.x_embedder)
    worker = worker_of(pipe=pipe, max_batch=4)
    for outcome in worker.run([ask(height=16, width=16, max_sequence_length=8, seed=n) for n in range(3)]):
        result_of(outcome)
    assert met(worker).num_merged == 0
    why = "transformer.x_embedder.count changes from step to step"
    assert f"one request at a time: {why}" in str(worker.explain())
    assert worker.usage().alone == why, "which /ready says"
    worker.close()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_batch": 1}, "max_batch is 1"),
        ({"max_batch": 4, "cache": "tea_cache"}, "this cache decides inside of the model"),
        ({"max_batch": 4, "compile": "eager"}, "compiled blocks are made for the sizes of one request"),
    ],
)
def test_where_requests_cannot_meet_it_says_why(folder: Path, settings: dict[str, Any], why: str) -> None:
    worker = worker_of(folder, **settings)
    assert worker.max_batch == worker.max_runs == 1
    assert f"one request at a time: {why}" in str(worker.facts.explanation)
    worker.close()


def test_graphs_and_quantised_weights_meet_too(folder: Path, alone: Worker) -> None:
    requests = [ask(seed=number, num_inference_steps=8) for number in range(4)]
    with recording_by(SimulatedRecorder(), torch.device("cpu")):
        worker = worker_of(folder, max_batch=4, compile="graphs")
        for _ in range(3):
            for request, result in zip(requests, worker.run(requests), strict=True):
                assert_near(result, alone.make(request))
        assert met(worker).num_merged
        assert " calls replayed" in str(worker.explain())
        worker.close()
    pytest.importorskip("torchao")
    worker, single = (worker_of(folder, max_batch=count, quantization="int8") for count in (4, 1))
    for _ in range(2):
        for request, result in zip(requests, worker.run(requests), strict=True):
            assert_near(result, single.make(request))
    assert met(worker).num_merged


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
    """Of six with room for four at a time, the one with a priority is never left out; a short one is not stuck."""
    order: list[int] = []

    def make(number: int) -> None:
        request = ask(seed=number, num_inference_steps=3 if number == 4 else 16, how={"priority": int(number == 5)})
        meeting.make(request, Listener(lambda event: order.append(number), lambda: False))

    together([lambda number=number: make(number) for number in range(6)])  # type: ignore[misc]
    ends = {number: len(order) - order[::-1].index(number) for number in range(6)}
    assert ends[5] == min(ends[number] for number in (0, 1, 2, 3, 5)), "no one else's last step is before its last"
    assert ends[4] < min(ends[number] for number in range(4)), "the short one"
    counts = [order[: ends[5]].count(number) for number in range(4)]
    assert max(counts) - min(counts) <= 3, "none waits for another to end"


def test_what_a_run_draws_without_its_generator_is_its_own(folder: Path) -> None:
    """Some pipelines draw from torch's own generator, which all threads share."""

    def noisy_step(step: Any) -> Callable[..., Any]:
        def noisy(output: Any, *args: Any, **kwargs: Any) -> Any:
            return step(output + 0.1 * torch.randn(output.shape), *args, **kwargs)

        return noisy

    worker = worker_of(folder, max_batch=4)
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
    calls = [(torch.randn(2, 3, 4), torch.tensor(float(number)), torch.randn(2, 3, 4)) for number in range(4)]
    have_come = threading.Event()

    def run(number: int) -> list[torch.Tensor]:
        with torch.no_grad(), meeting.member():
            while not have_come.is_set():  # Else the first may end before the next one begins.
                time.sleep(0.001)
                if len(meeting._open) == len(calls):
                    have_come.set()
            return [model(*calls[number]) for _ in range(5)]

    with Meeting({"denoiser": [model]}, SimpleNamespace(components={"unet": model}), 4) as meeting:
        outputs = together([lambda number=number: run(number) for number in range(4)])  # type: ignore[misc]
        assert meeting.num_merged > 8
    for call, of_run in zip(calls, outputs, strict=True):
        assert all(torch.allclose(output, model(*call), atol=1e-6) for output in of_run)


@torch.no_grad()
def test_one_that_is_cancelled_while_it_waits_takes_no_other_with_it() -> None:
    model, gone, have_come = Tiny(), threading.Event(), threading.Event()
    inputs = torch.randn(1, 3, 4), torch.tensor(1.0), torch.randn(1, 3, 4)

    def run(number: int) -> str:
        try:
            with torch.no_grad(), meeting.member(is_cancelled=lambda: number == 0 and gone.is_set()):
                while not have_come.is_set():  # Else the first may end before the next one begins.
                    time.sleep(0.001)
                    if len(meeting._open) == 3:
                        have_come.set()
                for count in range(20):
                    model(*inputs)
                    if (number, count) == (1, 9):  # It has the turn, and so the others wait.
                        gone.set()
        except CancelledRequestError:
            return "cancelled"
        return "made"

    with Meeting({"denoiser": [model]}, SimpleNamespace(components={"unet": model}), 4) as meeting:
        ends = together([lambda number=number: run(number) for number in range(3)])  # type: ignore[misc]
    assert ends == ["cancelled", "made", "made"]


# ------------------------------------------------------------------------------------------------ phases and memory


@pytest.mark.parametrize("offload", ["model", "layerwise"])
def test_streamed_weights_are_paid_once_for_all(folder: Path, alone: Worker, offload: str) -> None:
    worker = worker_of(folder, max_batch=4, offload=offload)
    requests = [ask(seed=number) for number in range(4)]
    worker.run(requests)  # They are compared with each alone.

    def moved(serve: Callable[[], Any]) -> tuple[int, Any]:
        start = worker.usage().bytes_moved
        made = serve()
        return worker.usage().bytes_moved - start, made

    have_come = threading.Event()

    def until_all_have_come(event: Any) -> None:
        wait_for(lambda: have_come.is_set() or len(met(worker)._open) == len(requests))
        have_come.set()

    listener = Listener(until_all_have_come, lambda: False)  # Else the first may be over before the next one begins.
    makers = [lambda request=request: worker.make(request, listener) for request in requests]  # type: ignore[misc]
    merged, results = moved(lambda: together(makers))
    apart, _ = moved(lambda: [worker.make(request) for request in requests])
    for request, result in zip(requests, results, strict=True):
        assert_near(result, alone.make(request))
    assert merged < apart / 2
    worker.close()


def member(role: str, number: int, since: float, **how: Any) -> Member:
    return Member(role=role, number=number, since=since, **how)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([member("denoiser", 1, 9.0), member("encoder", 2, 9.0)], "denoiser"),  # A change is not worth it yet.
        ([member("encoder", 2, 9.0), member("vae", 1, 9.0)], "vae"),  # Nothing is left to do here.
        (
            [member("denoiser", 1, 9.0), member("encoder", 2, 9.9 - CHANGES_PER_WAIT)],
            "encoder",
        ),  # It has waited enough.
        ([member("denoiser", 1, 9.0), member("encoder", 2, 9.0, priority=1)], "encoder"),
        ([member("denoiser", 1, 9.0, priority=1), member("encoder", 2, 9.0, priority=1)], "denoiser"),
        ([member("denoiser", 1, 9.0), member("vae", 2, 9.0, deadline=9.5)], "vae"),
    ],
)
def test_a_phase_goes_on_until_another_is_worth_a_change(calls: list[Member], expected: str) -> None:
    assert choose_role(calls, "denoiser", now=10.0, change_s=1.0) == expected


def test_requests_that_come_one_by_one_do_not_thrash(
    folder: Path, alone: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comes while others denoise: its prompt waits until a change is worth it, and so do finished latents."""
    monkeypatch.setattr("samovar.engine.meeting.CHANGES_PER_WAIT", 1e9)
    worker = worker_of(folder, max_batch=4, offload="model")
    worker.run([ask("warm", seed=number) for number in range(2)])
    requests = [ask(f"a cat {number}", seed=number, num_inference_steps=9 + number) for number in range(4)]
    first, before = threading.Event(), met(worker).num_changes

    def make(number: int) -> Any:
        note = lambda event: first.set() if isinstance(event, Progress) else None  # noqa: E731
        if number:
            first.wait()
        return worker.make(requests[number], Listener(note, lambda: False))

    results = together([lambda number=number: make(number) for number in range(4)])  # type: ignore[misc]
    for request, result in zip(requests, results, strict=True):
        assert_near(result, alone.make(request))
    # The first alone, then all who came meanwhile: encode, denoise, decode of each; the first may be decoded with them.
    assert met(worker).num_changes - before <= 6
    worker.close()
