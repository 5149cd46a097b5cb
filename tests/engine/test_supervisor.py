"""The queue, and workers that are watched and replaced: real processes, and none where these cannot be timed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from asking import LONG, Asked, ask, children_of, is_alive, is_step, pixels, wait_for, worker_of

from samovar.core.errors import (
    CancelledRequestError,
    EngineDownError,
    EngineError,
    ModelError,
    QueueFullError,
    QueueTimeoutError,
    SettingError,
    ShuttingDownError,
    StepTimeoutError,
    WorkerLostError,
)
from samovar.engine import (
    Done,
    Event,
    Failed,
    GenerationResult,
    Job,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    PipelineFacts,
    Preview,
    Progress,
    Request,
    Restarts,
    Started,
    Supervisor,
)
from samovar.engine.messages import Cancel, Fatal, Finished, Ready, Run
from samovar.engine.replica import can_go_on, silence_limit
from samovar.engine.worker import Usage


def supervisor_of(folder: Path, restarts: Restarts | None = None, **settings: Any) -> Supervisor:
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **settings), restarts)
    supervisor.start()
    return supervisor


def test_a_request_reports_events_from_start_to_end(engine: Supervisor, folder: Path) -> None:
    before = engine.status()
    asked = Asked(engine, num_inference_steps=4, num_outputs_per_prompt=2, num_previews=1)
    result = asked.result()
    assert isinstance(asked.events[0], Started)
    steps = [event for event in asked.events if isinstance(event, Progress)]
    assert [(step.image_index, step.step) for step in steps] == [(p, s) for p in (0, 1) for s in (1, 2, 3, 4)]
    previews = [event for event in asked.events if isinstance(event, Preview)]
    assert [(each.image_index, each.step, each.image.size) for each in previews] == [(0, 2, (32, 16)), (1, 2, (32, 16))]
    alone = worker_of(folder).make(Request("a cat", result.params))
    assert result.seeds == (3, 4)
    assert all(np.array_equal(pixels(result, index), pixels(alone, index)) for index in (0, 1))
    after = engine.status()
    assert (after.is_ready, after.is_alive, after.queued, after.running, len(after.worker_ids)) == (True, True, 0, 0, 1)
    assert (after.steps_computed - before.steps_computed, after.images - before.images) == (8, 2)
    assert after.memory_bytes > 10_000_000


def test_the_queue_ends_and_has_an_order_and_deadlines(engine: Supervisor) -> None:
    with pytest.raises(SettingError, match="height must be a multiple of 4 for this model, not 18"):
        Asked(engine, height=18)
    running = Asked(engine, num_inference_steps=LONG)
    running.until(is_step)
    with pytest.raises(QueueTimeoutError, match=r"did not start within 0\.05 s"):
        Asked(engine, deadline_s=0.05).result()
    last = Asked(engine, "an owl", num_inference_steps=1)
    first = Asked(engine, "a dog", priority=1, num_inference_steps=1)
    assert [engine.position(each.job) for each in (running, first, last)] == [0, 1, 2]
    more = [Asked(engine, num_inference_steps=1) for _ in range(4)]
    with pytest.raises(QueueFullError, match="6 requests are waiting") as caught:
        Asked(engine)
    assert caught.value.retry_after_s == max(1.0, 7 * engine.status().request_seconds)
    for each in (*more[1:], running):
        each.job.cancel()
        with pytest.raises(CancelledRequestError):
            each.result()
    assert [each.result().prompt for each in (first, last, more[0])] == ["a dog", "an owl", "a cat"]
    late = Asked(engine, max_sequence_length=1000)
    with pytest.raises(SettingError, match="FluxPipeline refuses these settings"):
        late.result()
    assert engine.status().failures["cancelled"] >= 4
    assert engine.status().failures["bad_request"] >= 1


def test_a_worker_that_is_killed_or_hangs_is_replaced_and_only_its_request_fails(engine: Supervisor) -> None:
    expected, restarts = pixels(Asked(engine, num_inference_steps=2).result()), engine.status().restarts
    (killed,) = engine.status().worker_ids
    running = Asked(engine, num_inference_steps=LONG)
    waiting = [Asked(engine, num_inference_steps=2) for _ in range(3)]
    running.until(is_step)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=rf"process {killed}, signal 9\), after step \d+ of {LONG}"):
        running.result()
    assert (engine.status().is_ready, engine.status().is_alive) == (False, True)
    for each in waiting:
        assert np.array_equal(pixels(each.result()), expected)
    (stopped,), config = engine.status().worker_ids, engine.config
    engine.config = replace(config, step_timeout_s=0.5)
    running, after = Asked(engine, num_inference_steps=LONG), Asked(engine, num_inference_steps=2)
    running.until(is_step)
    os.kill(stopped, signal.SIGSTOP)
    try:
        with pytest.raises(StepTimeoutError, match=r"sent nothing for \d\S* s, after step \d+"):
            running.result()
    finally:
        engine.config = config
    assert np.array_equal(pixels(after.result()), expected)
    wait_for(lambda: not is_alive(killed) and not is_alive(stopped))
    assert engine.status().restarts == restarts + 2


def test_jobs_are_followed_in_coroutines_and_every_reader_sees_everything(engine: Supervisor) -> None:
    async def read(job: Job) -> list[Event]:
        return [event async for event in job]

    async def main() -> None:
        job = engine.submit(ask(num_inference_steps=3))
        first, second, result = await asyncio.gather(read(job), read(job), job.result())
        assert first == second == await read(job)
        assert isinstance(first[0], Started)
        assert [event.step for event in first if isinstance(event, Progress)] == [1, 2, 3]
        assert first[-1] == Done(result)
        job.cancel()  # Over already: nothing happens.
        assert (job.position, await job.result()) == (0, result)
        running = engine.submit(ask(num_inference_steps=LONG))
        waiting = [engine.submit(ask(num_inference_steps=1)) for _ in range(2)]
        assert [each.position for each in (*waiting, job)] in ([1, 2, 0], [2, 3, 0])
        waiting[0].cancel()
        assert isinstance((await read(waiting[0]))[-1], Failed)
        running.cancel()
        with pytest.raises(CancelledRequestError):
            await running.result()
        assert len((await waiting[1].result()).images) == 1

    asyncio.run(main())


def test_a_model_that_cannot_be_loaded_is_raised_by_start(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline", "vae": ["diffusers", "AutoencoderKL"]}')
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "diffusion_pytorch_model.bin").write_bytes(b"")
    supervisor = Supervisor(OmniDiffusionConfig(str(tmp_path), device="cpu"))
    with pytest.raises(SettingError, match="has not been started"):
        supervisor.submit(Request("a cat"), lambda event: None)
    with pytest.raises(ModelError, match="is a pickle, which can run code"):
        supervisor.start()
    status = supervisor.status()
    assert (status.is_ready, status.is_alive, status.worker_ids) == (False, False, ())
    supervisor.close()


def test_two_replicas_share_a_queue_and_one_that_is_killed_costs_only_what_ran_in_it(folder: Path) -> None:
    twins = supervisor_of(folder, replicas=2, max_queue=6, offload="layerwise")
    try:
        assert "replicas: 2: cpu, cpu" in str(twins.explain())
        assert "they take from one queue" in str(twins.explain())
        both = [Asked(twins, num_inference_steps=LONG) for _ in range(2)]
        for each in both:
            each.until(is_step)
        assert [replica.running for replica in twins.status().replicas] == [1, 1]
        waiting = [Asked(twins, num_inference_steps=3) for _ in range(3)]
        killed, kept = twins.status().worker_ids
        os.kill(killed, signal.SIGKILL)
        wait_for(lambda: any(each.job.is_over for each in both))
        lost, left = sorted(both, key=lambda each: not each.job.is_over)
        with pytest.raises(WorkerLostError, match=rf"process {killed}, signal 9"):
            lost.result()
        images = [pixels(each.result()) for each in waiting]
        assert all(np.array_equal(image, images[0]) for image in images), "by the one that took its place, or the other"
        wait_for(lambda: twins.status().replicas_ready == 2)
        assert [replica.restarts for replica in twins.status().replicas] == [1, 0]
        assert twins.status().worker_ids[1] == kept
        assert not left.job.is_over, "it runs on"
        processes = twins.status().worker_ids
    finally:
        twins.close()
    assert not any(map(is_alive, processes))


@pytest.mark.slow
def test_the_circuit_opens_after_five_crashes_and_closes_again(folder: Path) -> None:
    supervisor = supervisor_of(folder, Restarts(window_s=600.0, pause_s=20.0, first_delay_s=0.01))
    for number in range(5):
        wait_for(lambda: supervisor.status().is_ready)
        running, behind = Asked(supervisor, num_inference_steps=LONG), Asked(supervisor, num_inference_steps=1)
        running.until(is_step)
        os.kill(supervisor.status().worker_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            running.result()
        if number < 4:
            assert behind.result().seeds == (3,)
    with pytest.raises(EngineDownError, match="5 workers ended within 600 s"):
        behind.result()
    with pytest.raises(EngineDownError):
        Asked(supervisor)
    wait_for(lambda: supervisor.status().is_ready)
    assert Asked(supervisor).result().seeds == (3,)
    supervisor.close()


@pytest.mark.slow
def test_kills_under_load_leave_no_request_hanging_and_no_process(folder: Path) -> None:
    """Those that meet in a worker fail with it, and each is told; all else is served."""
    supervisor = supervisor_of(folder, Restarts(max_crashes=1000, first_delay_s=0.0), max_batch=3, max_queue=50)
    before, lost = children_of(os.getpid()), 0
    for _ in range(10):
        wait_for(lambda: supervisor.status().is_ready)
        asked = [Asked(supervisor, seed=n, num_inference_steps=40 + n) for n in range(20)]
        asked[3].until(is_step)
        os.kill(supervisor.status().worker_ids[0], signal.SIGKILL)
        failed = sum(isinstance(each.until(), Failed) for each in asked)
        assert 1 <= failed <= 6, "as many as were begun"
        lost += failed
    assert supervisor.status().failures == {"worker_restarted": lost}
    assert len(children_of(os.getpid())) == len(before)
    running, waiting = Asked(supervisor, num_inference_steps=40), Asked(supervisor, num_inference_steps=40)
    running.until(is_step)
    supervisor.close(drain_s=120.0)
    assert running.result().seeds == (3,)
    assert waiting.until() is not None
    with pytest.raises(ShuttingDownError, match="takes no more requests"):
        Asked(supervisor)


@pytest.mark.slow
def test_five_hundred_that_are_cancelled_leave_no_memory_behind(engine: Supervisor) -> None:
    def drop(count: int) -> int:
        for number in range(count):
            running = Asked(engine, num_inference_steps=LONG)
            for _ in range(1 + number % 5):
                running.until(is_step)
            engine.cancel(running.job)
            assert isinstance(running.until(), Failed)
        Asked(engine).result()
        return engine.status().memory_bytes

    warm = drop(100)
    assert drop(500) - warm < 20_000_000


# ------------------------------------------------------------------------------------------------ without a process

READY = Ready(PipelineFacts("Pipeline", frozenset({"prompt"}), 4), 0.0, Usage(0, 0))
GOOD = GenerationResult("a cat", (), (3,), OmniDiffusionSamplingParams(), 1.0)


class Puppet:
    """A group of no processes, which answers when it is told to."""

    num_ranks = 1
    process_ids = (1,)
    ready: ClassVar[Ready] = READY
    orders: ClassVar[list[tuple[Puppet, Run]]]
    failing: ClassVar[BaseException | None] = None
    ended: ClassVar[list[int]]

    def __init__(self, config: Any, on_message: Callable[..., None], replica: int = 0) -> None:
        if self.failing is not None:
            raise self.failing
        self.replica, self._on_message = replica, on_message
        self.load()

    def load(self) -> None:
        self.say(self.ready)

    def say(self, message: Any, rank: int = 0) -> None:
        self._on_message(self, rank, message)

    def send(self, order: Run | Cancel) -> None:
        if isinstance(order, Run):
            self.orders.append((self, order))

    def describe_end(self) -> str:
        return "a puppet"

    def end(self, wait_s: float = 0.0) -> None:
        self.ended.append(self.replica)


@pytest.fixture
def puppets(monkeypatch: pytest.MonkeyPatch) -> type[Puppet]:
    made = type("Puppets", (Puppet,), {"orders": [], "ended": []})
    monkeypatch.setattr("samovar.engine.replica.WorkerGroup", made)
    return made


@pytest.fixture
def start(puppets: Any) -> Iterator[Callable[..., Supervisor]]:
    started: list[Supervisor] = []

    def begin(restarts: Restarts | None = None, **settings: Any) -> Supervisor:
        started.append(Supervisor(OmniDiffusionConfig("emoji", device="cpu", progress=False, **settings), restarts))
        started[-1].start()
        return started[-1]

    yield begin
    for supervisor in started:
        supervisor.close()


def orders_of(puppets: Any, count: int) -> list[tuple[Puppet, Run]]:
    """So many new orders, once they are there."""
    wait_for(lambda: len(puppets.orders) >= count)
    orders, puppets.orders[:] = list(puppets.orders), []
    return orders


def finish(orders: list[tuple[Puppet, Run]], outcome: Any = GOOD) -> None:
    for puppet, order in orders:
        puppet.say(Finished(order.number, outcome, Usage(0, 0)))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (OSError, "no process", "No worker process could be started: OSError: no process"),
        (SettingError, "the file is gone", "the file is gone"),
        (ZeroDivisionError, "a bug", "The engine failed with ZeroDivisionError: a bug"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_cannot_be_started_is_raised_by_start_and_later_is_a_crash(
    puppets: Any, start: Any, kind: type[Exception], text: str, message: str
) -> None:
    puppets.failing = kind(text)
    with pytest.raises((EngineError, SettingError), match=message):
        start()
    puppets.failing = None
    supervisor = start(Restarts(max_crashes=2, first_delay_s=0.0))
    asked = [Asked(supervisor) for _ in range(2)]
    ((puppet, _),) = orders_of(puppets, 1)
    puppets.failing = kind(text)
    puppet.say(None)
    ends = [each.until() for each in asked]
    assert all(isinstance(end, Failed) for end in ends), "nobody is left waiting"
    assert isinstance(ends[0].error, WorkerLostError)  # type: ignore[union-attr]


def test_a_worker_has_as_many_as_it_can_and_one_that_ends_costs_each_of_them_and_no_other(
    puppets: Any, start: Any
) -> None:
    puppets.ready = READY._replace(max_runs=3)
    supervisor = start(max_batch=2)
    asked = [Asked(supervisor) for _ in range(5)]
    first, *_ = orders_of(puppets, 3)
    finish([first])
    assert asked[0].result() == GOOD
    orders_of(puppets, 1)
    assert supervisor.status().running == 3
    first[0].say(None)
    for each in asked[1:4]:
        with pytest.raises(WorkerLostError, match="a puppet"):
            each.result()
    finish(orders_of(puppets, 1))
    assert asked[4].result() == GOOD
    assert supervisor.status().failures == {"worker_restarted": 3}


def test_jobs_go_to_the_worker_that_has_the_fewest_and_the_engine_is_down_only_if_all_are(
    puppets: Any, start: Any
) -> None:
    puppets.ready = READY._replace(max_runs=3)
    supervisor = start(Restarts(max_crashes=2, first_delay_s=0.0), replicas=2)
    asked = [Asked(supervisor) for _ in range(4)]
    orders = orders_of(puppets, 4)
    assert sorted(puppet.replica for puppet, _ in orders) == [0, 0, 1, 1]
    finish(orders)
    for number, ready in ((1, 2), (1, 1), (0, 1), (0, 0)):  # Whose worker ends, and how many are there afterwards.
        wait_for(lambda: supervisor.status().running == 0)
        asked = [Asked(supervisor) for _ in range(supervisor.status().replicas_ready)]
        for puppet, order in orders_of(puppets, len(asked)):
            puppet.say(None if puppet.replica == number else Finished(order.number, GOOD, Usage(0, 0)))
        assert sorted(type(each.until()).__name__ for each in asked) == ["Done", "Failed"][2 - len(asked) :]
        wait_for(lambda ready=ready: supervisor.status().replicas_ready == ready)  # type: ignore[misc]
        assert supervisor.status().is_alive is (ready > 0)
    with pytest.raises(EngineDownError, match="2 workers ended within 60 s"):
        Asked(supervisor)


def test_one_that_cannot_load_is_raised_by_start_and_all_end(
    puppets: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load(self: Puppet) -> None:
        if self.replica == 0:
            self.say(READY)
        else:
            threading.Timer(0.2, self.say, (Fatal(ModelError("does not fit on this GPU")),)).start()

    monkeypatch.setattr(puppets, "load", load)
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu", replicas=2))
    with pytest.raises(ModelError, match="does not fit on this GPU"):
        supervisor.start()
    supervisor.close()
    assert set(puppets.ended) == {0, 1}
    assert "replica 1 (cpu): does not fit on this GPU" in caplog.text


def test_ranks_must_follow_one_that_failed(puppets: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.engine.replica.SETTLE_S", 0.05)
    puppets.num_ranks = 2
    monkeypatch.setattr(puppets, "load", lambda self: [self.say(READY, rank) for rank in range(2)])
    supervisor = start()
    asked = Asked(supervisor)
    ((puppet, order),) = orders_of(puppets, 1)
    puppet.say(Finished(order.number, EngineError("a bug"), Usage(0, 0)), rank=1)
    with pytest.raises(WorkerLostError, match=r"Other ranks did not answer after an error \(rank 1: a bug\)"):
        asked.result()


def test_a_worker_that_loads_for_too_long_is_stopped(puppets: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puppets, "load", lambda self: None)
    with pytest.raises(StepTimeoutError, match=r"did not load the model within 0\.05 s"):
        start(load_timeout_s=0.05)


def test_closing_waits_for_what_runs_and_refuses_what_waits(puppets: Any, start: Any) -> None:
    supervisor = start(replicas=2)
    both = [Asked(supervisor), Asked(supervisor)]
    orders = orders_of(puppets, 2)
    waiting = Asked(supervisor)
    closing = threading.Thread(target=supervisor.close, args=(60.0,))
    closing.start()
    with pytest.raises(ShuttingDownError, match="had not been started"):
        waiting.result()
    finish(orders[:1])
    wait_for(lambda: supervisor.status().running == 1)
    assert closing.is_alive()
    finish(orders[1:])
    closing.join(60.0)
    assert [each.result() for each in both] == [GOOD, GOOD]


def test_a_worker_may_be_silent_for_longer_with_larger_images() -> None:
    facts = PipelineFacts("Tiny", frozenset({"height", "width"}), 8, OmniDiffusionSamplingParams(height=64, width=64))
    config = OmniDiffusionConfig("emoji", device="cpu", step_timeout_s=10.0, load_timeout_s=100.0)

    def limit(side: int) -> float:
        return silence_limit(config, facts, Request("", OmniDiffusionSamplingParams(height=side, width=side)))

    assert [limit(side) for side in (32, 64, 80, 640)] == [10.0, 10.0, 10.0 * 1.25**4, 100.0]
    assert silence_limit(replace(config, compile=True), facts, Request("")) == 100.0


# ------------------------------------------------------------------------------------------------ parts

NOBODY: Any = None


def queued(number: int, **how: Any) -> Job:
    return Job(NOBODY, Request("a cat", **how), number, deliver=lambda event: None)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([EngineError("a bug")], True),
        ([GOOD, None], True),
        ([CancelledRequestError("stop"), CancelledRequestError("stop")], True),
        ([EngineError("a bug"), EngineError("a bug")], False),
        ([GOOD, SettingError("no")], False),
        ([SettingError("no"), CancelledRequestError("stop")], False),
    ],
)
def test_only_ranks_at_the_same_place_go_on(outcomes: list[Any], expected: bool) -> None:
    job = queued(1)
    job.outcomes = dict(enumerate(outcomes))
    assert can_go_on(job) is expected


def test_restarts_wait_longer_and_longer_and_then_the_circuit_is_open() -> None:
    restarts = Restarts(max_crashes=3, window_s=60.0, pause_s=30.0, first_delay_s=1.0, max_delay_s=4.0)
    assert restarts.next_start(0.0) == 0.0
    restarts.note_crash(10.0)
    assert restarts.next_start(10.0) == 10.0, "at once after a first crash"
    restarts.note_crash(20.0)
    assert (restarts.next_start(20.0), restarts.is_open(20.0)) == (21.0, False)
    restarts.note_crash(30.0)
    assert (restarts.is_open(30.0), restarts.is_open(60.0), restarts.next_start(30.0)) == (True, False, 60.0)
    restarts.note_crash(61.0)
    assert restarts.is_open(61.0), "one more was tried"
    restarts.note_success()
    assert (restarts.is_open(62.0), restarts.next_start(62.0)) == (False, 62.0)
    restarts.note_crash(200.0)
    assert restarts.next_start(200.0) == 200.0, "old ones are forgotten"
