"""A saved schedule of whole outputs: which steps are computed, and with which weights they stand for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..core import nested
from .call import NEVER, Call
from .config import OutlierSchedule, TeaCacheConfig
from .error_control import polynomial
from .signal import Agree
from .stats import StepRecord
from .threshold import judge
from .whole import NOT_STORED, WholeModel, WholeSteps


class ScheduledSteps(WholeSteps):
    """Takes the steps of a saved schedule of outputs."""

    def __init__(self, config: TeaCacheConfig, model: WholeModel, agree: Agree | None) -> None:
        super().__init__(model, agree, config.rel_l1_thresh)
        self._config = config
        self._outliers = config.outliers if isinstance(config.outliers, OutlierSchedule) else None

    def take(self, call: Call) -> tuple[StepRecord, Any]:
        step, config = call.step, call.run.plan or self._config
        action, reason = judge(config, step, 0, call.branch)
        if reason in NEVER:
            return StepRecord(step.index, True, reason), call.compute()
        obstacle = self._obstacle(call)
        if action == "skip" and obstacle is None:
            output = self._forecast(call, self._weights(call, config))
            if output is not None:
                return StepRecord(step.index, False, reason), output
            obstacle = NOT_STORED
        known = self._outliers
        shows = known is not None and (known.branch, known.step) == (call.branch, step.index)
        forecast = call.state.combined(known.weights) if known is not None and shows else None
        # Fitted weights are for the scheduled steps: another one is not stored.
        is_stored = action == "compute" or config.forecast != "fitted"
        output = self._compute(call, self._kept(call, config) if is_stored else None)
        if step.is_last:
            call.state.reset()
        record = StepRecord(step.index, True, reason if action == "compute" else obstacle or reason)
        if known is not None and shows:
            record = record._replace(outliers=find_outliers(forecast, output, known.error))
            call.run.plan = self._config.outlier_plan if any(record.outliers) else None
        return record, output

    def _weights(self, call: Call, config: TeaCacheConfig) -> Mapping[int, float]:
        """Of the computed steps in a skipped one."""
        if config.forecast == "fitted":
            return config.rows_for(call.branch).get(call.step.index, {})
        known = sorted(call.state.outputs, reverse=True)[: 1 + (config.forecast == "linear")]
        places = [call.state.outputs[index].place for index in known]
        return dict(zip(known, polynomial(places, call.step.place), strict=True))

    def _kept(self, call: Call, config: TeaCacheConfig) -> Collection[int]:
        """The steps before this one whose outputs are still needed."""
        if config.forecast != "fitted":
            return sorted(call.state.outputs)[-1:]
        plans = [plan for plan in (config, config.outlier_plan) if plan is not None]
        rows = [row for plan in plans for step, row in plan.rows_for(call.branch).items() if step > call.step.index]
        return set[int]().union(*rows, () if self._outliers is None else self._outliers.weights)


def find_outliers(forecast: Any, output: Any, error: float) -> tuple[bool, ...]:
    """For each image of a batch, whether its forecast is off by more than `error`, relative to the computed output.
    Where nothing can be compared, all are outliers."""
    pairs = zip(nested.tensors(forecast), nested.tensors(output), strict=False)
    misses = [_miss(guess, value) for guess, value in pairs if value.dim()]
    if not misses:
        return (True,)
    if len({len(miss) for miss in misses}) > 1:  # Not one row for each image.
        misses = [miss.amax().reshape(1) for miss in misses]
    found: list[float] = torch.stack([miss.to(misses[0].device) for miss in misses]).amax(0).tolist()
    return tuple(not miss <= error for miss in found)  # NaN is an outlier.


def _miss(guess: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """How far off each row is, relative to its size."""
    rows, wanted = guess.float().reshape(len(guess), -1), value.float().reshape(len(value), -1)
    sizes = wanted.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)
    return ((rows - wanted).square().sum(1) / sizes).sqrt()
