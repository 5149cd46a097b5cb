"""Plans: nothing moves that fits, never over the budget, as quick as bus and computing allow, refusals with figures."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from samovar.arch.quantised import KINDS, kinds_within
from samovar.core.errors import ModelError, SettingError
from samovar.offload import (
    BlockSize,
    ComponentSize,
    OffloadConfig,
    OffloadPlan,
    Timing,
    plan_offload,
    read_parts,
    read_sizes,
)
from samovar.offload.history import History
from samovar.offload.planner import Streaming
from samovar.offload.quantization_choice import EXACT, Ladder, Rung, choose_rung, table_of
from samovar.offload.ring import least_capacity
from samovar.offload.streaming import choose_streaming, least_bytes, pass_seconds, spread
from samovar.trace.activations import Activations, read_activations

GIB = 2**30


def stack(name: str, role: str, count: int, size: float, rest: float = 0.1) -> ComponentSize:
    pieces = (int(size * GIB / 4),) * 4
    blocks = tuple(BlockSize(f"blocks.{index}", pieces) for index in range(count))
    return ComponentSize(name, role, name.title(), int(rest * GIB), blocks)  # type: ignore[arg-type]


DENOISER, ENCODER = stack("transformer", "denoiser", 40, 0.5), stack("text_encoder", "encoder", 24, 0.35)
VAE = ComponentSize("vae", "vae", "Vae", GIB // 4)
PIPELINE = (DENOISER, ENCODER, VAE)
MACHINE = Timing(50.0 * GIB, {"transformer": 0.2})
UNTIMED = Timing(50.0 * GIB)
NEEDS = {"transformer": GIB // 2, "vae": 2 * GIB, "text_encoder": GIB // 4}


def planned(sizes: Sequence[ComponentSize], history: History | None = None, **settings: Any) -> OffloadPlan:
    return plan_offload(sizes, OffloadConfig(**settings), history=history)


def plan(budget: float | None, mode: str = "auto", timing: Timing = MACHINE, **settings: Any) -> OffloadPlan:
    memory = None if budget is None else int(budget * GIB)
    return planned(PIPELINE, mode=mode, gpu_memory=memory, activations=NEEDS, timing=timing, **settings)


def placements(found: OffloadPlan) -> dict[str, str]:
    return {component.name: component.placement for component in found.components}


# ------------------------------------------------------------------------------------------------ plans


def test_where_everything_fits_nothing_is_offloaded() -> None:
    for mode in ("auto", "model", "layerwise"):
        found = plan(40, mode)
        assert not found.offloads_anything
        assert found.peak_bytes == sum(size.num_bytes for size in PIPELINE) + 2 * GIB
        assert (found.slow_down, found.moved_bytes) == (1.0, 0)
    assert "everything fits, nothing is offloaded" in str(plan(40))


def test_graphs_take_as_much_as_activations_once_more_or_there_are_none() -> None:
    assert plan(40, graphs=True).peak_bytes == plan(40).peak_bytes + GIB // 2
    assert plan(40, graphs=True).component("transformer").graph_bytes == GIB // 2
    assert "more for graphs" in str(plan(40, graphs=True))
    assert placements(plan(23, graphs=True)) == placements(plan(23, timing=UNTIMED))
    tight = plan(20.9, graphs=True)
    assert placements(tight) == placements(plan(20.9)), "weights that stay gain more than graphs"
    assert tight.component("transformer").graph_bytes == 0
    assert "there is no room for graphs beside the weights" in str(tight)


def test_a_denoiser_streams_only_where_it_must_or_takes_no_time_for_it() -> None:
    assert placements(plan(23, timing=UNTIMED))["transformer"] == "turns"
    assert placements(plan(12, timing=UNTIMED))["transformer"] == "streams"
    before, found = plan(23, timing=UNTIMED), plan(23)
    assert placements(found)["transformer"] == "streams", "which leaves room to the encoder"
    assert found.slow_down is not None
    assert found.slow_down < 1.01
    assert found.moved_bytes < before.moved_bytes / 2
    assert placements(plan(23, graphs=True))["transformer"] == "turns", "what streams is not replayed"
    assert placements(plan(3)) == {"transformer": "streams", "text_encoder": "streams", "vae": "turns"}


def test_no_plan_is_over_its_budget_and_more_is_never_slower() -> None:
    seconds = []
    for budget in [*map(float, range(3, 40, 3))]:
        found = plan(budget)
        assert found.peak_bytes <= budget * GIB
        assert max(phase.peak_bytes for phase in found.phases) == found.peak_bytes
        seconds.append(found.slow_down or 0.0)
    assert all(later <= earlier * 1.006 for earlier, later in itertools.pairwise(seconds))
    assert seconds[0] > 1.5
    assert seconds[-1] == 1.0


def test_what_cannot_fit_is_refused_with_the_least_that_can() -> None:
    with pytest.raises(SettingError, match=r"=1.00 GiB is not enough: at least 2304MiB is needed, because of vae"):
        plan(1)
    assert planned(PIPELINE, gpu_memory="2304MiB", activations=NEEDS).peak_bytes == 2304 * 2**20
    with pytest.raises(SettingError, match=r"at least 2304MiB"):
        planned(PIPELINE, gpu_memory="2303MiB", activations=NEEDS)
    with pytest.raises(SettingError, match=r"10.00 GiB.*at least 21095MiB is needed, because of transformer"):
        plan(10, "model")


def test_without_a_budget_movers_take_turns_or_stream() -> None:
    found = plan(None, "model")
    assert placements(found) == dict.fromkeys(("transformer", "text_encoder", "vae"), "turns")
    assert found.peak_bytes == DENOISER.num_bytes + NEEDS["transformer"] + VAE.num_bytes, "a VAE is small, and stays"
    found = plan(None, "layerwise")
    assert placements(found) == {"transformer": "streams", "text_encoder": "streams", "vae": "turns"}
    assert len(found.component("transformer").streamed) == 40
    assert found.take_turns
    assert not planned((DENOISER,), mode="layerwise").take_turns


def test_what_must_stay_stays_and_computes_too() -> None:
    head = ComponentSize("head", "resident", "Head", GIB)
    found = planned((*PIPELINE, head), gpu_memory=8 * GIB, activations=GIB // 4)
    assert placements(found)["head"] == "resident"
    known = Activations({"transformer": GIB, "text_encoder": GIB, "vae": GIB, "head": 3 * GIB}, "")
    beside, alone = (
        plan_offload((*PIPELINE, *more), OffloadConfig(gpu_memory=60 * GIB), known) for more in ((head,), ())
    )
    assert beside.peak_bytes == alone.peak_bytes + head.num_bytes + 2 * GIB


def test_others_stay_as_far_as_a_phase_has_room() -> None:
    found = plan(24, timing=UNTIMED)
    beside = {part.name: part.beside_bytes for part in found.components}
    assert beside["transformer"] == 24 * GIB - DENOISER.num_bytes - GIB // 2
    assert beside["vae"] == 24 * GIB - VAE.num_bytes - 2 * GIB
    assert [phase.name for phase in found.phases] == ["encode", "denoise", "decode"]
    assert f"  denoise: transformer, at most {found.phases[1].peak_bytes / GIB:.2f} GiB" in str(found).splitlines()


def test_an_encoder_streams_where_that_leaves_the_denoiser_in_place() -> None:
    """Of 8.5 GiB, as a whole, 5 would have to leave for it, come in, leave and come back."""
    found = plan(24, timing=UNTIMED)
    encoder, denoiser = found.component("text_encoder"), found.component("transformer")
    assert encoder.placement == "streams"
    assert denoiser.kept_bytes + encoder.device_bytes + GIB // 4 <= 24 * GIB
    assert encoder.kept_bytes > 2.5 * GIB, "and keeps what the denoiser leaves"
    assert found.moved_bytes < 7 * GIB


def test_companions_are_on_the_device_with_the_denoiser() -> None:
    net = stack("controlnet", "companion", 10, 0.5)
    needs = NEEDS | {"controlnet": GIB // 2}
    sizes = (*PIPELINE, net)
    for budget in (10, 16, 28):
        found = planned(sizes, gpu_memory=budget * GIB, activations=needs, timing=MACHINE)
        both = [found.component(name) for name in ("transformer", "controlnet")]
        assert sum(part.device_bytes for part in both) + GIB // 2 <= budget * GIB
        assert [phase.components for phase in found.phases][1] == ("transformer", "controlnet")


def test_what_is_assumed_of_a_vae_is_said_until_a_run_has_shown_it() -> None:
    known = Activations(NEEDS, "counted")
    tight, wide = (plan_offload(PIPELINE, OffloadConfig(gpu_memory=int(b * GIB)), known) for b in (4, 4.3))
    assert [phase.name for phase in tight.phases if phase.note] == ["decode"]
    assert "the VAE decodes with other kernels, so images may differ" in str(tight)
    assert not wide.other_kernels
    assert "as much again is assumed for the workspaces of vae, until a run has shown" in str(wide)
    shown = plan_offload(PIPELINE, OffloadConfig(gpu_memory=4 * GIB), known, History(needs={"vae": 3 * GIB}))
    assert not shown.other_kernels
    assert "assumed" not in str(shown)
    history = History(needs={"vae": 3 * GIB}, narrow=("vae",))
    assert plan_offload(PIPELINE, OffloadConfig(gpu_memory=4 * GIB), known, history).other_kernels


def test_what_nobody_knows_is_planned_with_care_and_said() -> None:
    found = planned(PIPELINE, gpu_memory=60 * GIB)
    assert "what transformer, text_encoder, vae needs beside its weights is not known: the first run" in found.notes[0]
    assert placements(found) == {"transformer": "streams", "text_encoder": "streams", "vae": "turns"}
    assert {(part.beside_bytes, part.is_known) for part in found.components} == {(0, False)}
    assert planned(PIPELINE, gpu_memory=23 * GIB, activations=0).notes == ()
    with pytest.raises(
        SettingError, match=r"'transfomer' is not a component of this pipeline .in activations.*'transf"
    ):
        planned(PIPELINE, gpu_memory=GIB, activations={"transfomer": GIB})


def test_nothing_to_offload_says_what_was_looked_for() -> None:
    with pytest.raises(ModelError, match=r"_dit_modules.*diffusers lists.*transformer, text_encoder and vae"):
        planned((), mode="model")
    with pytest.raises(
        ModelError, match=r"a denoiser and an encoder are needed, and transformer \(denoiser, Transformer\)"
    ):
        planned((DENOISER,), mode="model")
    with pytest.raises(ModelError, match=r"No blocks to stream were found in vae \(vae, Vae\)"):
        planned((VAE,), mode="layerwise")
    with pytest.raises(SettingError, match="needs a budget"):
        planned(PIPELINE, mode="auto")


def test_a_plan_is_plain_data_and_a_table() -> None:
    found = plan(12, skipped=0.5)
    data = json.loads(json.dumps(found.to_dict()))
    assert (data["peak_bytes"], data["slow_down"], data["skipped"]) == (found.peak_bytes, found.slow_down, 0.5)
    assert data["components"][0]["streamed"] == sorted(found.component("transformer").streamed)
    with pytest.raises(SettingError, match=r"'vea' is not a component of the plan.*'vae'"):
        found.component("vea")
    row = found.component("transformer")
    text = str(found)
    assert text.startswith("component")
    assert f"{len(row.streamed)} of 40 blocks stream through a ring of " in text
    assert f"Expected peak: {found.peak_bytes / GIB:.2f} GiB of 12.00 GiB; " in text
    assert f"a forward takes {found.slow_down:.2f} times as long as with everything on the device" in text
    half = f"{row.streamed_bytes / 2 / GIB:.2f} GiB"
    assert f"50% of the forwards are skipped and load nothing: {half} per step" in text
    assert f"{found.moved_bytes / GIB:.2f} GiB between the phases of a run" in text


# ------------------------------------------------------------------------------------------------ steps and a card


@pytest.fixture(scope="module")
def flux() -> tuple[ComponentSize, ...]:
    """FLUX.1 with its encoders and VAE; 6 GiB of the denoiser see time and pooled text alone."""
    (size,) = read_sizes("FluxTransformer2DModel")
    size = replace(size, blocks=tuple(replace(b, coded=tuple(int(0.71 * p) for p in b.pieces)) for b in size.blocks))
    shares = [
        (block, [tuple(int(0.727 * p) for p in all_) for all_ in (block.pieces, block.coded)]) for block in size.blocks
    ]
    blocks = tuple(replace(block, pieces=pieces, coded=coded) for block, (pieces, coded) in shares)
    gone = size.num_bytes - size.rest_bytes - sum(block.num_bytes for block in blocks)
    ahead = replace(size, blocks=blocks, ahead_bytes=gone, ahead_room=2 * 108 * 2**20, reads_text=True)
    t5 = stack("text_encoder_2", "encoder", 24, 0.36, 0.25)
    t5 = replace(t5, blocks=tuple(replace(b, coded=tuple(int(0.72 * p) for p in b.pieces)) for b in t5.blocks))
    clip = ComponentSize("text_encoder", "encoder", "Clip", int(0.23 * GIB))
    return (replace(size, ahead=ahead), clip, t5, replace(VAE, rest_bytes=int(0.16 * GIB)))


H200 = Timing(50 * GIB, {"transformer": 0.174})
FLUX_NEEDS = {"transformer": int(0.53 * GIB), "vae": int(3.4 * GIB), "text_encoder": 2**25, "text_encoder_2": 2**27}


def on_h200(
    flux: tuple[ComponentSize, ...], budget: float, history: History | None = None, **settings: Any
) -> OffloadPlan:
    return planned(flux, history, gpu_memory=int(budget * GIB), activations=FLUX_NEEDS, timing=H200, **settings)


def test_layers_are_computed_ahead_only_where_that_pays_within_a_run(flux: tuple[ComponentSize, ...]) -> None:
    assert not on_h200(flux, 4, steps=1).computes_ahead
    found = on_h200(flux, 4, steps=28)
    assert found.computes_ahead
    ahead_from = [on_h200(flux, 4, steps=steps).computes_ahead for steps in range(1, 29)]
    assert ahead_from == sorted(ahead_from)
    time_alone = (replace(flux[0], ahead=replace(flux[0].ahead, reads_text=False)), *flux[1:])  # type: ignore[arg-type]
    assert on_h200(time_alone, 4, steps=4).computes_ahead, "once for many runs"
    assert on_h200(flux, 4, steps=28, precompute=False).computes_ahead is False


def test_decoding_takes_time_from_compute(flux: tuple[ComponentSize, ...]) -> None:
    """Weights cross the bus as they are, where that is quicker than to decode them beside computing."""
    given = {"gpu_memory": 22 * GIB, "activations": FLUX_NEEDS, "steps": 20}
    free = planned(flux, timing=replace(H200, decoding_s=0.0), **given).component("transformer")
    dear = planned(flux, timing=replace(H200, decoding_s=0.002), **given).component("transformer")
    assert free.decoding_s == dear.decoding_s == 0.0 or free.is_coded
    assert not dear.is_coded
    few = planned(flux, timing=replace(H200, decoding_s=0.002), **{**given, "gpu_memory": 5 * GIB})
    part = few.component("transformer")
    assert part.is_coded, "the bus is slower even so"
    assert part.decoding_s == pytest.approx(0.002 * (part.num_bytes - part.ahead_bytes) / GIB, rel=0.3)
    assert (part.forward_s or 0.0) >= 0.174 + 0.9 * part.decoding_s


@pytest.mark.parametrize(
    ("budget", "steps", "of_resident"), [(22, 4, 1.25), (22, 20, 1.06), (11, 4, 1.4), (11, 20, 1.12)]
)
def test_a_whole_run_on_an_h200_is_near_the_resident_one(
    flux: tuple[ComponentSize, ...], budget: float, steps: int, of_resident: float
) -> None:
    """Encoders and decoding take 0.12 s beside the steps of a resident run, and nothing hides what moves in between."""
    found = on_h200(flux, budget, steps=steps)
    forward_s = found.component("transformer").forward_s or 0.0
    run_s = 0.12 + steps * forward_s + found.moved_bytes / H200.bus_bytes_s
    assert run_s <= of_resident * (0.12 + steps * 0.174)
    whole = sum(size.num_bytes for size in flux)
    assert found.moved_bytes < 0.4 * whole, "today 26 of 31 GiB cross the bus for each image"


# ------------------------------------------------------------------------------------------------ streaming


def component(count: int = 20, size: int = 100, rest: int = 50) -> ComponentSize:
    blocks = tuple(BlockSize(f"blocks.{index}", (size // 4,) * 4) for index in range(count))
    return ComponentSize("transformer", "denoiser", "Model", rest, blocks)


def choose(room: int | None, compute_s: float, size: ComponentSize | None = None) -> Streaming:
    choice = choose_streaming(size or component(), room, Timing(100.0, {"transformer": compute_s}))
    assert choice is not None
    return choice


def test_without_room_all_blocks_stream_through_the_least_ring_that_is_as_quick() -> None:
    choice = choose(None, 4.0)
    assert len(choice.streamed) == 20
    assert choice.ring_bytes == 125  # A fifth of a block crosses the bus while one computes, and pieces are quarters.
    assert choice.forward_s == pytest.approx(20.0, rel=0.01)
    assert (choice.kept_bytes, choice.sent_bytes) == (50, 2000)


def test_within_a_room_as_much_stays_as_fits_and_more_is_never_slower() -> None:
    seconds = []
    for room in range(250, 2000, 25):
        choice = choose(room, 8.0)
        assert choice.num_bytes <= room
        assert choice.forward_s <= 1.1 * max(8.0, choice.sent_bytes / 100.0) or room < 300
        assert choice.kept_bytes == 2050 - choice.sent_bytes
        assert room - choice.num_bytes < 300
        seconds.append(choice.forward_s)
    assert all(later <= earlier * 1.006 for earlier, later in itertools.pairwise(seconds))


def test_what_cannot_run_or_gains_nothing_is_none() -> None:
    whole, timing = component(), Timing(100.0)
    assert choose_streaming(whole, least_bytes(whole) - 1, timing) is None
    assert choose_streaming(whole, least_bytes(whole), timing) is not None
    assert least_bytes(whole) == 50 + least_capacity((25,) * 4)
    assert choose_streaming(component(count=1), None, timing) is None
    assert least_bytes(ComponentSize("vae", "vae", "VAE", 70)) == 70


def test_streamed_blocks_are_spread_over_the_time() -> None:
    blocks = [BlockSize(str(index), (10,), 1.0) for index in range(12)]
    places = sorted(map(int, spread(blocks, {block.path for block in blocks}, 40)))
    assert len(places) == 4
    assert all(2 <= later - earlier <= 4 for earlier, later in itertools.pairwise(places))
    odd = {str(index) for index in range(1, 12, 2)}
    assert spread(blocks, odd, 40) <= odd
    assert len(spread([replace(block, compute_s=0.0) for block in blocks], {b.path for b in blocks}, 120)) == 12


@pytest.mark.parametrize(
    ("count", "seconds", "streamed", "ring", "pieces", "expected"),
    [
        (10, 0.4, range(10), 200, 4, 10.0),
        (10, 0.4, range(10), 150, 4, 10.0),
        (10, 0.4, range(10), 100, 1, 14.0),
        (10, 2.0, range(10), 200, 4, 20.0),
        (10, 0.5, range(0, 10, 2), 150, 4, 5.0),
    ],
    ids=["bound by the bus", "half a block ahead", "no room ahead", "bound by computing", "hidden behind the rest"],
)
def test_the_real_ring_against_a_simulated_clock(
    count: int, seconds: float, streamed: Sequence[int], ring: int, pieces: int, expected: float
) -> None:
    blocks = [BlockSize(str(index), (100 // pieces,) * pieces, seconds) for index in range(count)]
    assert pass_seconds(blocks, [*map(str, streamed)], ring, Timing(100.0)) == pytest.approx(expected)
    assert pass_seconds(blocks, set(), 0, Timing(100.0), rest_s=0.5) == pytest.approx(count * seconds + 0.5)


def test_time_of_blocks_is_taken_where_it_is_known() -> None:
    timed = Timing(100.0, block_s={f"transformer.blocks.{index}": 1.0 for index in range(20)})
    assert timed.forward_s(component()) == 20.0
    assert Timing(100.0, block_s={"transformer.blocks.0": 1.0}).forward_s(component()) is None


# ------------------------------------------------------------------------------------------------ quantisation


def rung(name: str, bus: float | None) -> Rung:
    """A rung that sends so many GiB, or that does not fit."""
    if bus is None:
        return Rung(name, GIB, problem=f"{name} is too large")
    found = plan(40) if not bus else plan(12)
    parts = [replace(p, streamed_bytes=int(bus * GIB) if p.role == "denoiser" else 0) for p in found.components]
    return Rung(name, GIB, replace(found, components=tuple(parts)))


def test_of_what_stays_the_least_loss_is_taken_and_of_what_streams_the_fewest_bytes() -> None:
    taken, why = choose_rung([rung(EXACT, 5), rung("fp8", 0), rung("int8", 0)])
    assert (taken.name, why) == ("fp8", "fp8 weights stay on the GPU, and lose least of those that do")
    taken, why = choose_rung([rung(EXACT, None), rung("fp8", 5.1), rung("int8", 5.0), rung("int4", 4.0)])
    assert taken.name == "int4"
    assert why.endswith("(fp8 5.10 GiB, int8 5.00 GiB, int4 4.00 GiB); exact weights do not fit")
    assert choose_rung([rung("fp8", 5.1), rung("int8", 5.0)])[0].name == "fp8", "that is no difference"
    with pytest.raises(SettingError, match="int8 is too large"):
        choose_rung([rung(EXACT, None), rung("int8", None)])
    rows = table_of([rung(EXACT, None), rung("fp8", 5)], {"fp8": "taken"})
    assert rows[1][:3] == ("exact", "1.00 GiB", "does not fit")
    assert rows[2][3:] == ("5.00 GiB", "taken")


@pytest.mark.parametrize(
    ("budget", "loss", "taken"), [("24GiB", "exact", EXACT), ("14GiB", "int8", "int8"), ("8GiB", "int4", "int4")]
)
def test_the_rung_of_flux(budget: str, loss: str, taken: str) -> None:
    parts = read_parts("FluxTransformer2DModel")
    ladder = Ladder(parts, read_activations("FluxTransformer2DModel", parts), OffloadConfig(gpu_memory=budget))
    kinds = [kind.name for kind in kinds_within(loss) if ladder.changes(kind)]
    assert choose_rung([ladder.rung(name) for name in (EXACT, *kinds)])[0].name == taken
    assert all(map(ladder.changes, KINDS.values()))


def test_plans_for_other_numbers_of_steps_are_at_hand() -> None:
    """A call for few steps and one for many may take turns, and planning takes longer than a step."""
    found = plan(23, steps=28)
    few = found.at(1, worth=0.9)
    assert few.run_s(1) == min(one.run_s(1) for one in (found, *found.others))
    assert few.steps == 1
    assert {id(one) for one in few.others} <= {id(found), *map(id, found.others)}
    assert few.at(28, worth=0.999).run_s(28) <= found.run_s(28) * 1.001
    assert few.at(28).run_s(28) == min(one.run_s(28) for one in (few, *few.others))
    assert found.at(28, worth=0.5).components == found.components, "what gains little is not worth the way"
    assert "others" not in found.to_dict()
