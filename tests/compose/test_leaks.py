"""What was on and came off is gone, and what a run kept is gone with it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import PIPELINES
from samovar import attach

FLUX = PIPELINES["flux"]
ALL: dict[str, Any] = {
    "cache": {"backend": "tea_cache", "schedule": "#."}, "offload": {"mode": "layerwise", "device": "cpu"},
}  # fmt: skip


def alive() -> Counter[str]:
    """How many tensors there are, and how many objects of Samovar's classes, by class."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
        elif str(kind.__module__).startswith("samovar."):
            found[kind.__qualname__] += 1
    return found


def resident_bytes() -> int:
    """What this process holds of the machine's memory."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


def grown(repeat: Callable[[], object], times: int, warm: int = 3) -> Counter[str]:
    """What there is more of after so many times; the first few may fill memories that stay."""
    for _ in range(warm):
        repeat()
    before = alive()
    for _ in range(times):
        repeat()
    return alive() - before


def attach_and_detach(pipe: Any) -> None:
    with attach(pipe, **ALL, compile="eager"):
        pass


def draw_once(pipe: Any) -> None:
    with attach(pipe, **ALL):
        FLUX.run(pipe, 2)


def test_rounds_and_runs_leave_nothing_behind() -> None:
    pipe = FLUX.build(0)
    assert grown(lambda: attach_and_detach(pipe), 5) == {}
    assert grown(lambda: draw_once(pipe), 3) == {}
    with attach(pipe, **ALL):
        # The figures of the last sixteen runs are kept; all else ends with the run.
        assert grown(lambda: FLUX.run(pipe, 2), 3, warm=17) == {}


def test_a_pipeline_that_is_given_up_while_attached_goes_too() -> None:
    def give_up() -> None:
        attach(FLUX.build(0), **ALL)

    assert grown(give_up, 3) == {}


@pytest.mark.slow
@pytest.mark.parametrize("repeat", [attach_and_detach, draw_once], ids=lambda repeat: repeat.__name__)
def test_two_hundred_times(repeat: Callable[[Any], None]) -> None:
    pipe = FLUX.build(0)
    assert grown(lambda: repeat(pipe), 50) == {}
    before = resident_bytes()
    assert grown(lambda: repeat(pipe), 150) == {}
    assert resident_bytes() - before < 8 * 2**20
