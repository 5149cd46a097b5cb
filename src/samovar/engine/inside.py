"""What does a worker's process do? It loads the model, and makes pictures until its pipe ends."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from ..errors import EngineError, SamovarError
from .events import Event, Listener
from .messages import Answer, Drop, Make, Ready, Refused, Told
from .settings import OmniDiffusionConfig
from .wire import receive, send
from .worker import Outcome, Worker

EXIT_ORPHANED, EXIT_DEAF, EXIT_UNSOUND = 3, 4, 5
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Which process of how many this is."""

    rank: int
    num_ranks: int
    parent_id: int
    store_port: int | None
    """Where ranks meet."""


def serve(config: OmniDiffusionConfig, place: Place, pipe: Connection) -> None:
    """The whole life of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one decides.
    die_with(place.parent_id)
    # Its own lock is one between processes, with a name that is left behind when this one is killed.
    tqdm.set_lock(threading.RLock())
    if place.num_ranks > 1:
        _prepare_world(place)
    orders = Orders(pipe)
    try:
        worker = _load(config, place)
    except SamovarError as error:
        send(pipe, Refused(error), place.parent_id)
        return
    except BaseException as error:  # The edge of the process: whatever it is, it must be told.
        send(pipe, Refused(EngineError(f"Loading failed: {type(error).__name__}: {error}")), place.parent_id)
        return
    send(pipe, Ready(worker.facts, worker.load_seconds, worker.usage(), worker.max_batch), place.parent_id)
    gc.collect()
    gc.freeze()  # The model stays: to look through all of it for garbage would take a sixth of a second each time.
    while True:
        work_once(worker, orders, pipe, place)


def die_with(parent_id: int) -> None:
    """End when the parent does, even if it is killed; the end of the pipe is what other systems have."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:  # It was faster.
        os._exit(EXIT_ORPHANED)


class Orders:
    """What the parent says, heard while pictures are made."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._jobs: queue.SimpleQueue[Make] = queue.SimpleQueue()
        self._dropped: set[tuple[int, int]] = set()
        """Written by the listening thread alone: with two that write, a cancellation could be lost."""
        threading.Thread(target=self._listen, daemon=True, name="samovar orders").start()

    def next(self) -> Make:
        """The next job, when it comes."""
        return self._jobs.get()

    def is_dropped(self, job: int, index: int) -> bool:
        return (job, index) in self._dropped

    def _listen(self) -> None:
        while True:
            try:
                order = receive(self._pipe)
            except (EOFError, OSError):
                os._exit(0)  # Nobody is left to work for. There is nothing to clean up that the system does not.
            except (
                BaseException
            ):  # An order that is not understood: better another process than one that hears nothing.
                traceback.print_exc()
                os._exit(EXIT_DEAF)
            if isinstance(order, Make):
                self._dropped = {drop for drop in self._dropped if drop[0] >= order.job}
                self._jobs.put(order)
            elif isinstance(order, Drop):
                self._dropped = {*self._dropped, (order.job, order.request)}


def _prepare_world(place: Place) -> None:
    """As torchrun would: the parent holds the store, so that it outlives every rank."""
    import torch

    torch.set_num_threads(max(1, torch.get_num_threads() // place.num_ranks))
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "samovar",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.store_port),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.num_ranks),
        "LOCAL_WORLD_SIZE": str(place.num_ranks),
    }
    if sys.platform == "linux":  # All are on this machine, and no other is to reach them.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")


def _load(config: OmniDiffusionConfig, place: Place) -> Worker:
    if place.num_ranks > 1:
        from ..parallel import join_world

        join_world(backend=config.backend)
    return Worker(config)


def work_once(worker: Worker, orders: Orders, pipe: Connection, place: Place) -> None:
    """One job, of which nothing is left."""
    _answer(worker, orders.next(), orders, pipe, place)
    # An error holds the frames that it has passed, whose tensors may fill a GPU, and is held by one of them.
    gc.collect()
    _give_back_heap()


def _give_back_heap() -> None:
    """Free memory goes back to the system: jobs of all sizes leave holes, and a heap with holes grows for days."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # Not in every libc.
        trim(0)


def _answer(worker: Worker, order: Make, orders: Orders, pipe: Connection, place: Place) -> None:
    def tell(index: int, event: Event) -> None:
        if place.rank == 0:
            send(pipe, Told(order.job, index, event), place.parent_id)

    def is_cancelled(index: int) -> bool:
        return orders.is_dropped(order.job, index)

    outcomes: list[Any]
    try:
        outcomes = list(worker.make(order.requests, Listener(tell, is_cancelled)))
    except BaseException as error:  # As above.
        failed = EngineError(f"The worker failed: {type(error).__name__}: {error}")
        outcomes = [failed] * len(order.requests)
    broken = [outcome for outcome in outcomes if isinstance(outcome, EngineError)]
    if broken and not worker.is_sound():
        send(pipe, Refused(broken[0]), place.parent_id)
        os._exit(EXIT_UNSOUND)  # To leave in an orderly way would ask the GPU, which may never answer.
    if place.rank:
        outcomes = [_error_alone(outcome) for outcome in outcomes]
    send(pipe, Answer(order.job, tuple(outcomes), worker.usage()), place.parent_id)


def _error_alone(outcome: Outcome) -> SamovarError | None:
    return outcome if isinstance(outcome, SamovarError) else None
