"""Settings of adapters that were seen before are known again; weights that were merged are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pipelines import tiny_flux_pipeline
from samovar.core import adapters
from samovar.core.adapters import AdapterStates

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`", "ignore:Adapter .* was active which is now deleted"
)


@pytest.fixture
def model() -> Any:
    return tiny_flux_pipeline().transformer


def add(model: Any, name: str) -> None:
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)


def test_equal_settings_have_one_number(model: Any) -> None:
    states = AdapterStates(model)
    bare = states.number()
    assert states.number() == bare
    for name in ("a", "b"):
        add(model, name)
    numbers = []
    for scale in (1.0, 0.5, 1.0, 0.5):
        model.set_adapters("a", scale)
        numbers.append(states.number())
    model.set_adapters(["b", "a"], [1.0, 1.0])
    numbers.append(states.number())
    model.disable_adapters()
    numbers.append(states.number())
    model.enable_adapters()
    assert states.number() == numbers[-2]
    assert numbers[:2] == numbers[2:4]
    assert len({bare, *numbers}) == 5


@pytest.mark.parametrize("change", ["merge", "load"])
def test_weights_that_may_be_others_have_a_new_number(model: Any, change: str) -> None:
    add(model, "a")
    states = AdapterStates(model)
    before = states.number()
    if change == "merge":
        model.fuse_lora()
        merged = states.number()
        assert states.number() == merged != before
        model.unfuse_lora()
    else:
        add(model, "b")
        states.number()
        model.delete_adapters("b")
    assert states.number() > before
    assert states.number() == states.number()


def test_only_so_many_are_remembered(model: Any) -> None:
    add(model, "a")
    states = AdapterStates(model)
    numbers = []
    for scale in (*range(1, 20), 19, 1):
        model.set_adapters("a", float(scale))
        numbers.append(states.number())
    assert numbers[18] == numbers[19]
    assert numbers[20] > numbers[19]


# ------------------------------------------------------------------------------------------------ switches


def test_a_plain_module_has_no_adapters() -> None:
    module: Any = torch.nn.Linear(2, 2)
    assert adapters.loaded_adapters(module) == ()
    assert adapters.adapter_settings(module) is None
    module.scaling, module._active_adapter = {"style": 0.5}, ["style"]
    before = adapters.adapter_settings(module)
    assert before is not None
    assert before["style"] == 0.5
    module._active_adapter.append("other")
    assert adapters.adapter_settings(module) != before


def test_adapters_are_switched_as_peft_does() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    given = torch.randn(2, 4)
    bare = model(given)
    for name, target in (("one", "0"), ("two", "1")):
        config = LoraConfig(r=2, lora_alpha=3, target_modules=[target], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, model, name)
    layers = adapters.adapter_layers(model.modules())
    assert len(layers) == 2
    for names, scales in ((["one"], [0.5]), (["one", "two"], [1.0, -2.0]), (["two"], [1.0])):
        for layer in layers:
            layer.enable_adapters(True)
            layer.set_adapter(names)
            for name, scale in zip(names, scales, strict=True):
                layer.set_scale(name, scale)
        expected = model(given)
        adapters.switch_adapters(layers, {})
        assert torch.equal(model(given), bare)
        adapters.switch_adapters(layers, dict(zip(names, scales, strict=True)))
        assert torch.equal(model(given), expected)
        assert not torch.equal(expected, bare)
        adapters.switch_adapters(layers, {}, names)
        assert all(scale == 1.5 for layer in layers for scale in layer.scaling.values()), "as they were loaded"
