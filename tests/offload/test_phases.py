"""A budget is a promise: every phase of a whole pipeline stays within it on a card that has no more memory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines import PIPELINES, tiny_flux_pipeline
from samovar.core.errors import SettingError
from samovar.core.settings import parse_bytes
from samovar.offload import OffloadConfig, Offloaded, apply_offload, plan_offload, prepare_offload
from samovar.offload.sizes import find_components, measure_components
from samovar.trace.activations import Activations
from samovar.trace.dry_run import RequestSize, dry_run

from .card import Card

SIZE = {"height": 32, "width": 32}
NAMES = ("transformer", "text_encoder", "text_encoder_2", "vae")
WORDS = {"prompt": "a cat", "max_sequence_length": 8}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_flux_pipeline()


def draw(pipe: Any, **settings: Any) -> torch.Tensor:
    call = {"num_inference_steps": 3, "output_type": "pt", "return_dict": False, **WORDS, **SIZE, **settings}
    image: torch.Tensor = pipe(generator=torch.Generator().manual_seed(0), **call)[0]
    return image


@pytest.fixture(scope="module")
def expected(pipe: Any) -> torch.Tensor:
    return draw(pipe)


@pytest.fixture(scope="module")
def needs(pipe: Any) -> dict[str, int]:
    """What components need beside their weights for this prompt, with a margin as in `activations`."""
    peaks = dry_run(pipe, RequestSize(**SIZE), **WORDS).peaks
    return {name: int(1.1 * peak) + 2**12 for name, peak in peaks.items()}


def config(budget: int, needs: dict[str, int] | None = None, **settings: Any) -> OffloadConfig:
    return OffloadConfig(gpu_memory=budget, activations=needs, **(SIZE | settings))


@pytest.fixture(scope="module")
def least(pipe: Any, needs: dict[str, int]) -> int:
    """The smallest budget that a plan accepts."""
    sizes = measure_components(find_components(pipe), in_phase=True)

    def is_accepted(budget: int) -> bool:
        try:
            return plan_offload(sizes, config(budget, needs)).peak_bytes <= budget
        except SettingError:
            return False

    low, high = 0, 2**24
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_accepted(middle) else (middle, high)
    return high


@pytest.fixture(autouse=True)
def taken_off(pipe: Any) -> Iterator[None]:
    """Whatever a test has put on the pipeline is off again."""
    made: list[Offloaded] = []
    with pytest.MonkeyPatch.context() as patch:
        start = Offloaded.start
        patch.setattr(Offloaded, "start", lambda self: (made.append(self), start(self))[1])
        yield
    for offloaded in made:
        offloaded.detach()


@pytest.fixture(params=[0, 2**14, 2**16, 2**17, 2**18])
def card(
    request: pytest.FixtureRequest, pipe: Any, least: int, needs: dict[str, int]
) -> Iterator[tuple[Card, Offloaded]]:
    """Cards from the least that is accepted to one with room for everything, each full of promises."""
    stage = Card(least + request.param)
    offloaded = apply_offload(pipe, config(stage.capacity, needs), stage=stage)
    yield stage, offloaded
    offloaded.detach()


def test_every_budget_that_is_accepted_is_kept(card: tuple[Card, Offloaded], pipe: Any, expected: torch.Tensor) -> None:
    stage, offloaded = card
    for _ in range(3):
        with stage:
            assert torch.equal(draw(pipe), expected)
    assert stage.most <= offloaded.plan.peak_bytes <= stage.capacity
    assert max(phase.peak_bytes for phase in offloaded.plan.phases) == offloaded.plan.peak_bytes


def test_a_part_that_is_called_alone_is_a_phase_of_its_own(card: tuple[Card, Offloaded], pipe: Any) -> None:
    """Also where gradients are not switched off."""
    stage, offloaded = card
    with stage, torch.set_grad_enabled(offloaded.plan.offloads_anything):
        draw(pipe)
        embeds = pipe.encode_prompt("a cat", None, max_sequence_length=8)[0]
        image = pipe.vae.decode(torch.zeros(1, 1, 16, 16), return_dict=False)[0].detach()
        latents = pipe.vae.encode(image).latent_dist.mode()
    assert embeds.isfinite().all()
    assert latents.isfinite().all()


def test_the_least_that_a_refusal_names_is_accepted_and_no_less(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    with pytest.raises(SettingError, match=r"is not enough: at least \d+[KM]iB is needed, because of") as refused:
        prepare_offload(pipe, config(least - 1, needs), stage=Card(2**40))
    said = re.search(r"at least (\d+)([KM]iB)", str(refused.value))
    assert said is not None
    figure, unit = int(said[1]), said[2]
    with pytest.raises(SettingError, match=f"at least {figure}{unit} is needed"):
        prepare_offload(pipe, config(f"{figure - 1}{unit}", needs), stage=Card(2**40))  # type: ignore[arg-type]
    stage = Card(parse_bytes(f"{figure}{unit}", "gpu_memory") or 0)
    offloaded = apply_offload(pipe, config(stage.capacity, needs), stage=stage)
    with stage:
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()


def test_only_what_must_move_moves(pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor) -> None:
    """A run moves what its plan says, and encoders do not drive out a denoiser that could stay."""
    stage = Card(least + 2**17 + 2**16)
    offloaded = apply_offload(pipe, config(stage.capacity, needs, precompute=False), stage=stage)
    plan, denoiser = offloaded.plan, offloaded._components["transformer"]
    held: list[int] = []
    hook = pipe.vae.decoder.register_forward_hook(lambda *_: held.append(denoiser.held_bytes))
    sent = []
    for _ in range(3):
        before = stage.stats.sent_bytes
        with stage:
            assert torch.equal(draw(pipe), expected)
        sent.append(stage.stats.sent_bytes - before)
    hook.remove()
    assert 0 < held[0] <= plan.component("vae").beside_bytes
    steps = 3 * plan.component("transformer").streamed_bytes
    assert sent[1] == sent[2] < sent[0]
    largest = max(group.num_bytes for component in offloaded._components.values() for group in component._kept)
    assert sent[2] <= steps + plan.moved_bytes + 2 * largest, "blocks leave and come as a whole"
    offloaded.detach()


def test_a_larger_call_is_planned_again_or_refused_before_it_starts(
    pipe: Any, expected: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.trace.activations._BYTES", 2**25)  # That of a GPU would be most of this card.
    stage = Card(2**26)
    offloaded = apply_offload(pipe, config(stage.capacity), stage=stage)
    before, loaded = offloaded.plan.component("vae").activation_bytes, stage.most
    with pytest.raises(SettingError, match=r"gpu_memory=64.00 MiB is not enough: at least .* because of vae"):
        draw(pipe, height=1024, width=1024)
    assert stage.most == loaded, "nothing was computed"
    with stage:
        draw(pipe, height=64, width=128)
    assert offloaded.plan.component("vae").activation_bytes > before
    assert (offloaded.config.height, offloaded.config.width) == (64, 128)
    with stage:
        assert torch.equal(draw(pipe), expected)
    assert offloaded.config.height == 64, "a smaller call has the same plan"
    offloaded.detach()


@pytest.mark.parametrize("cause", ["others take memory", "a component needs more"])
def test_what_runs_out_of_memory_runs_again_in_less(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor, cause: str
) -> None:
    stage = Card(2**24)
    told = needs | {"vae": 1} if cause == "a component needs more" else needs
    offloaded = apply_offload(pipe, config(least + 2**16, told), stage=stage)
    if cause == "others take memory":
        stage.capacity = least + 2**13
    with pytest.warns(UserWarning, match=r"ran out of memory|decodes with other kernels") as warned, stage:
        assert torch.equal(draw(pipe), expected)
    said = [str(warning.message) for warning in warned]
    assert re.search("ran out of memory within gpu_memory=.* runs again within", said[0])
    assert all("the VAE decodes with other kernels" in text for text in said[1:])
    with stage:
        assert torch.equal(draw(pipe), expected), "and the next one has no such trouble"
    offloaded.detach()


def test_what_does_not_run_in_less_either_says_how_much_there_was(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    stage = Card(2**24)
    offloaded = apply_offload(pipe, config(least, needs), stage=stage)
    stage.capacity = least // 2
    with (
        pytest.raises(
            torch.OutOfMemoryError, match=r"was planned to need .* others have taken memory \(.* free without our"
        ),
        stage,
    ):
        draw(pipe)
    stage.capacity = least
    with stage:
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)


def test_a_decode_whose_kernels_are_refused_their_room_is_not_passed_over_in_silence(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    """As cuDNN does: a convolution asks for a workspace, and takes another kernel, which rounds otherwise, if there is
    none. What is left of the card then decides about the bits of an image."""
    stage, room = Card(least + 2**17), 0

    def choose(module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        try:
            stage.take(room)
        except torch.OutOfMemoryError:
            return output + 1
        return output

    offloaded = apply_offload(pipe, config(stage.capacity, needs), stage=stage)
    handle = pipe.vae.decoder.conv_in.register_forward_hook(choose)
    try:
        with stage:
            draw(pipe)
            room = stage.capacity - offloaded.plan.component("vae").device_bytes - needs["vae"]
            with pytest.warns(UserWarning, match="vae: the VAE decodes with other kernels"):
                draw(pipe)
            assert stage.pressure().refusals > 0
            assert not offloaded.history.narrow, "others were in its way"
            assert torch.equal(draw(pipe), expected), "and are not any more"
        room = stage.capacity
        with pytest.warns(UserWarning, match="vae: the VAE decodes with other kernels"), stage:
            assert not torch.equal(draw(pipe), expected)
        assert "decodes with other kernels" in str(offloaded.replan())
    finally:
        handle.remove()
        offloaded.detach()


def test_others_leave_more_room_where_memory_is_given_back_and_taken_again(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    """As torch's allocator does where what it holds lies in pieces: everything waits meanwhile."""
    stage = Card(2**30)
    offloaded = apply_offload(pipe, config(least + 2**17, needs), stage=stage)

    def retry(*_: Any) -> None:
        stage.retries += 10

    handle = pipe.vae.decoder.register_forward_pre_hook(retry)
    beside = []
    try:
        with stage:
            for _ in range(12):
                assert torch.equal(draw(pipe), expected)
                beside.append(offloaded._components["vae"].beside_bytes)
    finally:
        handle.remove()
        offloaded.detach()
    assert beside == sorted(beside, reverse=True)
    assert beside[0] < offloaded.plan.component("vae").beside_bytes
    assert beside[-1] < beside[0] / 2, "down to nothing, and no further"


def test_what_is_called_in_parts_needs_what_the_largest_of_them_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan's VAE decodes the first frame alone, and then four at a time beside features of those before."""
    monkeypatch.setattr("samovar.offload.measured._SPARE", 0)
    tiny = PIPELINES["wan"]
    pipe = tiny.build(0)
    expected = tiny.run(pipe, 2, output_type="pt")
    given = OffloadConfig(gpu_memory=2**30, figures="none", frames=9, height=32, width=48)
    whole = prepare_offload(pipe, given, stage=Card(2**30)).plan
    offloaded = apply_offload(pipe, replace(given, gpu_memory=whole.peak_bytes - 1), stage=Card(2**30, is_real=True))
    stage: Any = offloaded.stage
    seen: list[int] = []
    monkeypatch.setattr(offloaded, "_note_need", lambda name, need: (seen.append(need), note(name, need)))
    note = Offloaded._note_need.__get__(offloaded)
    try:
        with stage:
            assert torch.equal(tiny.run(pipe, 2, output_type="pt"), expected)
            *_, first, second, third = seen
            assert first < second
            assert offloaded.history.needs["vae"] == max(first, second, third)
            seen.clear()
            assert torch.equal(tiny.run(pipe, 2, output_type="pt"), expected)
            assert not seen, "a run has shown it"
            offloaded.history = replace(offloaded.history, needs={})
            offloaded.replan()
            counts = []
            for _ in range(2):
                pipe.vae.decode(torch.zeros(1, 4, 3, 4, 6))
                counts.append(len(seen))
            assert counts[1] == 2 * counts[0] > 4, "a call that is no run may be of a part"
    finally:
        offloaded.detach()


def test_a_run_that_is_cut_off_shows_nothing_of_what_was_called_in_it(
    pipe: Any, least: int, needs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samovar.trace.activations._BYTES", 0)
    stage, others = Card(2**30, is_real=True), {name: need for name, need in needs.items() if name != "vae"}
    offloaded = apply_offload(pipe, config(least + 2**18, others, figures="none"), stage=stage)

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with stage:
        with monkeypatch.context() as patch:
            patch.setattr(pipe.image_processor, "postprocess", stop)
            with pytest.raises(KeyboardInterrupt):
                draw(pipe)
        assert not offloaded.history.needs
        try:
            raise ValueError
        except ValueError:  # As where somebody tries again.
            draw(pipe)
    assert "vae" in offloaded.history.needs
    offloaded.detach()


def test_a_call_that_has_changed_its_lists_is_not_made_again() -> None:
    """Wan's VAE keeps features of earlier frames in a list that it is given."""
    tiny = PIPELINES["wan"]
    pipe = tiny.build(0)
    expected = tiny.run(pipe, 2, output_type="pt")
    stage, given = Card(2**30), OffloadConfig(gpu_memory=2**19, mode="model", activations=2**17)
    offloaded = apply_offload(pipe, given, stage=stage)
    said = "vae was planned to need .* Its arguments were changed before that, so it is not called again"
    with (
        pytest.raises(torch.OutOfMemoryError, match=said),
        pytest.warns(UserWarning, match="Later calls run within .*, with less beside it"),
        stage,
    ):
        tiny.run(pipe, 2, output_type="pt")
    offloaded.detach()
    assert torch.equal(tiny.run(pipe, 2, output_type="pt"), expected)


def test_what_nobody_knows_is_measured_by_the_first_run(pipe: Any, expected: torch.Tensor) -> None:
    stage = Card(2**25)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samovar.offload.offload.activations_of", lambda *_: Activations({}, "", "no luck"))
        patch.setattr("samovar.offload.measured._SPARE", 2**24)
        offloaded = apply_offload(pipe, config(2**25), stage=stage)
        assert "is not known (no luck): the first run measures it" in str(offloaded.plan)
        assert offloaded.plan.component("transformer").placement == "streams", "as careful as can be"
        for _ in range(2):
            with stage:
                assert torch.equal(draw(pipe), expected)
        assert offloaded.plan.component("transformer").activation_bytes > 2**24
        offloaded.detach()


def test_what_runs_show_is_kept_for_the_next_process(
    pipe: Any,
    least: int,
    needs: dict[str, int],
    tmp_path: Path,
    expected: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The margins that are meant for a GPU are as large as this pipeline."""
    monkeypatch.setattr("samovar.trace.activations._BYTES", 0)
    monkeypatch.setattr("samovar.offload.measured._SPARE", 0)
    others = {name: need for name, need in needs.items() if name != "vae"}

    def planned(**settings: Any) -> Offloaded:
        given = config(least + 2**18, others, figures=str(tmp_path), **settings)
        return prepare_offload(pipe, given, stage=Card(2**30, is_real=True))

    offloaded = planned()
    assert "is assumed for the workspaces of vae, until a run has shown" in str(offloaded.plan)
    offloaded.start()
    with offloaded.stage:  # type: ignore[attr-defined]
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    plan = planned().plan
    assert plan.component("vae").activation_bytes == int(1.1 * kept["needs"]["vae"]) > 2**15
    assert "assumed" not in str(plan)
    assert plan.steps == 3, "those of the last call"
    assert "is assumed for" in str(planned(width=16).plan), "figures are of one size"
    file.write_text("{")
    with pytest.warns(UserWarning, match=r"The figures in .* cannot be used, and are measured again"):
        planned()


def test_what_is_called_in_turns_is_on_the_device_together(tmp_path: Path) -> None:
    """A ControlNet and the denoiser do not drive each other out in every step."""
    tiny = PIPELINES["flux-controlnet"]
    pipe = tiny.build(0)
    expected = tiny.run(pipe, 3, output_type="pt")
    stage = Card(2**30)
    sizes = {size.name: size.num_bytes for size in measure_components(find_components(pipe), in_phase=True)}
    budget = sizes["transformer"] + sizes["controlnet"] + 2**16
    assert budget < sum(sizes.values())
    offloaded = apply_offload(pipe, OffloadConfig(gpu_memory=budget, activations=2**15), stage=stage)
    assert offloaded.plan.component("controlnet").role == "companion"
    stage.capacity = 2**30
    for _ in range(2):
        assert torch.equal(tiny.run(pipe, 3, output_type="pt"), expected)
    loads = offloaded.stats().component_loads
    assert max(loads["controlnet"], loads["transformer"]) <= 3, "once or twice a run, and not in every step"
    offloaded.detach()


def test_another_plan_is_followed_once_runs_have_lost_what_it_takes_to_move(pipe: Any) -> None:
    """Runs of few and of many steps may take turns, and moving takes seconds."""
    offloaded = prepare_offload(pipe, config(2**30, dict.fromkeys(NAMES, 0)), stage=Card(2**30))
    for_many = replace(offloaded.plan, step_s=0.05, once_s=0.5)
    for_few = replace(offloaded.plan, step_s=0.1, once_s=0.0, others=(for_many,))
    taken = [offloaded._moved(for_few, steps).step_s for steps in (28, 28, 4, 28)]
    assert taken == [0.1, 0.1, 0.1, 0.05], "each run of 28 steps loses 0.9 s"
