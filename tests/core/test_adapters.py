"""Adapters are switched as peft does it."""

from __future__ import annotations

import warnings

import pytest
import torch

from samovar.core import adapters


def test_adapters_are_switched_as_peft_does() -> None:
    peft = pytest.importorskip("peft")

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    given = torch.randn(2, 4)
    bare = model(given)
    for name, target in (("one", "0"), ("two", "1")):
        config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=[target], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, model, name)
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
