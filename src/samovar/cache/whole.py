"""Steps whose forward is left out as a whole: what the model would have returned is forecast from computed outputs.

So nothing needs to be known about the inside of the model. The first computed steps show whether it does anything else
than return its output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from ..arch import find_anatomy
from ..core import nested
from ..core.errors import ModelError
from ..core.interop import COMPILED_CALL, FORWARD_WRAPPERS
from .call import AGAIN, Call
from .config import OutlierSchedule, TeaCacheConfig
from .error_control import polynomial
from .inputs import Inputs, changes
from .model import MAX_FORMS, About, CacheableModel, Forward, side_effect
from .outputs import Output, combined, find_outliers, numbers_in, take_apart
from .signal import Agree, measure
from .stats import StepRecord
from .threshold import NEVER, judge

NOT_STORED = "a step that its forecast needs is not stored"
_KEEPS = "it keeps something from step to step in its {}"
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MACHINERY = frozenset(vars(torch.nn.Module())) | FORWARD_WRAPPERS | {COMPILED_CALL}
"""Entries of a module that are torch's own, or of others' hooks."""
_MAX_DEPTH, _MAX_PARTS = 4, 256
"""How deep a module's attributes are looked into, and at how many parts of each."""


class WholeModel(CacheableModel):
    """A model whose forward is left out as a whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._stacks = find_anatomy(model).stacks
        self._checks: dict[Hashable, int] = {}
        """By generation and form of inputs: how many computed steps have shown nothing."""
        super().__init__(model)

    def _watched_modules(self) -> Iterator[torch.nn.Module]:
        if not self._stacks:
            return self._model.modules()
        return (part for stack in self._stacks for part in stack.modules(self._model)[0].modules())

    def about(self) -> About:
        return About("the errors of its own forecasts", next(reversed(self._refused.values()), None))

    def compute(self, inputs: Inputs, generation: int, forward: Forward) -> tuple[Any, str | None]:
        """The output, and why nothing can be skipped, if so. The first step of each form shows whether the model writes
        into its inputs, the second whether it keeps anything: in the first, it may fill what it needs only once."""
        signature, key = inputs.signature, (generation, inputs.signature)
        done = self._checks.get(key, 0)
        if signature in self._refused or done == 2:
            before = [nested.version(tensor) for tensor in inputs.tensors]
            output = forward(inputs.args, inputs.kwargs)
            writes = before != [nested.version(tensor) for tensor in inputs.tensors]
            return output, self._refused.get(signature) or ("it writes into its inputs" if writes else None)
        try:
            given = inputs.copied()
        except ModelError as error:
            self._refuse(signature, str(error))
            return forward(inputs.args, inputs.kwargs), str(error)
        attributes = list(_attributes(self._model)) if done else []
        buffers = [(buffer, nested.version(buffer)) for buffer in self._model.buffers()]
        output = forward(inputs.args, inputs.kwargs)
        problem = side_effect(inputs, given, output)
        if any(nested.version(buffer) != version for buffer, version in buffers):
            problem = _KEEPS.format("buffers")
        elif done and not _are_same(attributes, list(_attributes(self._model))):
            problem = _KEEPS.format("attributes")
        if problem is not None:
            self._refuse(signature, problem)
        self._checks[key] = done + 1
        if len(self._checks) > MAX_FORMS:
            del self._checks[next(iter(self._checks))]
        return output, problem


def _attributes(model: torch.nn.Module) -> Iterator[Any]:
    """What the modules of a model hold besides weights and buffers, part by part."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _MACHINERY and not name.startswith("_samovar_"):
                yield name
                yield from _parts(value, _MAX_DEPTH)


def _parts(value: Any, depth: int) -> Iterator[Any]:
    is_container = depth and isinstance(value, (list, tuple, set, deque, Mapping))
    yield len(value) if is_container else value
    if isinstance(value, torch.Tensor):
        yield nested.version(value)
    elif is_container:
        for part in list(value.values() if isinstance(value, Mapping) else value)[:_MAX_PARTS]:
            yield from _parts(part, depth - 1)
    elif depth and not isinstance(value, (*_PLAIN, type, torch.nn.Module)) and hasattr(value, "__dict__"):
        for name, part in list(vars(value).items())[:_MAX_PARTS]:
            yield name
            yield from _parts(part, depth - 1)


def _are_same(one: list[Any], other: list[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            return a is b or nested.equal(a, b)  # Some make the same table at each call.
        return a is b or (isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and bool(a == b))

    return len(one) == len(other) and all(map(same, one, other))


class WholeSteps:
    """What all that leave out whole forwards have in common."""

    def __init__(self, model: WholeModel, agree: Agree | None, max_change: float) -> None:
        """`max_change`: of inputs other than sample, time and conditioning, relative; above it a step is computed."""
        self.model, self.agree, self._max_change = model, agree, max_change

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        """Compute a step, or forecast it."""
        raise NotImplementedError

    def obstacle(self, call: Call) -> str | None:
        """Why this step of this branch cannot be skipped, if it cannot. What is no longer of use is forgotten."""
        state, inputs = call.state, call.inputs
        if state.outputs:
            why = "weights or adapters changed" if state.generation != self.model.generation() else self._change(call)
            if why is not None:
                state.reset()
                return why
        if call.tick.is_unclear:
            return "the sample is the same as in the previous call"
        return state.obstacle(inputs) or self.model.problem(inputs)

    def _change(self, call: Call) -> str | None:
        """What other inputs than sample and time have changed too much, if any have."""
        others = changes(call.inputs, call.state.watched)
        if not others:
            return None
        largest = max(measure(others[0], others[1:], self.agree, within_branch=True))
        if largest == math.inf:
            return "conditioning changed"
        return "another input changed" if largest >= self._max_change else None

    def forecast(self, call: Call, weights: Mapping[int, float]) -> tuple[Any] | None:
        """The output of a skipped step, if what it takes is stored."""
        tensors = combined(call.state.outputs, weights)
        if tensors is None or call.state.form is None:
            return None
        call.state.note_skipped(call.inputs, watches=True)
        return (call.state.form.rebuild(tensors),)

    def compute(self, call: Call, kept: set[int] | None) -> Any:
        """The output of a computed step; stored beside those of some other steps, unless that is None."""
        state, step, generation = call.state, call.step, self.model.generation()
        output, problem = self.model.compute(call.inputs, generation, call.forward)
        state.note_computed(call.inputs, generation)
        if problem is not None or call.tick.is_again:
            state.outputs.clear()
        elif kept is not None:
            form, tensors = take_apart(output)
            known = next(iter(state.outputs.values()), None)
            if not numbers_in(tensors) or (known is not None and _forms(known.tensors) != _forms(tensors)):
                state.outputs.clear()
            if numbers_in(tensors):
                state.form, state.outputs[step.index] = form, Output(step.place, tensors)
            for index in state.outputs.keys() - kept - {step.index}:
                del state.outputs[index]
        return output


def _forms(tensors: list[torch.Tensor | None]) -> list[Any]:
    return [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


class ScheduledSteps(WholeSteps):
    """A saved schedule: which steps are computed, and with which weights their outputs take the place of others."""

    def __init__(self, config: TeaCacheConfig, model: WholeModel, agree: Agree | None) -> None:
        super().__init__(model, agree, config.rel_l1_thresh)
        self._config, self._num_stored = config, config.order + 1

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        step, config = call.step, call.run.plan or self._config
        action, reason = judge(config, step, 0, call.branch)
        if reason in NEVER:
            return StepRecord(step.index, True, reason), call.compute()
        obstacle = AGAIN if call.tick.is_again else self.obstacle(call)
        if action == "skip" and obstacle is None:
            output = self.forecast(call, self._weights(call, config))
            if output is not None:
                return StepRecord(step.index, False, reason), output[0]
            obstacle = NOT_STORED
        # Fitted weights are for the scheduled steps: another one would push one of them out.
        is_unplanned = action == "skip" and config.forecast == "fitted"
        earlier = dict(call.state.outputs)
        newest = sorted(earlier, reverse=True)[: self._num_stored - 1]
        output = self.compute(call, None if is_unplanned else set(newest))
        record = StepRecord(step.index, True, reason if action == "compute" else obstacle or reason)
        if step.is_last:
            call.state.outputs.clear()
        return self._look_for_outliers(call, earlier, output, record), output

    def _weights(self, call: Call, config: TeaCacheConfig) -> Mapping[int, float]:
        """Of the computed steps in a skipped one."""
        if config.forecast == "fitted":
            return config.weights_for(call.branch, call.step.index) or {}
        known = sorted(call.state.outputs, reverse=True)[: self._num_stored]
        places = [call.state.outputs[index].place for index in known]
        return dict(zip(known, polynomial(places, call.step.place), strict=True))

    def _look_for_outliers(
        self, call: Call, earlier: Mapping[int, Output], output: Any, record: StepRecord
    ) -> StepRecord:
        """At the step that shows outliers: whether the run goes on with their schedule."""
        known = self._config.outliers
        if not isinstance(known, OutlierSchedule) or (known.branch, known.step) != (call.branch, record.step):
            return record
        found = find_outliers(combined(earlier, known.weights), output, known.error)
        if any(found):
            call.run.plan = self._config.outlier_plan
        return record._replace(outliers=found)
