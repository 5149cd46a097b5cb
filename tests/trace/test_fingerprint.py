"""Whether modules are still what they were: parts, weights, buffers and adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from driving import Plain, case

from samovar.trace.fingerprint import Fingerprint


def in_place(model: Plain) -> None:
    with torch.no_grad():
        model.blocks[0].norm.weight.mul_(2)


def another_parameter(model: Plain) -> None:
    model.blocks[0].norm.weight = torch.nn.Parameter(torch.ones(8))


def another_module(model: Plain) -> None:
    model.blocks[0].norm = torch.nn.LayerNorm(8)


def one_more_module(model: Plain) -> None:
    model.blocks[0].extra = torch.nn.Identity()


def one_module_less(model: Plain) -> None:
    del model.blocks[0].ff


def another_state(model: Plain) -> None:
    model.load_state_dict({name: tensor * 1.5 for name, tensor in model.state_dict().items()}, assign=True)


def a_buffer(model: Plain) -> None:
    model.table.add_(1)


CHANGES: list[Callable[[Plain], None]] = [
    in_place, another_parameter, another_module, one_more_module, one_module_less, another_state, a_buffer
]  # fmt: skip


def tabled() -> Plain:
    model = Plain()
    model.register_buffer("table", torch.zeros(2))
    return model


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_shows(change: Callable[[Plain], None]) -> None:
    model = tabled()
    fingerprint = Fingerprint(model.modules())
    assert fingerprint.holds()
    change(model)
    assert not fingerprint.holds()
    assert Fingerprint(model.modules()).holds()


def test_a_module_at_the_address_of_a_freed_one_is_another() -> None:
    model = Plain()
    fingerprint = Fingerprint(model.modules())
    before = id(model.blocks[0].ff)
    model.blocks[0].ff = torch.nn.Identity()
    others = []
    for _ in range(1000):
        others.append(torch.nn.Linear(8, 8))
        if id(others[-1]) == before:
            break
    model.blocks[0].ff = others[-1]
    assert not fingerprint.holds()


def test_running_a_model_is_no_change() -> None:
    name = "FluxTransformer2DModel"
    model = case(name).build()
    fingerprint = Fingerprint(model.modules())
    case(name).run(model)
    assert fingerprint.holds()


def test_only_the_modules_that_are_named_count() -> None:
    model = tabled()
    fingerprint = Fingerprint(model.blocks[1].modules())
    for change in CHANGES[:-2]:
        change(model)
    assert fingerprint.holds()


def test_what_lies_elsewhere_for_now_is_no_change() -> None:
    """accelerate puts new tensors on the meta device after each call."""
    model = torch.nn.Linear(2, 2, device="meta")
    fingerprint = Fingerprint([model])
    model.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    assert fingerprint.holds()


def test_weights_of_inference_mode_are_known_by_identity() -> None:
    with torch.inference_mode():
        model = torch.nn.Linear(2, 2)
        fingerprint = Fingerprint([model])
        assert fingerprint.holds()
        model.weight = torch.nn.Parameter(torch.ones(2, 2))
        assert not fingerprint.holds()


ADAPTERS: dict[str, Callable[[torch.nn.Module], None]] = {
    "scaled": lambda model: model.set_adapters("style", 0.5),
    "disabled": lambda model: model.disable_adapters(),
    "another": lambda model: model.set_adapters("other", 1.0),
    "merged": lambda model: model.fuse_lora(),
    "deleted": lambda model: model.delete_adapters("style"),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Adapter style was active which is now deleted:UserWarning")
@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters_that_are_set_or_scaled_show(change: str) -> None:
    peft = pytest.importorskip("peft")
    model = case("FluxTransformer2DModel").build()
    for name in ("other", "style"):
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)
    model.set_adapters("style", 1.0)
    fingerprint = Fingerprint(model.modules())
    assert fingerprint.holds()
    ADAPTERS[change](model)
    assert not fingerprint.holds()


def test_an_adapter_that_is_loaded_shows() -> None:
    peft = pytest.importorskip("peft")
    model = case("FluxTransformer2DModel").build()
    fingerprint = Fingerprint(model.modules())
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    assert not fingerprint.holds()
