"""Plans: nothing moves that fits, turns before streams, never over the budget, and refusals with figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from samovar.core.errors import ModelError, SettingError
from samovar.offload import BlockSize, ComponentSize, OffloadConfig, OffloadPlan, Timing, plan_offload, read_sizes
from samovar.trace.activations import Activations

GIB = 2**30


def stack(name: str, role: str, count: int, size: float, rest: float = 0.1) -> ComponentSize:
    pieces = (int(size * GIB / 4),) * 4
    blocks = tuple(BlockSize(f"blocks.{index}", pieces) for index in range(count))
    return ComponentSize(name, role, name.title(), int(rest * GIB), blocks)  # type: ignore[arg-type]


DENOISER, ENCODER = stack("transformer", "denoiser", 40, 0.5), stack("text_encoder", "encoder", 24, 0.35)
VAE = ComponentSize("vae", "vae", "Vae", GIB // 4)
ADAPTER = ComponentSize("controlnet", "resident", "ControlNet", GIB)
PIPELINE = (DENOISER, ENCODER, VAE)
MACHINE = Timing(50.0 * GIB, {"transformer": 0.2})


def planned(sizes: Sequence[ComponentSize], **settings: Any) -> OffloadPlan:
    return plan_offload(sizes, OffloadConfig(**settings))


def plan(budget: float | None, mode: str = "auto", sizes: tuple[ComponentSize, ...] = PIPELINE) -> OffloadPlan:
    return planned(
        sizes,
        mode=mode,
        gpu_memory=None if budget is None else int(budget * GIB),
        activations={"transformer": GIB // 2, "vae": 2 * GIB, "text_encoder": GIB // 4},
        timing=MACHINE,
    )


def placements(found: OffloadPlan) -> dict[str, str]:
    return {component.name: component.placement for component in found.components}


def test_where_everything_fits_nothing_is_offloaded() -> None:
    for mode in ("auto", "model", "layerwise"):
        found = plan(40, mode)
        assert not found.offloads_anything
        assert found.peak_bytes == sum(size.num_bytes for size in PIPELINE) + 2 * GIB
        assert found.slow_down == 1.0


def test_graphs_take_as_much_as_activations_once_more_or_there_are_none() -> None:
    def graphed(budget: float) -> OffloadPlan:
        given = {"transformer": GIB // 2, "vae": 2 * GIB, "text_encoder": GIB // 4}
        return planned(PIPELINE, gpu_memory=int(budget * GIB), activations=given, timing=MACHINE, graphs=True)

    assert graphed(40).peak_bytes == plan(40).peak_bytes + GIB // 2
    assert graphed(40).component("transformer").graph_bytes == GIB // 2
    assert "more for graphs" in str(graphed(40))
    assert placements(graphed(23)) == placements(plan(23))
    tight = graphed(20.9)
    assert placements(tight) == placements(plan(20.9)), "weights that stay gain more than graphs"
    assert tight.component("transformer").graph_bytes == 0
    assert "there is no room for graphs beside the weights" in str(tight)


def test_turns_come_before_streams() -> None:
    assert placements(plan(23)) == {"transformer": "turns", "text_encoder": "turns", "vae": "turns"}
    assert placements(plan(12)) == {"transformer": "streams", "text_encoder": "turns", "vae": "turns"}
    assert placements(plan(3)) == {"transformer": "streams", "text_encoder": "streams", "vae": "turns"}


def test_no_plan_is_over_its_budget_and_more_is_never_slower() -> None:
    seconds = []
    for budget in [*map(float, range(3, 40))]:
        found = plan(budget)
        assert found.peak_bytes <= budget * GIB
        assert found.slow_down is not None
        seconds.append(found.slow_down)
    assert all(later <= earlier * 1.006 for earlier, later in itertools.pairwise(seconds))
    assert seconds[0] > 1.5
    assert seconds[-1] == 1.0


def test_what_cannot_fit_is_refused_with_the_least_that_can() -> None:
    with pytest.raises(
        SettingError, match=r"gpu_memory=1.00 GiB is not enough: at least 2.25 GiB is needed, because of vae"
    ):
        plan(1)
    found = plan(2.26)
    assert found.peak_bytes <= 2.26 * GIB
    with pytest.raises(SettingError, match=r"10.00 GiB.*at least 20.60 GiB is needed, because of transformer"):
        plan(10, "model")


def test_model_level_takes_turns_and_the_peak_is_that_of_the_largest() -> None:
    found = plan(None, "model")
    assert placements(found) == {"transformer": "turns", "text_encoder": "turns", "vae": "resident"}
    assert found.peak_bytes == DENOISER.num_bytes + VAE.num_bytes + GIB // 2, "it has left when the VAE decodes"
    two = stack("transformer_2", "denoiser", 40, 0.5)
    assert placements(planned((DENOISER, two, VAE), mode="model"))["transformer_2"] == "turns"
    assert placements(planned((DENOISER, VAE), mode="model")) == {"transformer": "turns", "vae": "turns"}


def test_layerwise_streams_denoisers_and_encoders() -> None:
    found = plan(None, "layerwise")
    assert placements(found) == {"transformer": "streams", "text_encoder": "streams", "vae": "resident"}
    assert len(found.component("transformer").streamed) == 40
    assert found.take_turns
    alone = planned((DENOISER,), mode="layerwise")
    assert not alone.take_turns


def test_what_must_stay_stays() -> None:
    found = planned((*PIPELINE, ADAPTER), mode="auto", gpu_memory=8 * GIB, activations=GIB // 4)
    assert placements(found)["controlnet"] == "resident"
    assert found.peak_bytes <= 8 * GIB


def test_what_stays_computes_too() -> None:
    """A ControlNet runs beside the weights of the denoiser, and may need more than that does."""
    known = Activations({"transformer": GIB, "text_encoder": GIB, "vae": GIB, "controlnet": 3 * GIB}, "measured")
    beside, alone = (
        plan_offload((*PIPELINE, *more), OffloadConfig(gpu_memory=60 * GIB), known) for more in ((ADAPTER,), ())
    )
    assert beside.peak_bytes == alone.peak_bytes + ADAPTER.num_bytes + 2 * GIB


def test_each_phase_has_the_whole_budget_and_others_stay_as_far_as_it_has_room() -> None:
    found = plan(24)
    peaks = {phase.name: phase.peak_bytes for phase in found.phases}
    assert list(peaks) == ["encode", "denoise", "decode"]
    assert max(peaks.values()) == found.peak_bytes <= 24 * GIB
    beside = {part.name: part.beside_bytes for part in found.components}
    sizes = {size.name: size.num_bytes for size in PIPELINE}
    assert beside["transformer"] == 24 * GIB - sizes["transformer"] - GIB // 2
    assert beside["text_encoder"] == 24 * GIB - sizes["text_encoder"] - GIB // 4
    assert beside["vae"] == 24 * GIB - sizes["vae"] - 4 * GIB, "with room for the workspaces of its convolutions"
    assert not found.other_kernels
    assert "  denoise: transformer, at most 24.00 GiB" in str(found).splitlines()


def test_a_vae_without_room_for_workspaces_is_told_of() -> None:
    tight = plan(4)
    assert [phase.name for phase in tight.phases if phase.note] == ["decode"]
    assert tight.other_kernels
    assert "the VAE decodes with other kernels, so images may differ" in str(tight)
    assert not plan(4.3).other_kernels


def test_what_nobody_knows_is_planned_with_care_and_said() -> None:
    found = planned(PIPELINE, gpu_memory=60 * GIB)
    assert "what transformer, text_encoder, vae needs beside its weights is not known: the first run" in found.notes[0]
    assert placements(found) == {"transformer": "streams", "text_encoder": "streams", "vae": "turns"}
    assert {part.beside_bytes for part in found.components} == {0}
    assert not any(part.is_measured for part in found.components)
    assert planned(PIPELINE, gpu_memory=23 * GIB, activations=0).notes == ()
    with pytest.raises(
        SettingError, match=r"'transfomer' is not a component of this pipeline .in activations.*'transformer'"
    ):
        planned(PIPELINE, gpu_memory=GIB, activations={"transfomer": GIB})


def test_nothing_to_offload_says_what_was_looked_for() -> None:
    with pytest.raises(ModelError, match=r"_dit_modules.*diffusers lists.*transformer, text_encoder and vae"):
        planned((), mode="model")
    with pytest.raises(
        ModelError, match=r"a denoiser and an encoder are needed, and transformer \(denoiser, Transformer\) was found"
    ):
        planned((DENOISER,), mode="model")
    with pytest.raises(ModelError, match=r"No blocks to stream were found in vae \(vae, Vae\)"):
        planned((VAE,), mode="layerwise")
    with pytest.raises(SettingError, match="needs a budget"):
        planned(PIPELINE, mode="auto")


def test_a_plan_is_plain_data() -> None:
    found = plan(12)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["peak_bytes"] == found.peak_bytes
    assert data["components"][0]["streamed"] == sorted(found.component("transformer").streamed)
    assert data["slow_down"] == found.slow_down
    with pytest.raises(SettingError, match=r"'vea' is not a component of the plan.*'vae'"):
        found.component("vea")


def test_the_skipped_share_is_part_of_the_plan() -> None:
    for skipped in (0.0, 0.5, 0.9):
        found = planned(PIPELINE, gpu_memory=3 * GIB, activations=0, timing=MACHINE, skipped=skipped)
        assert found.skipped == skipped
        assert found.to_dict()["skipped"] == skipped
        assert found.peak_bytes <= 3 * GIB


def test_the_table_says_what_stays_what_streams_and_what_to_expect() -> None:
    sizes = read_sizes("FluxTransformer2DModel")
    plan = planned(sizes, gpu_memory=12 * GIB, activations=GIB // 2, timing=Timing(51.4 * GIB, {"transformer": 0.174}))
    lines = str(plan).splitlines()
    assert lines[0].split("  ")[0] == "component"
    row = plan.component("transformer")
    assert lines[1].startswith("transformer  FluxTransformer2DModel  22.15 GiB")
    assert f"{len(row.streamed)} of 57 blocks stream through a ring of " in lines[1]
    assert f"{plan.peak_bytes / GIB:.2f} GiB of 12.00 GiB" in lines[-1]
    assert "cross the bus in a forward" in lines[-1]
    assert f"takes {plan.slow_down:.2f} times as long" in lines[-1]


def test_a_plan_that_offloads_nothing_says_so() -> None:
    text = str(planned(read_sizes("FluxTransformer2DModel"), gpu_memory=80 * GIB, activations=GIB))
    assert "everything fits, nothing is offloaded" in text
    turns = planned(read_sizes("FluxTransformer2DModel"), mode="layerwise")
    assert "times as long" not in str(turns)  # Nobody said how long it takes.


def test_forwards_that_a_cache_skips_are_told_of() -> None:
    plan = planned(read_sizes("FluxTransformer2DModel"), mode="layerwise", skipped=0.5)
    half = f"{plan.component('transformer').streamed_bytes / 2 / GIB:.2f} GiB"
    assert f"50% of the forwards are skipped and load nothing: {half} per step" in str(plan)
    assert "are skipped" not in str(planned(read_sizes("FluxTransformer2DModel"), mode="layerwise"))


@pytest.mark.parametrize(("launch_s", "is_coded"), [(0.001, False), (0.009, True)])
def test_weights_are_compressed_earlier_where_the_host_has_no_time_to_spare(launch_s: float, is_coded: bool) -> None:
    """The bus is busy for 0.7 of the forward: compute hides that, unless copies begin late."""
    blocks = tuple(BlockSize(f"blocks.{i}", (GIB,), coded=(int(0.7 * GIB),)) for i in range(10))
    size = ComponentSize("transformer", "denoiser", "Some", GIB // 10, blocks)
    paths = [f"transformer.{block.path}" for block in blocks]
    timing = Timing(100 * GIB, block_s=dict.fromkeys(paths, 0.01), launch_s=dict.fromkeys(paths, launch_s), send_s=0.0)
    part = planned([size], gpu_memory=int(4.5 * GIB), timing=timing, activations=0).component("transformer")
    assert part.streamed
    assert (part.is_coded, part.in_groups) == (is_coded, is_coded)
