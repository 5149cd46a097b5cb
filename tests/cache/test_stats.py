"""What was done is counted for each branch, and can be read by people and by JSON."""

from __future__ import annotations

import json
import math

import pytest

from samovar.cache import BranchStats, CacheStats, PipelineStats, StepRecord

COND = BranchStats(
    (
        StepRecord(0, True, "first_steps"),
        StepRecord(1, False, "below the threshold", 0.05, 0.05),
        StepRecord(2, False, "below the threshold", 0.06, 0.11),
        StepRecord(3, True, "the threshold is reached", 0.15, 0.26),
    )
)
UNCOND = BranchStats((StepRecord(0, True, "first_steps"), StepRecord(1, False, "below the threshold", 0.05, 0.05)))
STATS = CacheStats("Model", "rel_l1_thresh=0.2", "what reaches blocks.0.attn", {"cond": COND, "uncond": UNCOND})
EMPTY = CacheStats("Model", "rel_l1_thresh=0.2", "the first block")


def test_a_pipeline_adds_up_its_denoisers() -> None:
    stats = PipelineStats({"transformer": STATS, "transformer_2": STATS})
    assert (stats.computed, stats.skipped) == (6, 6)
    assert set(stats.to_dict()) == {"transformer", "transformer_2"}
    assert str(stats).count("Model: rel_l1_thresh=0.2") == 2
    assert "transformer_2: " in str(stats)
    assert (PipelineStats({}).computed, PipelineStats({}).to_dict()) == (0, {})
    assert str(PipelineStats({})) == "nothing has run yet"


def test_they_are_json() -> None:
    found = json.loads(json.dumps(PipelineStats({"transformer": STATS}).to_dict(), allow_nan=False))["transformer"]
    branches = found.pop("branches")
    assert found == {
        "model": "Model", "settings": "rel_l1_thresh=0.2", "signal": "what reaches blocks.0.attn", "problem": None,
        "covered": None, "expected_speedup": 1.98,
    }  # fmt: skip
    first, second = branches["uncond"].pop("steps")
    assert branches["uncond"] == {"computed": 1, "skipped": 1, "mask": "#."}
    assert first == {"step": 0, "computed": True, "reason": "first_steps", "distance": None, "accumulated": None}
    assert (second["distance"], second["accumulated"]) == (0.05, 0.05)


def test_reasons_of_branches_that_are_alike_are_said_once() -> None:
    alike = CacheStats("Model", "", "", {"cond": COND, "uncond": COND})
    assert "  why steps were computed: first_steps (1), the threshold is reached (1)\n" in str(alike)
    short = BranchStats(tuple(StepRecord(step, True, "min_steps") for step in range(4)))
    assert "  why steps were computed: min_steps (4)\n" in str(CacheStats("Model", "", "", {"only": short}))


@pytest.mark.parametrize("distance", [math.inf, math.nan])
def test_they_are_json_whatever_was_measured(distance: float) -> None:
    """A change of something that was zero is infinite, and JSON has no word for that."""
    stats = CacheStats("Model", "", "", {"only": BranchStats((StepRecord(1, True, "", distance, distance),))})
    (step,) = json.loads(json.dumps(stats.to_dict(), allow_nan=False))["branches"]["only"]["steps"]
    assert (step["distance"], step["accumulated"]) == (None, None)


def test_the_summary_lines_up() -> None:
    assert str(STATS).splitlines() == [
        "Model: rel_l1_thresh=0.2",
        "  judged by what reaches blocks.0.attn",
        "  cond    2 computed, 2 skipped        #..#",
        "  uncond  1 computed, 1 skipped        #.",
        "  why steps were computed: first_steps (2), the threshold is reached (1); in 2 branches",
        "  change per step: 0.050 to 0.150, 0.077 on average",
        "  expected speed-up of the denoiser: 1.98x",
    ]
    assert str(EMPTY).splitlines() == ["Model: rel_l1_thresh=0.2", "  judged by the first block"]
