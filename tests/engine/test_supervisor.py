"""The supervisor with a real worker process: queue, cancellation, isolation, and what it does when workers die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from asking import Asked, children_of, generate, is_alive, is_step, pixels, wait_for

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
    Failed,
    GenerationResult,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    PipelineFacts,
    Preview,
    Progress,
    Request,
    Restarts,
    Started,
    Supervisor,
    Worker,
)
from samovar.engine.messages import Cancel, Fatal, Finished, Ready, Run
from samovar.engine.worker import Usage

LONG = 100_000
"""Steps that nobody waits for: they take longer than any test does."""


def test_a_request_reports_events_from_start_to_end(engine: Supervisor, folder: Path) -> None:
    before = engine.status()
    asked = Asked(engine, num_inference_steps=4, num_outputs_per_prompt=2, num_previews=1)
    result = asked.result()
    assert isinstance(asked.events[0], Started)
    steps = [event for event in asked.events if isinstance(event, Progress)]
    assert [(step.image_index, step.step) for step in steps] == [(p, s) for p in (0, 1) for s in (1, 2, 3, 4)]
    assert {(step.num_steps, step.num_images, step.is_computed) for step in steps} == {(4, 2, None)}
    previews = [event for event in asked.events if isinstance(event, Preview)]
    assert [(preview.image_index, preview.step, preview.image.size) for preview in previews] == [
        (0, 2, (32, 16)),
        (1, 2, (32, 16)),
    ]
    alone = generate(Worker(engine.config), "a cat", result.params)
    assert result.seeds == (3, 4)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(result.images, alone.images, strict=True))
    after = engine.status()
    assert after.is_ready
    assert after.is_alive
    assert (after.queued, after.running) == (0, 0)
    assert (after.steps_computed - before.steps_computed, after.step_count - before.step_count) == (8, 8)
    assert after.images - before.images == 2
    assert after.memory_bytes > 10_000_000
    assert len(after.worker_ids) == 1


def test_what_the_model_does_not_take_is_refused_at_once(engine: Supervisor) -> None:
    with pytest.raises(SettingError, match="height must be a multiple of 4 for this model, not 18"):
        Asked(engine, height=18)
    with pytest.raises(SettingError, match="FluxPipeline does not take strength"):
        Asked(engine, strength=0.5)
    late = Asked(engine, max_sequence_length=1000)
    with pytest.raises(SettingError, match="FluxPipeline refuses these settings"):
        late.result()
    assert engine.status().queued == 0


def test_the_queue_ends_and_has_an_order_and_deadlines(engine: Supervisor) -> None:
    running = Asked(engine, num_inference_steps=LONG)
    running.until(is_step)
    impatient = Asked(engine, deadline_s=0.05)
    last = Asked(engine, "an owl", num_inference_steps=1)
    first = Asked(engine, "a dog", priority=1, num_inference_steps=1)
    assert engine.position(running.job) == 0
    with pytest.raises(QueueTimeoutError, match=r"did not start within 0\.05 s"):
        impatient.result()
    assert [engine.position(each.job) for each in (first, last)] == [1, 2]
    more = [Asked(engine, num_inference_steps=1) for _ in range(4)]
    with pytest.raises(QueueFullError, match="6 requests are waiting"):
        Asked(engine)
    assert (engine.status().queued, engine.status().running) == (6, 1)
    for each in more[1:]:
        engine.cancel(each.job)
        with pytest.raises(CancelledRequestError):
            each.result()
    engine.cancel(running.job)
    assert first.result().prompt == "a dog"
    assert last.result().prompt == "an owl"
    assert more[0].result().prompt == "a cat"
    failures = engine.status().failures
    assert failures["queue_timeout"] == 1
    assert failures["cancelled"] >= 4


def test_what_is_cancelled_stops_at_its_step_and_leaves_no_trace(engine: Supervisor) -> None:
    expected = pixels(Asked(engine, num_inference_steps=3).result())
    for stop_at in (1, 4, 7):
        before = engine.status().step_count
        running = Asked(engine, num_inference_steps=LONG)
        for _ in range(stop_at):
            running.until(is_step)
        told = engine.status().step_count - before
        engine.cancel(running.job)
        with pytest.raises(CancelledRequestError):
            running.result()
        after = Asked(engine, num_inference_steps=3)
        assert np.array_equal(pixels(after.result()), expected)
        # Those that were told before, the one under way, and what was on its way in the pipe meanwhile.
        assert engine.status().step_count - before - 3 <= told + 10
        engine.cancel(after.job)  # Over already: nothing happens.


def test_requests_do_not_touch_each_other(engine: Supervisor) -> None:
    """Two prompts by turns, with different steps, after one that was taken back and one that was refused."""
    cases = [("a cat", 2), ("a dog", 5), ("a cat", 5), ("a dog", 2)]
    solo = {case: pixels(Asked(engine, case[0], num_inference_steps=case[1]).result()) for case in cases}
    dropped = Asked(engine, num_inference_steps=LONG)
    dropped.until(is_step)
    engine.cancel(dropped.job)
    refused = Asked(engine, max_sequence_length=1000)
    mixed = [(case, Asked(engine, case[0], num_inference_steps=case[1])) for case in reversed(cases)]
    with pytest.raises(SettingError):
        refused.result()
    for case, asked in mixed:
        assert np.array_equal(pixels(asked.result()), solo[case]), case


def test_a_worker_that_is_killed_or_hangs_is_replaced_and_only_its_request_fails(engine: Supervisor) -> None:
    expected = pixels(Asked(engine, num_inference_steps=2).result())
    restarts = engine.status().restarts
    (killed,) = engine.status().worker_ids
    running = Asked(engine, num_inference_steps=LONG)
    waiting = [Asked(engine, num_inference_steps=2) for _ in range(3)]
    running.until(is_step)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=rf"process {killed}, signal 9\), after step \d+ of {LONG}"):
        running.result()
    assert not engine.status().is_ready
    assert engine.status().is_alive
    for each in waiting:
        assert np.array_equal(pixels(each.result()), expected)
    assert engine.status().restarts == restarts + 1

    (stopped,) = engine.status().worker_ids
    patience = engine.config
    running = Asked(engine, num_inference_steps=LONG)
    after = Asked(engine, num_inference_steps=2)
    running.until(is_step)
    os.kill(stopped, signal.SIGSTOP)
    try:
        engine.config = replace(patience, step_timeout_s=0.5)
        engine.cancel(Asked(engine).job)  # Whatever it wakes up for, it looks at the clock.
        with pytest.raises(StepTimeoutError, match=r"sent nothing for \d\S* s, after step \d+"):
            running.result()
    finally:
        engine.config = patience
    assert np.array_equal(pixels(after.result()), expected)
    wait_for(lambda: not is_alive(killed) and not is_alive(stopped))
    status = engine.status()
    assert status.restarts == restarts + 2
    assert (status.failures["worker_restarted"], status.failures["step_timeout"]) == (1, 1)
    assert status.is_ready


@pytest.fixture
def config(folder: Path) -> OmniDiffusionConfig:
    return OmniDiffusionConfig(str(folder), device="cpu", progress=False)


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


@pytest.mark.slow
def test_closing_refuses_what_waits_and_lets_what_runs_finish(config: OmniDiffusionConfig) -> None:
    supervisor = Supervisor(config)
    supervisor.start()
    processes = supervisor.status().worker_ids
    running, waiting = Asked(supervisor, num_inference_steps=40), Asked(supervisor)
    running.until(is_step)
    supervisor.close(drain_s=120.0)
    assert running.result().seeds == (3,)
    with pytest.raises(ShuttingDownError, match="had not been started"):
        waiting.result()
    with pytest.raises(ShuttingDownError, match="takes no more requests"):
        Asked(supervisor)
    supervisor.close()
    assert not any(map(is_alive, processes))


@pytest.mark.slow
def test_the_circuit_opens_after_five_crashes_and_closes_again(config: OmniDiffusionConfig) -> None:
    supervisor = Supervisor(config, Restarts(window_s=600.0, pause_s=20.0, first_delay_s=0.01))
    supervisor.start()
    for number in range(5):
        wait_for(lambda: supervisor.status().is_ready)
        waiting = Asked(supervisor, num_inference_steps=LONG)
        behind = Asked(supervisor, num_inference_steps=1)
        waiting.until(is_step)
        os.kill(supervisor.status().worker_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            waiting.result()
        if number < 4:
            assert behind.result().seeds == (3,)
    with pytest.raises(EngineDownError, match="5 workers ended within 600 s"):
        behind.result()
    assert not supervisor.status().is_alive
    with pytest.raises(EngineDownError):
        Asked(supervisor)
    wait_for(lambda: supervisor.status().is_ready)
    assert Asked(supervisor).result().seeds == (3,)
    supervisor.close()


@pytest.mark.slow
def test_twenty_kills_in_a_row_leave_no_request_hanging_and_no_process(config: OmniDiffusionConfig) -> None:
    restarts = Restarts(max_crashes=1000, first_delay_s=0.0)
    supervisor = Supervisor(config, restarts)
    supervisor.start()
    expected = pixels(Asked(supervisor).result())
    before = children_of(os.getpid())
    for _ in range(20):
        wait_for(lambda: supervisor.status().is_ready)
        running = Asked(supervisor, num_inference_steps=LONG)
        running.until(is_step)
        os.kill(supervisor.status().worker_ids[0], signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            running.result()
    assert np.array_equal(pixels(Asked(supervisor).result()), expected)
    assert supervisor.status().restarts == 20
    assert len(children_of(os.getpid())) == len(before)
    supervisor.close()


@pytest.mark.slow
def test_five_hundred_that_are_cancelled_leave_no_memory_behind(engine: Supervisor) -> None:
    def drop(count: int) -> int:
        for number in range(count):
            running = Asked(engine, num_inference_steps=LONG)
            for _ in range(1 + number % 5):
                running.until(is_step)
            engine.cancel(running.job)
            assert isinstance(running.until(lambda event: False), Failed)
        Asked(engine).result()
        return engine.status().memory_bytes

    warm = drop(100)
    assert drop(500) - warm < 20_000_000


# ------------------------------------------------------------------------------------------------ without a process

READY = Ready(PipelineFacts("Pipeline", frozenset({"prompt"}), 4), 0.0, Usage(0, 0), 1)
GOOD = GenerationResult("a cat", (), (3,), OmniDiffusionSamplingParams(), 1.0)


class Puppet:
    """A group of no processes. `does` is told of each group and each order, and may speak or raise."""

    does: Callable[[Puppet, Run | Cancel | None], Any]
    num_made = 0
    num_ranks = 1
    process_ids = (1,)

    def __init__(self, config: OmniDiffusionConfig, on_message: Callable[..., None], replica: int = 0) -> None:
        self.replica = replica
        type(self).num_made += 1
        self.since = time.monotonic()
        self._on_message = on_message
        type(self).does(self, None)

    def say(self, message: Any) -> None:
        self._on_message(self, 0, message)

    def send(self, order: Run | Cancel) -> None:
        type(self).does(self, order)

    def describe_end(self) -> str:
        return "a puppet"

    def end(self, wait_s: float = 0.0) -> None: ...


@pytest.fixture
def puppets(monkeypatch: pytest.MonkeyPatch) -> type[Puppet]:
    class Obedient(Puppet):
        def does(self, order: Run | Cancel | None) -> None:
            if order is None:
                self.say(READY)
            elif isinstance(order, Run):
                self.say(Finished(order.number, GOOD, Usage(0, 0)))

    monkeypatch.setattr("samovar.engine.replica.WorkerGroup", Obedient)
    return Obedient


def start(restarts: Restarts | None = None, **settings: Any) -> Supervisor:
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu", progress=False, **settings), restarts)
    supervisor.start()
    return supervisor


def ask(supervisor: Supervisor, **how: Any) -> Asked:
    return Asked(supervisor, seed=None, **how)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("no process"), "No worker process could be started: OSError: no process"),
        (SettingError("the file is gone"), "the file is gone"),
        (ZeroDivisionError("a bug"), "The engine failed with ZeroDivisionError: a bug"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_cannot_be_started_is_raised_by_start(
    puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(self: Puppet, order: Run | Cancel | None) -> None:
        raise error

    monkeypatch.setattr(puppets, "does", fail)
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu"))
    with pytest.raises((EngineError, SettingError), match=message):
        supervisor.start()
    supervisor.close()


def test_workers_that_can_no_more_be_started_are_crashes(
    puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = start(Restarts(max_crashes=3, first_delay_s=0.0))

    def fail(self: Puppet, order: Run | Cancel | None) -> None:
        if order is None:
            raise SettingError("the file is gone")
        self.say(None)

    monkeypatch.setattr(puppets, "does", fail)
    running, behind = ask(supervisor), ask(supervisor)
    with pytest.raises(WorkerLostError):
        running.result()
    with pytest.raises(EngineDownError, match="3 workers ended"):
        behind.result()
    assert puppets.num_made == 3
    assert supervisor.status().restarts == 0
    supervisor.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_of_the_supervisor_leaves_nobody_waiting(puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = start()
    is_asked = threading.Event()

    def fail(self: Puppet, order: Run | Cancel | None) -> None:
        assert is_asked.wait(10.0) is False, "the lock is held here, so that both wait"

    monkeypatch.setattr(puppets, "does", fail)
    with supervisor.changed:
        running, behind = ask(supervisor), ask(supervisor)
        is_asked.set()
    for each in (running, behind):
        with pytest.raises(EngineError, match="The engine failed with AssertionError"):
            each.result()
    with pytest.raises(EngineError, match="AssertionError"):
        ask(supervisor)
    assert not supervisor.status().is_alive
    supervisor.close()


def test_an_engine_that_was_closed_cannot_be_started() -> None:
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu"))
    supervisor.close()
    with pytest.raises(ShuttingDownError, match="closed before it was started"):
        supervisor.start()


def test_a_worker_that_hangs_while_it_loads_is_given_up(puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puppets, "does", lambda self, order: None)
    with pytest.raises(StepTimeoutError, match=r"did not load the model within 0\.05 s"):
        start(load_timeout_s=0.05)
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu"))
    threading.Timer(0.05, supervisor.abandon).start()
    with pytest.raises(ShuttingDownError, match="closed before the model was loaded"):
        supervisor.start()


def test_a_request_that_is_compiled_is_not_taken_for_one_that_hangs(
    puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    does = puppets.does

    def slowly(self: Puppet, order: Run | Cancel | None) -> None:
        threading.Timer(0.0 if order is None else 0.5, does, (self, order)).start()

    monkeypatch.setattr(puppets, "does", slowly)
    supervisor = start(step_timeout_s=0.01, compile="eager")
    assert ask(supervisor).result() is GOOD
    supervisor.close()
    supervisor = start(step_timeout_s=0.01)
    with pytest.raises(StepTimeoutError, match="raise step_timeout_s"):
        ask(supervisor).result()
    supervisor.close()


def test_times_may_be_long_but_not_endless(puppets: type[Puppet]) -> None:
    supervisor = start(step_timeout_s=1e300, load_timeout_s=10**300)
    for wrong in (float("inf"), float("nan"), 0, -1.0, True, "3", 10**400):
        with pytest.raises(SettingError, match=r"deadline_s=.*; expected a number above 0"):
            ask(supervisor, deadline_s=wrong)
    for _ in range(2):
        assert ask(supervisor, deadline_s=1e300).result() is GOOD
    assert supervisor.status().is_alive
    supervisor.close()


def test_only_a_image_closes_the_circuit_and_a_worker_may_give_up(
    puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = Restarts()
    monkeypatch.setattr(restarts, "note_success", lambda: noted.append(True))
    noted: list[bool] = []
    supervisor = start(restarts)
    does, answers = puppets.does, [Finished(1, SettingError("no"), Usage(0, 0)), Fatal(EngineError("unsound"))]
    monkeypatch.setattr(puppets, "does", lambda self, order: self.say(answers.pop(0)))
    with pytest.raises(SettingError, match="no"):
        ask(supervisor).result()
    monkeypatch.setattr(puppets, "does", lambda self, order: self.say(READY if order is None else answers.pop(0)))
    with pytest.raises(EngineError, match="unsound"):
        ask(supervisor).result()
    assert noted == []
    monkeypatch.setattr(puppets, "does", does)
    assert ask(supervisor).result() is GOOD
    assert (noted, puppets.num_made) == ([True], 2)
    supervisor.close()
