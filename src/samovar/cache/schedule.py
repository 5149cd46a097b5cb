"""A saved schedule of whole outputs: which steps are computed, and with which weights they stand for the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .call import NEVER, Call
from .config import TeaCacheConfig
from .error_control import polynomial
from .signal import Agree
from .threshold import judge
from .whole import Plan, WholeModel, WholeSteps


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
