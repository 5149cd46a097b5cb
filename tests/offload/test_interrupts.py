"""An interrupt at any line of the hooks loses no weight, and the next run is as if nothing had happened."""

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
from samovar.offload import HostStage, OffloadConfig, Offloaded, apply_offload

from .holding import CASES, Holder

FLUX = PIPELINES["flux"]
ROOM = str(Path(samovar.__file__).parent / "offload")
Line = tuple[str, int]
Call = Callable[[Callable[[], None]], Any]
"""A run, which calls what it is given after its first step."""


class Interrupt(KeyboardInterrupt):
    """Ctrl-C."""


class Tracer:
    """Notes the lines of the room that run from the first step to the end, and interrupts before one of them."""

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


def check_all_lines(call: Call, bare: Any, offloaded: Offloaded, parts: dict[str, torch.nn.Module]) -> None:
    expected = call(lambda: None)
    state = {name: {key: value.clone() for key, value in part.state_dict().items()} for name, part in parts.items()}

    def check(where: object) -> None:
        for name, part in parts.items():
            now = part.state_dict()
            assert all(torch.equal(now[key], value) for key, value in state[name].items()), (where, name)

    seen = Tracer()
    assert zoo.equal(seen.run(call), expected)
    for line in seen.lines:
        with pytest.raises(Interrupt):
            Tracer(line).run(call)
        check(line)
        assert zoo.equal(call(lambda: None), expected), line
    check("all")
    offloaded.detach()
    check("detached")
    assert zoo.equal(call(lambda: None), bare), "and the bits are those of the bare pipeline"


def test_streaming() -> None:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    holder = Holder(transformer=model)

    def call(begin: Callable[[], None]) -> Any:
        with running(holder):
            case.run(model, 0)
            begin()
            return case.run(model, 1)

    bare = call(lambda: None)
    config = OffloadConfig("layerwise", precompute=False)
    offloaded = apply_offload(holder, config, stage=HostStage(lazy=True))
    check_all_lines(call, bare, offloaded, {"transformer": model})


def test_taking_turns() -> None:
    pipe = FLUX.build(0)

    def call(begin: Callable[[], None]) -> Any:
        def after_step(pipe: Any, index: int, time: torch.Tensor, given: dict[str, Any]) -> dict[str, Any]:
            begin()
            return {}

        return FLUX.run(pipe, 1, callback_on_step_end=after_step)

    bare = call(lambda: None)
    offloaded = apply_offload(pipe, OffloadConfig("model", activations=0), stage=HostStage(lazy=True))
    parts = {name: pipe.components[name] for name in ("transformer", "text_encoder_2", "vae")}
    check_all_lines(call, bare, offloaded, parts)
