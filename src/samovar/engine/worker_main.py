"""The life of a worker process: it loads the model and serves requests until its pipe closes."""

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
from typing import NamedTuple

import torch
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from ..core.errors import EngineError, SamovarError
from ..offload.pinned import trim_heap
from ..parallel import join_world
from .events import Event, Listener
from .messages import Fatal, Finished, FromWorker, Ready, Run, Update, receive, send
from .settings import OmniDiffusionConfig
from .worker import Worker

EXIT_ORPHANED, EXIT_BAD_MESSAGE, EXIT_GPU_LOST = 3, 4, 5
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Which process this is."""

    rank: int
    num_ranks: int
    parent_id: int
    store_port: int | None
    """Where ranks meet."""


def worker_main(config: OmniDiffusionConfig, place: Place, pipe: Connection) -> None:
    """The whole life of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent decides.
    die_with(place.parent_id)
    # tqdm's own lock is a named semaphore, which stays behind when this process is killed.
    tqdm.set_lock(threading.RLock())
    inbox = Inbox(pipe)
    try:
        _set_up_rank(config, place)
        worker = Worker(config)
        if config.warm_up or (config.warm_up is None and config.compile):
            worker.warm_up()
    except SamovarError as error:
        send(pipe, Fatal(error), place.parent_id)
        return
    except BaseException as error:
        send(pipe, Fatal(EngineError(f"Loading failed: {type(error).__name__}: {error}")), place.parent_id)
        raise
    ready = Ready(worker.facts, worker.load_seconds, worker.usage(), worker.max_runs)
    send(pipe, ready, place.parent_id)
    gc.collect()
    gc.freeze()  # Otherwise each collection would search the whole model, for a sixth of a second.
    for number in range(1, worker.max_runs):
        name = f"samovar request {number}"
        threading.Thread(target=_serve, args=(worker, inbox, pipe, place), daemon=True, name=name).start()
    _serve(worker, inbox, pipe, place)  # In this thread, which knows the GPU of its rank.


def _serve(worker: Worker, inbox: Inbox, pipe: Connection, place: Place) -> None:
    """Serve one request after the other. What ends one thread ends the process."""
    try:
        while True:
            serve_next(worker, inbox, pipe, place)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(1)


def die_with(parent_id: int) -> None:
    """End when the parent does, even if it is killed. Other systems than Linux notice by the end of the pipe."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_id:  # It has already ended.
        os._exit(EXIT_ORPHANED)


class Inbox:
    """Reads what the parent sends, also while requests run."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._runs: queue.SimpleQueue[Run] = queue.SimpleQueue()
        self._cancelled: dict[int, bool] = {}
        """Of those that were sent and are not over."""
        threading.Thread(target=self._read, daemon=True, name="samovar inbox").start()

    def next(self) -> Run:
        """The next request; waits for it."""
        return self._runs.get()

    def is_cancelled(self, number: int) -> bool:
        return self._cancelled.get(number, False)

    def forget(self, number: int) -> None:
        """A request is over."""
        self._cancelled.pop(number, None)

    def _read(self) -> None:
        code = EXIT_BAD_MESSAGE  # Better a new process than one that hears nothing.
        try:
            while True:
                message = receive(self._pipe)
                if isinstance(message, Run):
                    self._cancelled[message.number] = False
                    self._runs.put(message)
                elif message.number in self._cancelled:
                    self._cancelled[message.number] = True
        except (EOFError, OSError):
            code = 0  # The parent is gone. The system cleans up.
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)


def _set_up_rank(config: OmniDiffusionConfig, place: Place) -> None:
    """Share the processor with the other ranks, and on a CPU with other replicas; and join the ranks as under torchrun.
    The parent holds the store, so it outlives every rank."""
    num_processes = place.num_ranks * (config.num_replicas if config.execution_device().type == "cpu" else 1)
    if num_processes > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    if place.num_ranks > 1:
        os.environ |= rank_environment(place)
        join_world(backend=config.backend)


def rank_environment(place: Place) -> dict[str, str]:
    """The variables that torchrun would set."""
    variables = {
        "TORCHELASTIC_RUN_ID": "samovar",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(place.store_port),
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.rank),
        "WORLD_SIZE": str(place.num_ranks),
        "LOCAL_WORLD_SIZE": str(place.num_ranks),
    }
    if sys.platform == "linux":  # All ranks are on this machine, and no other machine should reach them.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            variables[name] = os.environ.get(name, "lo")
    return variables


_sending = threading.Lock()
"""Requests share a pipe, and a message may be followed by its images."""


def serve_next(worker: Worker, inbox: Inbox, pipe: Connection, place: Place) -> None:
    """Serve one request and free everything it used."""
    _answer(worker, inbox.next(), inbox, pipe, place)
    # An error is in a cycle with its frames, whose tensors may fill a GPU.
    gc.collect()
    trim_heap()  # Requests of all sizes fragment it: it would grow for days.


def _answer(worker: Worker, run: Run, inbox: Inbox, pipe: Connection, place: Place) -> None:
    def tell(message: FromWorker) -> None:
        with _sending:
            send(pipe, message, place.parent_id)

    def on_event(event: Event) -> None:
        if place.rank == 0:
            tell(Update(run.number, event))

    try:
        outcome = worker.make(run.request, Listener(on_event, lambda: inbox.is_cancelled(run.number)))
    except BaseException as error:
        tell(Fatal(EngineError(f"The worker failed: {type(error).__name__}: {error}")))
        raise
    if isinstance(outcome, EngineError) and not worker.is_healthy():
        tell(Fatal(outcome))
        os._exit(EXIT_GPU_LOST)  # A regular exit would wait for the GPU, which may never answer.
    inbox.forget(run.number)
    is_told = place.rank == 0 or isinstance(outcome, SamovarError)
    tell(Finished(run.number, outcome if is_told else None, worker.usage()))
