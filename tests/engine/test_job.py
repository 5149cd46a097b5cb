"""Jobs: every reader sees everything, what is over stays over, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import CancelledRequestError
from samovar.engine import Done, Event, Failed, GenerationResult, Job, Progress, Request, Started, Supervisor

NOBODY: Any = None
"""A supervisor that is never asked."""


def ask(steps: int) -> Request:
    return Request("a cat", OmniDiffusionSamplingParams(num_inference_steps=steps, seed=3))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what nobody holds goes: what holds itself stays, as it may on a server for hundreds of requests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def read(job: Job) -> list[Event]:
    return [event async for event in job]


def test_all_readers_see_everything(engine: Supervisor) -> None:
    async def main() -> None:
        job = engine.submit(ask(3))
        first, second, result = await asyncio.gather(read(job), read(job), job.result())
        assert first == second == await read(job)
        assert isinstance(first[0], Started)
        assert [event.step for event in first if isinstance(event, Progress)] == [1, 2, 3]
        assert first[-1] == Done(result)
        assert job.position == 0
        job.cancel()
        assert await job.result() is result

    asyncio.run(main())


def test_positions_and_cancelling(engine: Supervisor) -> None:
    async def main() -> None:
        running = engine.submit(ask(2000))
        async for event in running:
            if isinstance(event, Progress):
                break
        waiting = [engine.submit(ask(1)) for _ in range(3)]
        assert [job.position for job in (running, *waiting)] == [0, 1, 2, 3]
        assert len({job.id for job in (running, *waiting)}) == 4
        waiting[0].cancel()
        assert [job.position for job in waiting] == [0, 1, 2]
        assert isinstance((await read(waiting[0]))[-1], Failed)
        running.cancel()
        with pytest.raises(CancelledRequestError):
            await running.result()
        assert [len((await job.result()).images) for job in waiting[1:]] == [1, 1]

    asyncio.run(main())


def test_a_loop_that_is_gone_harms_nobody(engine: Supervisor) -> None:
    async def main() -> Job:
        return engine.submit(ask(5))

    async def later() -> None:
        assert (await engine.submit(ask(1)).result()).seeds == (3,)

    asyncio.run(main())
    asyncio.run(later())


@pytest.mark.usefixtures("uncollected")
def test_images_go_with_their_job(engine: Supervisor) -> None:
    async def made() -> list[weakref.ref[object]]:
        job = engine.submit(ask(2))
        result = await job.result()
        return [weakref.ref(job), weakref.ref(result.images[0])]

    async def main() -> None:
        refs = await made()
        await engine.submit(ask(1)).result()  # The threads have turned to another.
        assert [ref() for ref in refs] == [None, None]

    asyncio.run(main())


@pytest.mark.usefixtures("uncollected")
def test_a_failed_request_goes_with_its_job(engine: Supervisor) -> None:
    async def failed() -> list[weakref.ref[object]]:
        job = engine.submit(ask(2000))
        async for event in job:
            if isinstance(event, Progress):
                break
        job.cancel()
        end = await job.outcome()
        assert isinstance(end, CancelledRequestError)
        return [weakref.ref(job), weakref.ref(end)]

    async def main() -> None:
        refs = await failed()
        await engine.submit(ask(1)).result()
        assert [ref() for ref in refs] == [None, None]

    asyncio.run(main())


def test_nothing_is_told_after_the_end() -> None:
    told: list[Event] = []
    one = Job(NOBODY, Request("a cat"), told.append)
    one.end(Failed(CancelledRequestError("taken back")))
    one.tell(Done(GenerationResult("a cat", (), (), OmniDiffusionSamplingParams(), 0.0)))
    one.end(Failed(CancelledRequestError("again")))
    (event,) = told
    assert isinstance(event, Failed)
    assert str(event.error) == "taken back"
