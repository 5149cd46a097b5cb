"""Replicas: several workers, one queue. What happens to one of them costs only what ran in it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from asking import Asked, generate, is_alive, is_step, pixels, wait_for
from test_supervisor import GOOD, LONG, READY, Puppet

from samovar.core.errors import (
    CancelledRequestError,
    EngineDownError,
    ModelError,
    QueueFullError,
    QueueTimeoutError,
    ShuttingDownError,
    WorkerLostError,
)
from samovar.engine import (
    Failed,
    OmniDiffusionConfig,
    OmniDiffusionSamplingParams,
    PipelineFacts,
    Request,
    Restarts,
    Started,
    Supervisor,
    Worker,
)
from samovar.engine.messages import Cancel, Fatal, Finished, Run
from samovar.engine.replica import silence_limit
from samovar.engine.worker import Usage


@pytest.fixture(scope="module")
def twins(folder: Path) -> Iterator[Supervisor]:
    """An engine of two workers, each a process."""
    how: dict[str, Any] = {"device": "cpu", "progress": False, "max_queue": 6, "enable_layerwise_offload": True}
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), replicas=2, **how))
    supervisor.start()
    yield supervisor
    supervisor.close()


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The image of one worker alone, computed with as many threads as a replica has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        config = OmniDiffusionConfig(str(folder), device="cpu", progress=False, enable_layerwise_offload=True)
        params = OmniDiffusionSamplingParams(num_inference_steps=3, seed=3)
        return pixels(generate(Worker(config), "a cat", params))
    finally:
        torch.set_num_threads(threads)


def running(engine: Supervisor, count: int = 1) -> list[Asked]:
    """Requests that run until they are cancelled."""
    asked = [Asked(engine, num_inference_steps=LONG) for _ in range(count)]
    for each in asked:
        each.until(is_step)
    return asked


def cancel(engine: Supervisor, *asked: Asked) -> None:
    for each in asked:
        engine.cancel(each.job)
        with pytest.raises(CancelledRequestError):
            each.result()


def busy(engine: Supervisor) -> list[int]:
    return [replica.running for replica in engine.status().replicas]


def test_two_requests_run_at_once_and_either_worker_gives_the_image_of_one(twins: Supervisor, expected: Any) -> None:
    first = running(twins)
    used = busy(twins)
    assert sorted(used) == [0, 1]
    assert np.array_equal(pixels(Asked(twins, num_inference_steps=3).result()), expected)
    second = running(twins)
    assert busy(twins) == [1, 1]
    assert (twins.status().running, len(twins.status().worker_ids)) == (2, 2)
    waiting = Asked(twins, num_inference_steps=3)
    assert twins.position(waiting.job) == 1
    cancel(twins, *first)
    assert np.array_equal(pixels(waiting.result()), expected), "where the first one ran"
    made = [replica.images for replica in twins.status().replicas]
    assert min(made) == 1, "each has made one"
    cancel(twins, *second)


def test_priorities_deadlines_and_cancellation_hold_for_one_queue(twins: Supervisor) -> None:
    both = running(twins, 2)
    impatient = Asked(twins, deadline_s=0.05)
    with pytest.raises(QueueTimeoutError):
        impatient.result()
    last, first = Asked(twins, "an owl", num_inference_steps=1), Asked(twins, "a dog", priority=1)
    more = [Asked(twins) for _ in range(4)]
    assert [twins.position(each.job) for each in (first, last, more[0])] == [1, 2, 3]
    with pytest.raises(QueueFullError, match="6 requests are waiting"):
        Asked(twins)
    cancel(twins, *more)
    order: list[str] = []
    for each in (first, last):
        each.job._deliver = lambda event, each=each: (  # type: ignore[misc]
            order.append(each.job.request.prompt) if isinstance(event, Started) else None,
            each._queue.put(event),
        )[1]
    cancel(twins, both[0])
    assert first.result().prompt == "a dog"
    assert last.result().prompt == "an owl"
    assert order == ["a dog", "an owl"]
    assert busy(twins).count(1) == 1, "the other one still runs"
    cancel(twins, both[1])


def test_offloaded_weights_are_in_memory_once(twins: Supervisor) -> None:
    def mapped(process_id: int) -> set[str]:
        with open(f"/proc/{process_id}/maps", encoding="utf-8") as file:
            return {line.split()[-1] for line in file if "/dev/shm/samovar-" in line}

    one, other = (mapped(process_id) for process_id in twins.status().worker_ids)
    assert one == other != set()
    text = str(twins.explain())
    assert "replicas: 2: cpu, cpu" in text
    assert "one copy for all" in text


def test_a_worker_that_is_killed_costs_only_its_request_while_the_other_serves(
    twins: Supervisor, expected: Any
) -> None:
    before = twins.status().restarts
    both = running(twins, 2)
    waiting = [Asked(twins, num_inference_steps=3) for _ in range(3)]
    killed, kept = twins.status().worker_ids
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: any(each.job.is_over for each in both))
    ((lost,), (left,)) = ([each for each in both if each.job.is_over is is_over] for is_over in (True, False))
    with pytest.raises(WorkerLostError, match=rf"process {killed}, signal 9\), after step \d+"):
        lost.result()
    status = twins.status()
    assert (status.is_ready, status.is_alive, status.replicas_ready) == (True, True, 1)
    for each in waiting:
        assert np.array_equal(pixels(each.result()), expected), "by the one that took its place, or by the other"
    wait_for(lambda: twins.status().replicas_ready == 2)
    status = twins.status()
    assert [replica.restarts for replica in status.replicas] == [before + 1, 0]
    assert status.worker_ids[1] == kept
    assert not left.job.is_over, "it runs on"
    cancel(twins, left)


@pytest.mark.slow
def test_one_after_the_other_is_killed_under_load_and_all_else_is_served(folder: Path, expected: Any) -> None:
    restarts = Restarts(max_crashes=1000, first_delay_s=0.0)
    config = OmniDiffusionConfig(
        str(folder), device="cpu", progress=False, replicas=2, max_queue=100, enable_layerwise_offload=True
    )
    supervisor = Supervisor(config, restarts)
    supervisor.start()
    lost = 0
    for number in range(6):
        wait_for(lambda: supervisor.status().replicas_ready == 2)
        asked = [Asked(supervisor, num_inference_steps=3) for _ in range(20)]
        asked[0].until(is_step)
        target = supervisor.status().replicas[number % 2]
        os.kill(target.worker_ids[0], signal.SIGKILL)
        failed = 0
        for each in asked:
            try:
                assert np.array_equal(pixels(each.result()), expected)
            except WorkerLostError:
                failed += 1
        assert failed <= 1, "one ran in it"
        lost += failed
    status = supervisor.status()
    assert (status.failures.get("worker_restarted", 0), status.images) == (lost, 6 * 20 - lost)
    supervisor.close()
    assert not any(map(is_alive, status.worker_ids))


@pytest.mark.slow
def test_a_worker_killed_in_a_batch_costs_what_ran_in_it_and_each_is_told(folder: Path) -> None:
    engine = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, max_batch=3, max_queue=8))
    engine.start()
    try:
        (first,) = running(engine)
        together = [Asked(engine, num_inference_steps=LONG) for _ in range(3)]
        waiting = [Asked(engine, num_inference_steps=2), Asked(engine, num_inference_steps=3)]
        cancel(engine, first)
        for each in together:
            each.until(is_step)
        assert engine.status().running == 5
        os.kill(engine.status().worker_ids[0], signal.SIGKILL)
        for each in together:
            with pytest.raises(WorkerLostError, match="signal 9"):
                each.result()
        assert [len(Asked(engine, num_inference_steps=2).result().images) for each in waiting] == [1, 1]
    finally:
        engine.close()


@pytest.mark.slow
def test_replicas_may_have_ranks(folder: Path) -> None:
    how: dict[str, Any] = {"device": "cpu", "progress": False, "cfg_parallel_size": 2}
    asked = {"num_inference_steps": 4, "negative_prompt": "a dog", "true_cfg_scale": 2.0}
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), replicas=2, **how))
    supervisor.start()
    assert [len(replica.worker_ids) for replica in supervisor.status().replicas] == [2, 2]
    image = pixels(Asked(supervisor, **asked).result())
    busy_one = Asked(supervisor, **{**asked, "num_inference_steps": LONG})
    busy_one.until(is_step)
    number = busy(supervisor).index(1)
    assert np.array_equal(pixels(Asked(supervisor, **asked).result()), image), "by the other group"
    os.kill(supervisor.status().replicas[number].worker_ids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="rank 1 of 2"):
        busy_one.result()
    assert supervisor.status().replicas_ready == 1
    assert np.array_equal(pixels(Asked(supervisor, **asked).result()), image)
    wait_for(lambda: supervisor.status().replicas_ready == 2)
    supervisor.close()


@pytest.mark.gpu
def test_two_workers_may_share_a_gpu(folder: Path) -> None:
    """As many GPUs as there are would do the same: each worker sees only those of its replica."""
    how: dict[str, Any] = {"progress": False, "enable_layerwise_offload": True}
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), devices="0,0", **how))
    supervisor.start()
    image = pixels(Asked(supervisor, num_inference_steps=3).result())
    for number in range(2):
        (blocking,) = running(supervisor)
        os.kill(supervisor.status().replicas[1 - busy(supervisor).index(1)].worker_ids[0], signal.SIGKILL)
        wait_for(lambda number=number: supervisor.status().restarts == number + 1)  # type: ignore[misc]
        assert np.array_equal(pixels(Asked(supervisor, num_inference_steps=3).result()), image)
        cancel(supervisor, blocking)
    assert [replica.gpus for replica in supervisor.status().replicas] == [(0,), (0,)]
    assert "replicas: 2: GPU 0, GPU 0" in str(supervisor.explain())
    supervisor.close()


@pytest.mark.slow
def test_closing_lets_all_of_them_finish(folder: Path) -> None:
    supervisor = Supervisor(OmniDiffusionConfig(str(folder), device="cpu", progress=False, replicas=2))
    supervisor.start()
    processes = supervisor.status().worker_ids
    both = [Asked(supervisor, num_inference_steps=60) for _ in range(2)]
    for each in both:
        each.until(is_step)
    waiting = Asked(supervisor)
    supervisor.close(drain_s=120.0)
    assert [each.result().seeds for each in both] == [(3,), (3,)]
    with pytest.raises(ShuttingDownError, match="had not been started"):
        waiting.result()
    assert not any(map(is_alive, processes))


# ------------------------------------------------------------------------------------------------ without a process


@pytest.fixture
def puppets(monkeypatch: pytest.MonkeyPatch) -> type[Puppet]:
    """Workers that load at once, and answer when they are told to."""

    class Waiting(Puppet):
        orders: ClassVar[list[tuple[Puppet, Run]]] = []

        def does(self, order: Run | Cancel | None) -> None:
            if order is None:
                self.say(READY)
            elif isinstance(order, Run):
                self.orders.append((self, order))

    monkeypatch.setattr("samovar.engine.replica.WorkerGroup", Waiting)
    return Waiting


def start(restarts: Restarts | None = None) -> Supervisor:
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu", progress=False, replicas=2), restarts)
    supervisor.start()
    return supervisor


def ask(supervisor: Supervisor) -> Asked:
    return Asked(supervisor, seed=None)


def end_all(orders: list[tuple[Puppet, Run]]) -> None:
    for puppet, order in orders:
        puppet.say(Finished(order.number, GOOD, Usage(0, 0)))


def test_a_worker_has_as_many_as_it_can_and_one_that_ends_costs_each_of_them_and_no_other(
    puppets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    does, ready = puppets.does, READY._replace(max_runs=3)
    monkeypatch.setattr(puppets, "orders", [])
    monkeypatch.setattr(puppets, "does", lambda self, order: self.say(ready) if order is None else does(self, order))
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu", progress=False, max_batch=2))
    supervisor.start()
    asked = [ask(supervisor) for _ in range(5)]
    wait_for(lambda: len(puppets.orders) == 3)
    puppet, first = puppets.orders[0]
    puppet.say(Finished(first.number, GOOD, Usage(0, 0)))
    assert asked[0].result() == GOOD
    wait_for(lambda: len(puppets.orders) == 4)
    assert supervisor.status().running == 3
    puppet.say(None)
    for each in asked[1:4]:
        with pytest.raises(WorkerLostError, match="a puppet"):
            each.result()
    wait_for(lambda: len(puppets.orders) == 5)
    end_all(puppets.orders[4:])
    assert asked[4].result() == GOOD
    assert supervisor.status().failures == {"worker_restarted": 3}
    supervisor.close()


def test_jobs_go_to_the_worker_that_has_the_fewest(puppets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    does, ready = puppets.does, READY._replace(max_runs=3)
    monkeypatch.setattr(puppets, "orders", [])
    monkeypatch.setattr(puppets, "does", lambda self, order: self.say(ready) if order is None else does(self, order))
    supervisor = start()
    for count in range(1, 5):
        ask(supervisor)
        wait_for(lambda count=count: len(puppets.orders) == count)  # type: ignore[misc]
    assert sorted(puppet.replica for puppet, _ in puppets.orders) == [0, 0, 1, 1]
    supervisor.close()


def test_a_worker_may_be_silent_for_longer_with_larger_images() -> None:
    facts = PipelineFacts("Tiny", frozenset({"height", "width"}), 8, OmniDiffusionSamplingParams(height=64, width=64))
    config = OmniDiffusionConfig("emoji", device="cpu", step_timeout_s=10.0, load_timeout_s=100.0)

    def limit(side: int) -> float:
        return silence_limit(config, facts, Request("", OmniDiffusionSamplingParams(height=side, width=side)))

    assert [limit(side) for side in (32, 64, 80, 640)] == [10.0, 10.0, 10.0 * 1.25**4, 100.0]
    assert silence_limit(replace(config, compile=True), facts, Request("")) == 100.0


def test_one_that_cannot_load_the_model_is_raised_by_start(
    puppets: type[Puppet], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(puppets, "end", lambda self, wait_s=0.0: ended.append(self.replica))
    fatal = Fatal(ModelError("does not fit on this GPU"))

    def load(self: Puppet, order: Run | Cancel | None) -> None:
        if self.replica == 0:
            self.say(READY)
        else:
            threading.Timer(0.2, self.say, (fatal,)).start()

    monkeypatch.setattr(puppets, "does", load)
    supervisor = Supervisor(OmniDiffusionConfig("emoji", device="cpu", replicas=2))
    with pytest.raises(ModelError, match="does not fit on this GPU"):
        supervisor.start()
    supervisor.close()
    assert puppets.num_made == len(ended) > 0
    assert "replica 1 (cpu): does not fit on this GPU" in caplog.text


def test_the_engine_is_down_only_if_all_are(puppets: Any) -> None:
    supervisor = start(Restarts(max_crashes=2, first_delay_s=0.0))

    def crash(number: int, num_alive: int) -> list[str]:
        """How requests end, one in each worker, of which one ends."""
        wait_for(lambda: supervisor.status().replicas_ready == num_alive)
        asked = [ask(supervisor) for _ in range(num_alive)]
        wait_for(lambda: len(puppets.orders) == num_alive)
        orders, puppets.orders[:] = list(puppets.orders), []
        for puppet, order in orders:
            puppet.say(None if puppet.replica == number else Finished(order.number, GOOD, Usage(0, 0)))
        return sorted(type(each.until(lambda event: False)).__name__ for each in asked)

    for _ in range(2):
        assert crash(1, num_alive=2) == ["Done", "Failed"]
    wait_for(lambda: supervisor.status().replicas_ready == 1)
    assert supervisor.status().is_ready
    assert supervisor.status().is_alive
    assert crash(0, num_alive=1) == ["Failed"]
    wait_for(lambda: supervisor.status().replicas_ready == 1)
    running, waiting = ask(supervisor), ask(supervisor)
    wait_for(lambda: len(puppets.orders) == 1)
    puppets.orders[0][0].say(None)
    with pytest.raises(WorkerLostError):
        running.result()
    with pytest.raises(EngineDownError, match="2 workers ended within 60 s"):
        waiting.result()
    status = supervisor.status()
    assert (status.is_ready, status.is_alive) == (False, False)
    assert [replica.restarts for replica in status.replicas] == [1, 1]
    with pytest.raises(EngineDownError):
        ask(supervisor)
    supervisor.close()


def test_closing_waits_for_both(puppets: Any) -> None:
    supervisor = start()
    both = [ask(supervisor), ask(supervisor)]
    wait_for(lambda: len(puppets.orders) == 2)
    waiting = ask(supervisor)
    closing = threading.Thread(target=supervisor.close, args=(60.0,))
    closing.start()
    with pytest.raises(ShuttingDownError, match="had not been started"):
        waiting.result()
    end_all(puppets.orders[:1])
    wait_for(lambda: supervisor.status().running == 1)
    assert closing.is_alive()
    end_all(puppets.orders[1:])
    closing.join(60.0)
    assert [each.result() for each in both] == [GOOD, GOOD]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_one_thread_leaves_nobody_waiting(puppets: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = start()
    both = [ask(supervisor), ask(supervisor)]
    wait_for(lambda: len(puppets.orders) == 2)
    monkeypatch.setattr(puppets, "does", lambda self, order: 1 / 0)
    asked = [*both, ask(supervisor)]
    end_all(puppets.orders[:1])
    ends = [each.until(lambda event: False) for each in asked]
    failed = [str(end.error) for end in ends if isinstance(end, Failed)]
    assert len(failed) == 2, "the third and the one beside it; the first was done"
    assert all("The engine failed with ZeroDivisionError" in text for text in failed)
    assert not supervisor.status().is_alive
    supervisor.close()
