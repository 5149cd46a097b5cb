"""A budget is a promise: every phase of a whole pipeline stays within it on a card that has no more memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar.core.errors import SettingError
from samovar.offload import OffloadConfig, Offloaded, apply_offload, coded, plan_offload, prepare_offload
from samovar.offload.sizes import find_components, measure_components
from samovar.trace.activations import Activations
from samovar.trace.dry_run import RequestSize, dry_run

from .card import Card

SIZE = {"height": 32, "width": 32}
WORDS = {"prompt": "a cat", "max_sequence_length": 8}


@pytest.fixture(autouse=True, scope="module")
def small_sums() -> Iterator[None]:
    """Checksums of tiny weights take little beside them, as those of large ones do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coded, "_RESIDUES", 61)
        yield


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny_flux_pipeline()


def draw(pipe: Any, **size: int) -> torch.Tensor:
    call = {"num_inference_steps": 3, "output_type": "pt", "return_dict": False, **WORDS, **SIZE, **size}
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
    stage, _ = card
    with torch.no_grad(), stage:
        draw(pipe)
        embeds = pipe.encode_prompt("a cat", None, max_sequence_length=8)[0]
        image = pipe.vae.decode(torch.zeros(1, 1, 16, 16), return_dict=False)[0]
        latents = pipe.vae.encode(image).latent_dist.mode()
    assert embeds.isfinite().all()
    assert latents.isfinite().all()


def test_one_byte_less_is_refused_with_the_least(pipe: Any, least: int, needs: dict[str, int]) -> None:
    with pytest.raises(SettingError, match=r"is not enough: at least \d+\.\d\d [KM]iB is needed") as refused:
        prepare_offload(pipe, config(least - 1, needs), stage=Card(2**40))
    figure, unit = str(refused.value).partition("at least ")[2].split()[:2]
    said = float(figure) * {"KiB": 2**10, "MiB": 2**20}[unit]
    assert least <= said <= least * 1.01


def test_others_leave_only_as_far_as_a_phase_needs_room(pipe: Any, least: int, needs: dict[str, int]) -> None:
    """Not all of the denoiser goes over the bus for each image, where only some of it was in the way."""
    stage = Card(least + 2**17 + 2**16)
    offloaded = apply_offload(pipe, config(stage.capacity, needs, precompute=False), stage=stage)
    denoiser = offloaded._components["transformer"]
    held: list[int] = []
    hook = pipe.vae.decoder.register_forward_hook(lambda *_: held.append(denoiser.held_bytes))
    with stage:
        draw(pipe)
    hook.remove()
    plan = offloaded.plan
    assert 0 < held[0] < plan.component("transformer").device_bytes
    assert held[0] <= plan.component("vae").beside_bytes
    offloaded.detach()


def test_a_larger_call_is_planned_again_or_refused_before_it_starts(pipe: Any, expected: torch.Tensor) -> None:
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


def test_what_runs_out_of_memory_runs_again_in_less(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    """Somebody else takes memory after the plan was made."""
    stage = Card(2**24)
    offloaded = apply_offload(pipe, config(least + 2**17, needs), stage=stage)
    stage.capacity = least + 2**16
    with pytest.warns(UserWarning, match=r"ran out of memory within gpu_memory=.* runs again within"), stage:
        assert torch.equal(draw(pipe), expected)
    with stage:
        assert torch.equal(draw(pipe), expected), "and the next one has no such trouble"
    offloaded.detach()


def test_what_does_not_run_in_less_either_says_how_much_there_was(
    pipe: Any, least: int, needs: dict[str, int], expected: torch.Tensor
) -> None:
    stage = Card(2**24)
    offloaded = apply_offload(pipe, config(least, needs), stage=stage)
    stage.capacity = least // 2
    with pytest.raises(torch.OutOfMemoryError, match=r"was planned to need .* had less: .* is free with"), stage:
        draw(pipe)
    stage.capacity = least
    with stage:
        assert torch.equal(draw(pipe), expected)
    offloaded.detach()
    assert torch.equal(draw(pipe), expected)


def test_what_nobody_knows_is_measured_by_the_first_run(pipe: Any, expected: torch.Tensor) -> None:
    stage = Card(2**24)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("samovar.offload.apply.activations_of", lambda *_: Activations({}, "", "no luck"))
        offloaded = apply_offload(pipe, config(2**24), stage=stage)
    assert "is not known (no luck): the first run measures it" in str(offloaded.plan)
    assert offloaded.plan.component("transformer").placement == "streams", "as careful as can be"
    with stage:
        assert torch.equal(draw(pipe), expected)
        assert torch.equal(draw(pipe), expected)
    assert not offloaded.plan.offloads_anything, "all of it has room"
    offloaded.detach()
