"""Steps whose forward is left out as a whole: what the model would have returned is forecast from computed outputs.

So nothing needs to be known about the inside of the model. The first computed steps show whether it does anything else
than return its output.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from ..arch import find_anatomy
from ..core import nested
from ..core.errors import ModelError
from ..core.interop import COMPILED_CALL, FORWARD_WRAPPERS
from .call import NEVER, Call, Steps
from .config import TeaCacheConfig
from .error_control import polynomial
from .history import Output
from .inputs import Inputs
from .model import CachedModel, keep_latest, side_effect
from .signal import Agree
from .stats import StepRecord
from .threshold import judge

NOT_STORED = "a step that its forecast needs is not stored"
_WRITES = "it writes into its inputs"
_KEEPS = "it keeps something from step to step in its "
_MACHINERY = frozenset(vars(torch.nn.Module())) | FORWARD_WRAPPERS | {COMPILED_CALL}
"""Entries of a module that are torch's own, or of others' hooks."""
_MAX_PARTS = 1024
"""Parts of a module's attributes that are looked at."""
Marked = list[tuple[str, Any, int | None]]
"""Values by path, each with what changes if it is written in place."""


class WholeModel(CachedModel):
    """A model whose forward is left out as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        stacks = find_anatomy(model).stacks
        firsts = [stack.modules(model)[0] for stack in stacks] or [model]
        super().__init__(model, lambda: (part for first in firsts for part in first.modules()))
        self._checks: dict[Hashable, int] = {}
        """By generation and form of inputs: how many computed steps have shown nothing."""

    def compute(self, call: Call) -> tuple[Any, Any]:
        """The output, and a copy of it if it can stand for others. The first step of each form shows whether the model
        writes into its inputs, the second whether it keeps anything: in the first, it may fill what it needs only
        once."""
        inputs, key = call.inputs, (call.generation, call.inputs.signature)
        if self.problem(inputs) is not None:
            return call.compute(), None
        done = self._checks.get(key, 0)
        copies = [tensor.clone() for tensor in inputs.tensors] if done < 2 else []
        before = self._look(inputs, done)
        output = call.compute()
        after = self._look(inputs, done)
        problem = next((name for name in before if not _are_same(before[name], after[name])), None)
        if done < 2:
            problem = side_effect(inputs, copies, output) or problem
            keep_latest(self._checks, key, done + 1)
        try:
            copied = None if problem else nested.map_tensors(lambda tensor: tensor.detach().clone(), output)
        except ModelError as error:
            problem = str(error)
        if problem is None:
            return output, copied
        if done < 2:
            self._refuse(inputs.signature, problem)
        return output, None

    def _look(self, inputs: Inputs, done: int) -> dict[str, Marked]:
        """What a forward may write into, by what is wrong if it does."""
        seen = {_WRITES: _marked(enumerate(inputs.tensors))}
        if done < 2:
            seen[f"{_KEEPS}buffers"] = _marked(self._model.named_buffers())
        if done == 1:
            seen[f"{_KEEPS}attributes"] = [
                part
                for module in self._model.modules()
                for part in _marked(itertools.islice(_held(module), _MAX_PARTS))
            ]
        return seen


def _held(module: torch.nn.Module) -> Iterable[tuple[str, Any]]:
    """What a module holds besides its parts, weights and buffers."""
    own = vars(module).items()
    return nested.leaves({name: of for name, of in own if name not in _MACHINERY and not name.startswith("_samovar_")})


def _marked(values: Iterable[tuple[Any, Any]]) -> Marked:
    def mark(value: Any) -> int | None:
        if isinstance(value, torch.Tensor):
            return nested.version(value)
        return len(value) if isinstance(value, (set, deque)) else None

    return [(str(path), value, mark(value)) for path, value in values]


def _are_same(before: Marked, after: Marked) -> bool:
    """Whether nothing has changed. Some models make the same table at each call."""
    return len(before) == len(after) and all(
        path == other and mark == new_mark and (value is now or nested.equal(value, now))
        for (path, value, mark), (other, now, new_mark) in zip(before, after, strict=True)
    )


class Plan(NamedTuple):
    """What is done with a step."""

    reason: str
    is_skipped: bool = False
    weights: Mapping[int, float] = {}
    """Of computed outputs, by step, in what the sampler is given; of a computed step, none gives its own output."""


class WholeSteps(Steps):
    """Takes steps whose whole outputs are forecast."""

    model: WholeModel

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        never = self._never(call)
        if never is not None:
            return StepRecord(call.step.index, True, never), call.compute()
        obstacle = self._obstacle(call)
        plan, state = self._plan(call, obstacle), call.state
        if plan.is_skipped and obstacle is None:
            output = state.combined(plan.weights)
            if output is not None:
                state.note_skipped()
                state.watch(call.inputs)
                return self._record(call, False, plan.reason), output
            obstacle = NOT_STORED
        output = self._compute(call)
        corrected = None if plan.is_skipped else state.combined(plan.weights)
        if call.step.is_last:
            state.reset()
        reason = obstacle if plan.is_skipped and obstacle is not None else plan.reason
        return self._record(call, True, reason), output if corrected is None else corrected

    def _never(self, call: Call) -> str | None:
        """Why no step of a run is skipped, if none is."""
        raise NotImplementedError

    def _plan(self, call: Call, obstacle: str | None) -> Plan:
        """What is done with a step. `obstacle`: why this branch cannot skip it, if it cannot."""
        raise NotImplementedError

    def _needed(self, call: Call) -> Collection[int]:
        """The steps whose outputs are still needed beside this one's."""
        raise NotImplementedError

    def _record(self, call: Call, is_computed: bool, reason: str) -> StepRecord:
        return StepRecord(call.step.index, is_computed, reason)

    def _compute(self, call: Call) -> Any:
        """The output of a computed step, which is stored beside those that are needed."""
        state, step = call.state, call.step
        output, copy = self.model.compute(call)
        found = Output(step.place, copy)
        if call.is_again or not found.numbers:
            state.reset()
        else:
            known = next(iter(state.outputs.values()), None)
            if known is not None and nested.signature(known.value) != nested.signature(copy):
                state.reset()
            stored = {index: state.outputs[index] for index in self._needed(call) if index in state.outputs}
            state.outputs = {**stored, step.index: found}
        state.note_computed(call.inputs, call.generation)
        return output


class ScheduledSteps(WholeSteps):
    """Takes the steps of a saved schedule of outputs."""

    def __init__(self, config: TeaCacheConfig, model: WholeModel, agree: Agree | None) -> None:
        super().__init__(model, agree, config.rel_l1_thresh)
        self._config = config

    def _never(self, call: Call) -> str | None:
        reason = judge(self._config, call.step, 0, call.branch).reason
        return reason if reason in NEVER else None

    def _plan(self, call: Call, obstacle: str | None) -> Plan:
        verdict = judge(self._config, call.step, 0, call.branch)
        is_skipped = verdict.action == "skip"
        return Plan(verdict.reason, is_skipped, self._weights(call) if is_skipped and obstacle is None else {})

    def _weights(self, call: Call) -> Mapping[int, float]:
        if self._config.forecast == "fitted":
            return self._config.rows_for(call.branch).get(call.step.index, {})
        outputs = call.state.outputs
        known = sorted(outputs, reverse=True)[: 1 + (self._config.forecast == "linear")]
        weights = polynomial([outputs[index].place for index in known], call.step.place)
        return dict(zip(known, weights, strict=True))

    def _needed(self, call: Call) -> Collection[int]:
        if self._config.forecast != "fitted":
            return sorted(call.state.outputs)[-1:]
        rows = self._config.rows_for(call.branch).items()
        return {old for step, row in rows for old in row if step > call.step.index}
