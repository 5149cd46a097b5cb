"""Which time-only layers are worth it, and why others stay what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from samovar.hooks import HookRegistry, ModelHook
from samovar.offload import ahead as ahead_layers
from samovar.offload.ahead import find_time_layers, may_have_time_layers
from samovar.offload.sizes import Component, find_components

from .foreseen import count_small_layers
from .holding import Holder
from .test_time_layers import Toy

MODS = [f"blocks.{index}.mod" for index in range(3)]
CALL: dict[str, Any] = {"hidden_states": torch.ones(2, 5, 64), "timestep": torch.ones(2)}


@pytest.fixture(autouse=True)
def _small_layers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    count_small_layers(monkeypatch)


def component(model: torch.nn.Module | None = None) -> Component:
    (found,) = find_components(Holder(transformer=Toy() if model is None else model))
    return found


def test_all_of_them() -> None:
    layers, why = find_time_layers(component(), (), CALL)
    assert list(layers) == ["embedder", *MODS]
    assert why == ""


@pytest.mark.parametrize("kind", ["compiled", "wrapped", "hooked", "ours", "shared"])
def test_what_stays_what_it_is(kind: str) -> None:
    model = Toy()
    block = model.blocks[1]
    if kind == "compiled":
        block.compile(backend="eager")
    elif kind == "wrapped":
        model.blocks[1] = torch.compile(block, backend="eager")
    elif kind == "hooked":
        block.mod.register_forward_hook(lambda *_: None)
    elif kind == "ours":
        HookRegistry.get_or_create(block.mod).register_hook("another", ModelHook())
    whole = component(model)
    if kind == "shared":
        whole = replace(whole, skip=whole.skip | {id(block.mod.weight)})
    layers, why = find_time_layers(whole, (), CALL)
    assert list(layers) == ["embedder", MODS[0], MODS[2]]
    assert why == {"wrapped": "1 compiled", "hooked": "1 hooked by others", "ours": "1 hooked by others"}.get(
        kind, f"1 {kind}"
    )


def test_a_model_that_is_compiled_as_a_whole_stays_what_it_is() -> None:
    layers, why = find_time_layers(component(torch.compile(Toy(), backend="eager")), (), CALL)  # type: ignore[arg-type]
    assert not layers
    assert why == "4 compiled"


def test_small_layers_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead_layers, "LEAST_OUTSIDE", 2**20)
    layers, why = find_time_layers(component(), (), CALL)
    assert (list(layers), why) == (MODS, "1 small")
    monkeypatch.setattr(ahead_layers, "LEAST_IN_BLOCKS", 2**20)
    assert find_time_layers(component(), (), CALL) == ({}, "")
    assert not may_have_time_layers(component())


def test_a_model_that_cannot_be_rehearsed_says_why() -> None:
    class Reads(Toy):
        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states * float(self.embedder.weight.sum()), timestep)

    layers, why = find_time_layers(component(Reads()), (), CALL)
    assert not layers
    assert "unknown" in why
    assert "item" in why
