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
from .config import TeaCacheConfig
from .error_control import polynomial
from .run import Call, Output
from .signal import Agree
from .stats import StepRecord
from .steps import NEVER, Steps, keep_latest
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


class Plan(NamedTuple):
    """What is done with a step."""

    reason: str
    is_skipped: bool = False
    weights: Mapping[int, float] = {}
    """Of computed outputs, by step, in what the sampler is given; of a computed step, none gives its own output."""


class WholeSteps(Steps):
    """Takes steps whose whole outputs are forecast."""

    def __init__(self, model: torch.nn.Module, agree: Agree | None, max_change: float) -> None:
        firsts = [stack.modules(model)[0] for stack in find_anatomy(model).stacks] or [model]
        super().__init__(model, agree, max_change, lambda: (part for first in firsts for part in first.modules()))
        self._checks: dict[Hashable, int] = {}
        """By generation and form of inputs: how many computed steps have shown nothing."""

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        plan, state, index = self._plan(call), call.state, call.step.index
        reason = plan.reason
        if reason in NEVER:
            return StepRecord(index, True, reason), call.compute()
        output = state.combined(plan.weights) if plan.is_skipped else None
        is_computed = output is None
        if is_computed:
            output = self._compute(call)
            corrected = None if plan.is_skipped else state.combined(plan.weights)
            output = output if corrected is None else corrected
            reason = NOT_STORED if plan.is_skipped else reason
            if call.step.is_last:
                state.reset()
        elif call.residuals:
            state.watch(call)
        control = call.run.control
        errors = () if control is None else (control.drift, control.error)
        return StepRecord(index, is_computed, reason, *errors), output

    def _plan(self, call: Call) -> Plan:
        """What is done with a step; nothing if its reason is that no step of the run is skipped."""
        raise NotImplementedError

    def _needed(self, call: Call) -> Collection[int]:
        """The steps whose outputs are still needed beside this one's."""
        raise NotImplementedError

    def _compute(self, call: Call) -> Any:
        """The output of a computed step, of which a copy is stored beside those that are needed."""
        state, step = call.state, call.step
        output, copy = self._observed(call)
        found = Output(step.place, copy)
        if call.is_again or not found.numbers:
            state.reset()
        else:
            known = next(iter(state.outputs.values()), None)
            if known is not None and known.form != found.form:
                state.reset()
            stored = {index: state.outputs[index] for index in self._needed(call) if index in state.outputs}
            state.outputs = {**stored, step.index: found}
        state.note_computed(call)
        return output

    # ------------------------------------------------------------------------------------------ side effects

    def _observed(self, call: Call) -> tuple[Any, Any]:
        """The output, and a copy of it if it can stand for others. The first step of each form shows whether the model
        writes into its inputs, the second whether it keeps anything: in the first, it may fill what it needs only
        once."""
        if call.signature in self._refused:
            return call.compute(), None
        key = call.generation, call.signature
        done = self._checks.get(key, 0)
        if done < 2:
            copies, before = [tensor.clone() for tensor in call.tensors], self._marks(done)
        versions = [None if tensor.is_inference() else tensor._version for tensor in call.tensors]
        output = call.compute()
        after = [None if tensor.is_inference() else tensor._version for tensor in call.tensors]
        problem = None if versions == after else _WRITES
        if done < 2:
            problem = call.side_effect(copies, output) or problem or _changed(before, self._marks(done))
            keep_latest(self._checks, key, done + 1)
        try:
            copied = None if problem else nested.map_tensors(lambda tensor: tensor.detach().clone(), output)
        except ModelError as error:
            problem = str(error)
        if problem is None:
            return output, copied
        if done < 2:
            self._refuse(call, problem)
        return output, None

    def _marks(self, done: int) -> dict[str, Marked]:
        """What a forward may keep something in, by what is wrong if it does."""
        seen = {f"{_KEEPS}buffers": _marked(self._model.named_buffers())}
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
    marked: Marked = []
    for path, value in values:
        mark = None
        if isinstance(value, torch.Tensor):
            mark = None if value.is_inference() else value._version
        elif isinstance(value, (set, deque)):
            mark = len(value)
        marked.append((str(path), value, mark))
    return marked


def _changed(before: dict[str, Marked], after: dict[str, Marked]) -> str | None:
    """What is wrong, if anything has changed. Some models make the same table at each call."""
    for problem, values in before.items():
        is_same = len(values) == len(after[problem]) and all(
            path == other and mark == new_mark and (value is now or nested.equal(value, now))
            for (path, value, mark), (other, now, new_mark) in zip(values, after[problem], strict=True)
        )
        if not is_same:
            return problem
    return None


class ScheduledSteps(WholeSteps):
    """Takes the steps of a saved schedule of outputs."""

    def __init__(self, config: TeaCacheConfig, model: torch.nn.Module, agree: Agree | None) -> None:
        super().__init__(model, agree, config.rel_l1_thresh)
        self._config = config

    def _plan(self, call: Call) -> Plan:
        verdict = judge(self._config, call.step, 0, call.branch)
        if verdict.reason in NEVER:
            return Plan(verdict.reason)
        obstacle = self._obstacle(call)
        if verdict.action != "skip":
            return Plan(verdict.reason)
        return Plan(verdict.reason, True, self._weights(call)) if obstacle is None else Plan(obstacle)

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
