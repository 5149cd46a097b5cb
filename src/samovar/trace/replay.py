"""What would the model give if its blocks were skipped? Replayed on its shadow, without a call of the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..hooks import NOT_BYPASSED
from .forward import Given, Segment, Trace
from .gates import Gate
from .passes import StepPass
from .shadow import Shadow


class Replay:
    """Forwards of a model's shadow, in which no block runs."""

    def __init__(self, model: torch.nn.Module, gates: Mapping[torch.nn.Module, Gate], trace: Trace) -> None:
        self._gates = gates
        self._first = {call.gate: call.segment for call in trace.calls if call.is_first and call.segment is not None}
        self._step: StepPass | None = None
        self.first_calls: dict[Segment, Given] = {}
        """What the first block of each segment was given in the last forward, as copies, if that was asked for."""
        self._keeps_calls = False
        self._shadow = Shadow(model, dict.fromkeys(gates, self._answer))

    def run(self, step: StepPass, args: Any, kwargs: Any, *, keeps_calls: bool = False) -> Any:
        """The output of a forward through this pass; TrialFailed if the model raises."""
        self._step, self._keeps_calls = step, keeps_calls
        self.first_calls = {}
        try:
            output = self._shadow.run(args, kwargs)
        finally:
            self._step = None
        step.finish()
        return output

    def close(self) -> None:
        """Let go of the shadow at once: classes made for it form circles that only the collector would find."""
        self._shadow.close()

    def _answer(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if self._step is None:
            return NOT_BYPASSED
        gate = self._gates[module]
        segment = self._first.get(gate)
        if self._keeps_calls and segment is not None and segment not in self.first_calls:
            self.first_calls[segment] = Given(module, args, kwargs).copied()
        return self._step.enter(gate, module, args, kwargs)
