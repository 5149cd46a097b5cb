"""Tickets: every reader sees everything, what is over stays over, and nothing is left of it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from samovar import OmniDiffusionSamplingParams
from samovar.engine import Done, Event, Failed, Progress, Request, Started, Supervisor, Ticket
from samovar.errors import CancelledRequestError


def ask(steps: int) -> Request:
    return Request("a cat", OmniDiffusionSamplingParams(num_inference_steps=steps, seed=3))


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Only what nobody holds goes: what holds itself stays, as it may on a server for hundreds of requests."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def read(ticket: Ticket) -> list[Event]:
    return [event async for event in ticket]


def test_all_readers_see_everything(engine: Supervisor) -> None:
    async def main() -> None:
        ticket = Ticket(engine, ask(3))
        first, second, result = await asyncio.gather(read(ticket), read(ticket), ticket.result())
        assert first == second == await read(ticket)
        assert isinstance(first[0], Started)
        assert [event.step for event in first if isinstance(event, Progress)] == [1, 2, 3]
        assert first[-1] == Done(result)
        assert ticket.place == 0
        ticket.cancel()
        assert await ticket.result() is result

    asyncio.run(main())


def test_places_and_what_is_taken_back(engine: Supervisor) -> None:
    async def main() -> None:
        running = Ticket(engine, ask(2000))
        async for event in running:
            if isinstance(event, Progress):
                break
        waiting = [Ticket(engine, ask(1)) for _ in range(3)]
        assert [ticket.place for ticket in (running, *waiting)] == [0, 1, 2, 3]
        assert len({ticket.id for ticket in (running, *waiting)}) == 4
        waiting[0].cancel()
        assert [ticket.place for ticket in waiting] == [0, 1, 2]
        assert isinstance((await read(waiting[0]))[-1], Failed)
        running.cancel()
        with pytest.raises(CancelledRequestError):
            await running.result()
        assert [len((await ticket.result()).images) for ticket in waiting[1:]] == [1, 1]

    asyncio.run(main())


def test_a_loop_that_is_gone_harms_nobody(engine: Supervisor) -> None:
    async def main() -> Ticket:
        return Ticket(engine, ask(5))

    async def later() -> None:
        assert (await Ticket(engine, ask(1)).result()).seeds == (3,)

    asyncio.run(main())
    asyncio.run(later())


@pytest.mark.usefixtures("uncollected")
def test_pictures_go_with_their_ticket(engine: Supervisor) -> None:
    async def made() -> list[weakref.ref[object]]:
        ticket = Ticket(engine, ask(2))
        result = await ticket.result()
        return [weakref.ref(ticket), weakref.ref(result.images[0])]

    async def main() -> None:
        refs = await made()
        await Ticket(engine, ask(1)).result()  # The threads have turned to another.
        assert [ref() for ref in refs] == [None, None]

    asyncio.run(main())


@pytest.mark.usefixtures("uncollected")
def test_a_failed_request_goes_with_its_ticket(engine: Supervisor) -> None:
    async def failed() -> list[weakref.ref[object]]:
        ticket = Ticket(engine, ask(2000))
        async for event in ticket:
            if isinstance(event, Progress):
                break
        ticket.cancel()
        end = await ticket.end()
        assert isinstance(end, CancelledRequestError)
        return [weakref.ref(ticket), weakref.ref(end)]

    async def main() -> None:
        refs = await failed()
        await Ticket(engine, ask(1)).result()
        assert [ref() for ref in refs] == [None, None]

    asyncio.run(main())
