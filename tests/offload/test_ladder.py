"""Which rung is the fastest, and what is said of each."""

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
from samovar.offload.ladder import EXACT, Ladder, Rung, Speeds, choose_rung, table_of
from samovar.offload.sizes import BlockSize, ComponentSize
from samovar.trace.activations import Activations, read_activations
from samovar.trace.rehearse import RequestSize


def rung(name: str, seconds: float | None, problem: str = "") -> Rung:
    sizes = [ComponentSize("transformer", "denoiser", "Model", 0, (BlockSize("blocks.0", (2**30,)),))]
    plan: Any = None if problem else plan_offload(sizes, OffloadConfig(gpu_memory="4GiB", activations="1GiB"))
    return Rung(name, 2**30, plan, None, seconds, problem)


def test_the_fastest_is_taken_and_among_equals_what_loses_least() -> None:
    assert choose_rung([rung("exact", 2.0), rung("int8", 1.0), rung("int4", 0.99)])[0].name == "int8"
    assert choose_rung([rung("exact", 1.0), rung("int8", 0.98)])[0].name == "exact"
    taken, why = choose_rung([rung("exact", None, "too small"), rung("int8", 1.0)])
    assert taken.name == "int8"
    assert "exact weights do not fit" in why
    with pytest.raises(SettingError, match="smaller still"):
        choose_rung([rung("exact", None, "too small"), rung("int8", None, "smaller still")])


def test_without_times_bytes_decide() -> None:
    assert choose_rung([rung("exact", None), rung("int8", None)])[0].name == "exact"


def test_rows_for_people() -> None:
    rows = table_of([rung("exact", None, "too small"), rung("int8", 0.1234)], {"int8": "taken"})
    assert rows[1][:3] == ("exact", "1.00 GiB", "does not fit")
    assert rows[2] == ("int8", "1.00 GiB", "2.00 GiB", "0 B", "0.123 s", "taken")


@functools.cache
def flux() -> tuple[Parts, Activations]:
    parts = read_parts("FluxTransformer2DModel")
    return parts, read_activations("FluxTransformer2DModel", parts, RequestSize(1024, 1024))


def test_times_are_those_of_compute_bus_and_dequantising() -> None:
    parts, seen = flux()
    ladder = Ladder(parts, seen, OffloadConfig(gpu_memory="40GiB"), Speeds(1e14, 1e12, 1e9))
    exact, int8 = ladder.rung(EXACT), ladder.rung("int8")
    assert exact.forward_s == pytest.approx(0.744, rel=0.01), "74 TFLOP at 1024 x 1024 pixels"
    assert int8.forward_s == pytest.approx(0.744 + 5 * 11.8e9 / 1e12, rel=0.01)
    small = Ladder(parts, seen, OffloadConfig(gpu_memory="4GiB"), Speeds(1e14, 1e12, 1e9))
    streamed = small.rung(EXACT)
    assert streamed.forward_s == pytest.approx(streamed.bus_bytes / 1e9, rel=0.05), "the bus takes the time"
    unknown = Ladder(parts, Activations({}, "", None), OffloadConfig(gpu_memory="40GiB"))
    assert unknown.rung(EXACT).forward_s is None


@pytest.mark.parametrize(
    ("budget", "loss", "tflops", "taken"),
    [
        ({"gpu_memory": "40GiB"}, "int4", 600, "exact"),  # Everything fits.
        ({"gpu_memory": "4GiB"}, "exact", 5000, "exact"),
        ({"gpu_memory": "4GiB"}, "int8", 5000, "int8"),  # The bus is what takes the time.
        ({"gpu_memory": "6GiB"}, "int4", 5000, "int4"),
        ({"gpu_memory": "16GiB"}, "int4", 20, "exact"),  # Copies are hidden behind compute.
        ({"gpu_memory": "6GiB", "host_memory": "2GiB"}, "int8", 100, "int8"),  # The rest would come from a disk.
    ],
)
def test_the_fastest_rung_of_flux(budget: dict[str, str], loss: str, tflops: float, taken: str) -> None:
    ladder = Ladder(*flux(), OffloadConfig(**budget), Speeds(tflops * 1e12, tflops * 1e10))  # type: ignore[arg-type]
    names = [EXACT, *(kind.name for kind in kinds_within(loss))]
    rung, why = choose_rung([ladder.rung(name) for name in names])
    assert rung.name == taken
    assert taken in why


def test_a_kind_that_would_change_nothing_is_no_rung() -> None:
    parts = read_parts("UNet2DModel")
    ladder = Ladder(parts, Activations({}, "", None), OffloadConfig(gpu_memory="40GiB"))
    assert ladder.changes(KINDS["int8"]), "its attention has linear layers"
    (name,) = parts
    convolutions = {name: replace(parts[name], module=torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1)))}
    assert not Ladder(convolutions, Activations({}, "", None), OffloadConfig(gpu_memory="1GiB")).changes(KINDS["int8"])
