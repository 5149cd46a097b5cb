"""What the room offers: names and settings that users of other libraries know."""

from __future__ import annotations

import inspect

import pytest

from samovar import parallel
from samovar.hooks import ModelHook

NONE = None
SIGNATURES = {
    "SequenceParallelConfig": {
        "ulysses_degree": 1, "ring_degree": 1, "allgather_degree": 1, "convert_to_fp32": True,
        "cfg_parallel_size": 1,
    },
    "SequenceParallelInput": {"split_dim": ..., "expected_dims": NONE, "split_output": False, "auto_pad": False},
    "SequenceParallelPartialInput": {
        "split_dim": ..., "text_len_source": ..., "expected_dims": NONE, "split_output": False,
    },
    "SequenceParallelOutput": {"gather_dim": ..., "expected_dims": NONE},
    "apply_sequence_parallel": {"module": ..., "config": ..., "plan": ...},
    "remove_sequence_parallel": {"module": ..., "plan": ...},
    "enable_sequence_parallel_for_model": {"model": ..., "config": NONE},
    "disable_sequence_parallel_for_model": {"model": ...},
}  # fmt: skip
"""Settings that can be given by position, in this order, with their defaults."""


@pytest.mark.parametrize("name", SIGNATURES)
def test_settings_and_their_order(name: str) -> None:
    parameters = inspect.signature(getattr(parallel, name)).parameters
    given = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(SIGNATURES[name])]
    assert {p.name: ... if p.default is p.empty else p.default for p in given} == SIGNATURES[name]
    # Whatever else there is has a default.
    assert all(p.default is not p.empty for p in parameters.values() if p.name not in SIGNATURES[name])


def test_hooks_and_the_alias() -> None:
    assert issubclass(parallel.SequenceParallelSplitHook, ModelHook)
    assert issubclass(parallel.SequenceParallelGatherHook, ModelHook)
    plan: parallel.SequenceParallelModelPlan = {"proj_out": parallel.SequenceParallelOutput(gather_dim=1)}
    assert isinstance(plan, dict)
    assert all(hasattr(parallel, name) for name in parallel.__all__)
