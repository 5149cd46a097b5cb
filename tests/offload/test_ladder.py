"""Which rung is taken, and what is said of each."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from samovar.arch.quantised import KINDS, kinds_within
from samovar.arch.skeleton import Parts
from samovar.core.errors import SettingError
from samovar.offload import OffloadConfig, plan_offload, read_parts
from samovar.offload.ladder import EXACT, Ladder, Rung, choose_rung, table_of
from samovar.offload.sizes import BlockSize, ComponentSize
from samovar.trace.activations import Activations, read_activations
from samovar.trace.dry_run import RequestSize


def rung(name: str, gib: float, problem: str = "") -> Rung:
    """A choice whose model has so many GiB, within 4."""
    blocks = tuple(BlockSize(f"blocks.{index}", (2**28,)) for index in range(int(gib * 4)))
    sizes = [ComponentSize("transformer", "denoiser", "Model", 0, blocks)]
    plan: Any = None if problem else plan_offload(sizes, OffloadConfig(gpu_memory="4GiB", activations="1GiB"))
    return Rung(name, int(gib * 2**30), plan, None, problem)


def test_what_loses_least_is_taken_of_what_stays_on_the_gpu() -> None:
    taken, why = choose_rung([rung("exact", 2), rung("int8", 1)])
    assert (taken.name, why) == ("exact", "exact weights stay on the GPU, and lose least of those that do")
    assert choose_rung([rung("exact", 5), rung("int8", 2), rung("int4", 1)])[0].name == "int8"


def test_what_sends_the_fewest_bytes_is_taken_of_what_streams() -> None:
    taken, why = choose_rung([rung("exact", 20), rung("int8", 10), rung("fp8", 10)])
    assert taken.name == "int8"
    assert why.startswith("int8 weights send the fewest bytes over the bus in a forward (exact 1")


def test_what_does_not_fit_is_left_out() -> None:
    taken, why = choose_rung([rung("exact", 1, "too small"), rung("int8", 1)])
    assert taken.name == "int8"
    assert why.endswith("exact weights do not fit")
    with pytest.raises(SettingError, match="smaller still"):
        choose_rung([rung("exact", 1, "too small"), rung("int8", 1, "smaller still")])


def test_rows_for_people() -> None:
    rows = table_of([rung("exact", 1, "too small"), rung("int8", 1)], {"int8": "taken"})
    assert rows[1] == ("exact", "1.00 GiB", "does not fit", "", "")
    assert rows[2] == ("int8", "1.00 GiB", "2.00 GiB", "0 B", "taken")


@functools.cache
def flux() -> tuple[Parts, Activations]:
    parts = read_parts("FluxTransformer2DModel")
    return parts, read_activations("FluxTransformer2DModel", parts, RequestSize(1024, 1024))


@pytest.mark.parametrize(
    ("budget", "loss", "taken"),
    [
        ({"gpu_memory": "40GiB"}, "int4", "exact"),
        ({"gpu_memory": "4GiB"}, "exact", "exact"),
        ({"gpu_memory": "4GiB"}, "int8", "int8"),
        ({"gpu_memory": "16GiB"}, "int8", "int8"),
        ({"gpu_memory": "4GiB"}, "int4", "int4"),
    ],
)
def test_the_rung_of_flux(budget: dict[str, str], loss: str, taken: str) -> None:
    ladder = Ladder(*flux(), OffloadConfig(**budget))  # type: ignore[arg-type]
    rung, why = choose_rung([ladder.rung(name) for name in (EXACT, *(kind.name for kind in kinds_within(loss)))])
    assert rung.name == taken
    assert taken in why


def test_a_kind_that_would_change_nothing_is_no_rung() -> None:
    parts = read_parts("UNet2DModel")
    ladder = Ladder(parts, Activations({}, "", None), OffloadConfig(gpu_memory="40GiB"))
    assert ladder.changes(KINDS["int8"]), "its attention has linear layers"
    (name,) = parts
    convolutions = {name: replace(parts[name], module=torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)))}
    assert not Ladder(convolutions, Activations({}, "", None), OffloadConfig(gpu_memory="1GiB")).changes(KINDS["int8"])
