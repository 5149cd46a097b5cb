"""An interrupt at any line of the room loses no weight, and what is done next is as if nothing had happened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import samovar
import zoo
from pipelines import PIPELINES
from samovar.hooks import running
from samovar.offload import HostStage, OffloadConfig, apply_offload, prepare_offload

from .holding import CASES, Holder

FLUX = PIPELINES["flux"]
ROOM = str(Path(samovar.__file__).parent / "offload")
Line = tuple[str, int]
Call = Callable[[Callable[[], None]], Any]
"""Something to do, which calls what it is given when it comes to what is looked at."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


class Tracer:
    """Notes the lines of the room that run from when it begins to the end, and interrupts before one of them."""

    def __init__(self, interrupt_at: Line | None = None) -> None:
        self.lines: dict[Line, None] = {}
        self._at = interrupt_at

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(ROOM):
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line":
            self.lines[line] = None
            if line == self._at:
                sys.settrace(None)
                raise Interrupt
        return self._trace

    def run(self, call: Call) -> Any:
        before = sys.gettrace()
        try:
            return call(lambda: sys.settrace(self._trace))
        finally:
            sys.settrace(before)


class Weights:
    """The weights of some modules as they are to be."""

    def __init__(self, **parts: torch.nn.Module) -> None:
        self._parts = parts
        self._state = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.items()}

    def check(self, where: object) -> None:
        for name, part in self._parts.items():
            now = part.state_dict()
            assert all(torch.equal(now[key], value) for key, value in self._state[name].items()), (where, name)


every = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""Which lines: one of five, or all."""


def check_lines(call: Call, weights: Weights, then: Callable[[object], None], every: int) -> int:
    """Interrupt before lines; the weights are right then, and so is what is done next."""
    seen = Tracer()
    seen.run(call)
    then("seen")
    num_hit, lines = 0, list(seen.lines)[::every]
    for line in lines:
        try:
            Tracer(line).run(call)  # What is known by now may not be looked up again.
        except Interrupt:
            num_hit += 1
        weights.check(line)
        then(line)
    assert num_hit > 0.75 * len(lines)
    return num_hit * every


@every
def test_a_pass_through_blocks(every: int) -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)

    def call(begin: Callable[[], None]) -> Any:
        with running(holder):
            case.run(model, 0)
            begin()
            return case.run(model, 1)

    def then(where: object) -> None:
        assert zoo.equal(call(lambda: None), bare), where

    bare, weights = call(lambda: None), Weights(transformer=model)
    offloaded = apply_offload(holder, OffloadConfig("layerwise", precompute=False), stage=HostStage(lazy=True))
    then("offloaded")
    assert check_lines(call, weights, then, every) > 150
    offloaded.detach()
    weights.check("detached")
    then("detached")


@every
@pytest.mark.parametrize("mode", ["model", "budget"])
def test_phases(mode: str, every: int) -> None:
    pipe = FLUX.build(0)

    def call(begin: Callable[[], None]) -> Any:
        def after_step(pipe: Any, index: int, time: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
            begin()
            return {}

        return FLUX.run(pipe, 1, callback_on_step_end=after_step, output_type="pt")

    def then(where: object) -> None:
        assert torch.equal(call(lambda: None), bare), where

    bare, weights = call(lambda: None), Weights(transformer=pipe.transformer, encoder=pipe.text_encoder_2, vae=pipe.vae)
    stage = HostStage(lazy=True)
    offloaded = apply_offload(pipe, OffloadConfig("model", activations=0, precompute=False), stage=stage)
    if mode == "budget":
        whole = offloaded.plan.component("transformer").num_bytes
        offloaded.replan(mode="auto", gpu_memory=whole + 2**13)
    for where in range(3):  # Until the order of calls is known.
        then(where)
    assert check_lines(call, weights, then, every) > 60
    offloaded.detach()
    weights.check("detached")
    then("detached")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.norm(self.attn(hidden_states))


class Model(torch.nn.Module):
    """The least that streams."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.proj_out = torch.nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return self.proj_out(hidden_states) * timestep


@every
def test_attach_replan_and_detach(every: int) -> None:
    model, given = Model().eval(), (torch.ones(2, 8), torch.ones(1))
    holder, bare = Holder(transformer=model, text_encoder=torch.nn.Linear(2, 2)), model(*given)
    weights, off = Weights(transformer=model), []

    def attached(begin: Callable[[], None]) -> None:
        offloaded = prepare_offload(holder, OffloadConfig("layerwise", precompute=False), stage=HostStage())
        begin()
        offloaded.start()
        off.append(offloaded.detach)

    def replanned(begin: Callable[[], None]) -> None:
        offloaded = apply_offload(holder, OffloadConfig("layerwise", precompute=False), stage=HostStage())
        off.append(offloaded.detach)
        with running(holder):
            model(*given)
        begin()
        offloaded.replan(mode="model")

    def detached(begin: Callable[[], None]) -> None:
        offloaded = apply_offload(holder, OffloadConfig("layerwise", precompute=False), stage=HostStage())
        off.append(offloaded.detach)
        with running(holder):
            model(*given)
        begin()
        offloaded.detach()

    def then(where: object) -> None:
        while off:
            off.pop()()
        weights.check(where)
        assert torch.equal(model(*given), bare), where

    for call in (attached, replanned, detached):
        assert check_lines(call, weights, then, every) > 40
