"""The table of a plan."""

from __future__ import annotations

from samovar.offload import Timing, plan_offload, read_sizes

GIB = 2**30


def test_the_table_says_what_stays_what_streams_and_what_to_expect() -> None:
    sizes = read_sizes("FluxTransformer2DModel")
    plan = plan_offload(
        sizes, gpu_memory=12 * GIB, activations=GIB // 2, timing=Timing(51.4 * GIB, {"transformer": 0.174})
    )
    lines = str(plan).splitlines()
    assert lines[0].split("  ")[0] == "component"
    row = plan.component("transformer")
    assert lines[1].startswith("transformer  FluxTransformer2DModel  22.15 GiB")
    assert f"{len(row.streamed)} of 57 blocks stream through a ring of " in lines[1]
    assert f"{plan.peak_bytes / GIB:.2f} GiB of 12.00 GiB" in lines[-1]
    assert "cross the bus in a forward" in lines[-1]
    assert f"takes {plan.slow_down:.2f} times as long" in lines[-1]


def test_a_plan_that_offloads_nothing_says_so_and_assumptions_are_noted() -> None:
    text = str(plan_offload(read_sizes("FluxTransformer2DModel"), gpu_memory=80 * GIB))
    assert "everything fits, nothing is offloaded" in text
    assert text.splitlines()[-1] == "Note: activations are assumed: 1.00 GiB a component."
    turns = plan_offload(read_sizes("FluxTransformer2DModel"), mode="layerwise")
    assert "times as long" not in str(turns)  # Nobody said how long it takes.


def test_forwards_that_a_cache_skips_are_told_of() -> None:
    plan = plan_offload(read_sizes("FluxTransformer2DModel"), mode="layerwise", skipped=0.5)
    half = f"{plan.component('transformer').streamed_bytes / 2 / GIB:.2f} GiB"
    assert f"50% of the forwards are skipped and load nothing: {half} for a step" in str(plan)
    assert "are skipped" not in str(plan_offload(read_sizes("FluxTransformer2DModel"), mode="layerwise"))
