"""Runs a stage until its budget or this call's time is spent, and goes on next time.

A stage says what a batch is, what its gradient is and how fast to learn; the loop does the rest
in one of four modes, from the fastest to the one that always works.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from training import checkpoint
from training.checkpoint import Described, Progress
from training.optim import Optimiser

MODES = ("graph-compiled", "compiled", "graph", "eager")
SAVE_EVERY = 75.0  # seconds
Batch = tuple[Tensor, ...]
Log = Callable[[str], None]


class Diverged(RuntimeError):
    """The loss is no longer finite."""


class Stage(Protocol):
    """One network, or several trained together."""

    name: str
    batch_size: int
    optimiser: Optimiser

    def batch(self, step: int) -> Batch: ...

    def gradient(self, batch: Batch, fraction: float, master: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the flat gradient at the weights `master`."""
        ...

    def set_rates(self, step: int, fraction: float) -> None: ...

    def use_compiled(self, on: bool) -> None: ...

    capturable: bool
    """Whether a step depends on nothing but its batch and the optimiser's numbers."""


@dataclass(frozen=True)
class Budget:
    """How long a stage is trained in all, over any number of calls: by time or by steps."""

    seconds: float = math.inf
    steps: int | None = None

    def fraction(self, progress: Progress) -> float:
        if self.steps is not None:
            return progress.step / self.steps
        return progress.seconds / self.seconds


class Until:
    """A budget that ends at a moment (monotonic seconds) and begins when it is first asked."""

    def __init__(self, deadline: float) -> None:
        self.deadline, self.total = deadline, 0.0

    def fraction(self, progress: Progress) -> float:
        if not self.total:
            self.total = max(1e-3, progress.seconds + self.deadline - time.monotonic())
        return progress.seconds / self.total


class Captured:
    """One whole step as a CUDA graph: copy a batch in, replay."""

    def __init__(self, stage: Stage, batch: Batch) -> None:
        self.inputs = tuple(t.clone() for t in batch)
        before = {name: t.clone() for name, t in stage.optimiser.state().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                plain_step(stage, self.inputs, 0.0)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = plain_step(stage, self.inputs, 0.0)
        stage.optimiser.load(before)

    def __call__(self, batch: Batch) -> Tensor:
        for own, new in zip(self.inputs, batch, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.loss.clone()


def plain_step(stage: Stage, batch: Batch, fraction: float) -> Tensor:
    loss, grad = stage.gradient(batch, fraction, stage.optimiser.master)
    stage.optimiser.update(grad)
    return loss.detach()


def check_compiled(stage: Stage, log: Log) -> None:
    """Compile on a real batch and compare loss and gradient with the plain ones."""
    started = time.monotonic()
    master = stage.optimiser.master
    generator = torch.Generator(master.device).manual_seed(1)
    noise = torch.randn(master.shape, generator=generator, device=master.device)
    shaken = master + 0.02 * noise  # at the start most gradients are zero: move off it
    batch = stage.batch(0)
    stage.use_compiled(False)
    loss, grad = stage.gradient(batch, 0.0, shaken)
    stage.use_compiled(True)
    loss2, grad2 = stage.gradient(batch, 0.0, shaken)
    off = ((grad2.float() - grad.float()).norm() / grad.float().norm()).item()
    log(
        f"{stage.name}: compiled in {time.monotonic() - started:.0f} s, loss {loss2.item():.5f} "
        f"(plain {loss.item():.5f}), gradient off by {off:.4f}"
    )
    if not off < 0.3 or abs(loss2.item() / loss.item() - 1) > 0.02:
        raise RuntimeError(f"{stage.name}: the compiled gradient is wrong, off by {off:.3f}")


def prepare(stage: Stage, mode: str, log: Log) -> Callable[[Batch, float], Tensor]:
    """The step function of a mode, warmed up."""
    if "compiled" in mode:
        check_compiled(stage, log)
    if not (mode.startswith("graph") and stage.capturable):
        return lambda batch, fraction: plain_step(stage, batch, fraction)
    graphs: dict[tuple[torch.Size, ...], Captured] = {}

    def replay(batch: Batch, fraction: float) -> Tensor:
        shapes = tuple(t.shape for t in batch)
        if shapes not in graphs:
            graphs[shapes] = Captured(stage, batch)
            log(f"{stage.name}: captured a step for a batch of {len(batch[0])}")
        return graphs[shapes](batch)

    return replay


def run(
    stage: Stage, budget: Budget | Until, path: Path, settings: Described, mode: str, deadline: float,
    log: Log,
) -> Progress:  # fmt: skip
    """Train until the budget or, at `deadline` (monotonic seconds), this call's time is spent."""
    kept = checkpoint.load(path, settings)
    progress = Progress()
    if kept is not None:
        state, progress = kept
        stage.optimiser.load(state)
        log(f"{stage.name}: goes on from step {progress.step}, {progress.seconds:.0f} s spent")
    if progress.done:
        return progress
    if time.monotonic() > deadline:
        return progress
    step = prepare(stage, mode, log)

    def save() -> None:
        checkpoint.save(path, stage.optimiser.state(), progress, settings)

    pending: deque[Tensor] = deque()
    recent: list[float] = []
    last_log = last_save = began = time.monotonic()
    before, first = progress.seconds, progress.step
    while (fraction := budget.fraction(progress)) < 1 and time.monotonic() < deadline:
        stage.set_rates(progress.step, fraction)
        pending.append(step(stage.batch(progress.step), fraction))
        if len(pending) > 2:  # waits for the step before last, so the clock tells the truth
            recent.append(pending.popleft().item())
        progress.step += 1
        now = time.monotonic()
        progress.seconds = before + now - began
        if now - last_log > 10 or progress.step - first in (10, 100):
            last_log = now
            _report(stage, progress, fraction, recent, (now - began, progress.step - first), log)
            recent = recent[-100:]
        if now - last_save > SAVE_EVERY:
            save()
            last_save = time.monotonic()
    recent += [loss.item() for loss in pending]
    progress.done = budget.fraction(progress) >= 1
    _report(stage, progress, budget.fraction(progress), recent,
            (time.monotonic() - began, progress.step - first), log)  # fmt: skip
    save()
    return progress


def _report(
    stage: Stage, progress: Progress, fraction: float, recent: list[float],
    spent: tuple[float, int], log: Log,
) -> None:  # fmt: skip
    """A line of the log; raises when the loss is not finite."""
    progress.loss = sum(recent) / max(1, len(recent)) if recent else math.nan
    rate = spent[1] * stage.batch_size / max(spent[0], 1e-9)
    log(
        f"{stage.name}: step {progress.step} ({100 * fraction:.1f} %) loss {progress.loss:.5f} "
        f"{rate:.0f} pictures/s {progress.seconds:.0f} s"
    )
    if recent and not math.isfinite(progress.loss):
        raise Diverged(f"{stage.name}: loss {progress.loss} at step {progress.step}")
