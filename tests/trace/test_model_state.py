"""What counts as a change of a model, and what does not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import Plain, case

from samovar.hooks import HookRegistry, ModelHook
from samovar.trace.model_state import Generation, ModelState, own

REPLACED = "modules or weights were replaced"

CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "in place": ("weights were written in place", lambda model: torch.nn.init.zeros_(model.blocks[0].norm.weight)),
    "a buffer": ("weights were written in place", lambda model: model.table.add_(1)),
    "parameter": (REPLACED, lambda model: setattr(model.blocks[0].norm, "weight", torch.nn.Parameter(torch.ones(8)))),
    "module": (REPLACED, lambda model: setattr(model.blocks[0], "norm", torch.nn.LayerNorm(8))),
    "one more": (REPLACED, lambda model: setattr(model.blocks[0], "extra", torch.nn.Identity())),
    "one less": (REPLACED, lambda model: delattr(model.blocks[0], "ff")),
    "bias taken": (REPLACED, lambda model: model.blocks[0].ff._parameters.pop("bias")),
    "state": (REPLACED, lambda model: model.load_state_dict(model.state_dict(), assign=True)),
    "dtype": ("weights have another dtype", lambda model: model.blocks.half()),
    "class": ("modules have another class", lambda model: setattr(model.blocks[0].norm, "__class__", Other)),
    "forward": ("a module has another forward", lambda model: setattr(model.blocks[0].norm, "forward", abs)),
    "a hook": ("forward hooks came or went", lambda model: model.blocks[0].register_forward_hook(lambda *_: None)),
}


class Other(torch.nn.LayerNorm):
    pass


def tabled() -> Plain:
    model = Plain()
    model.register_buffer("table", torch.zeros(2))
    return model


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change: str) -> None:
    model, (what, make) = tabled(), CHANGES[change]
    state = ModelState(model.modules())
    assert state.holds()
    make(model)
    assert state.change() == what
    assert ModelState(model.modules()).holds()


def test_a_forward_that_is_replaced_on_a_class_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tabled()
    HookRegistry.get_or_create(model.blocks[0]).register_hook("any", ModelHook())
    state = ModelState(model.modules())
    monkeypatch.setattr(type(model.blocks[1]), "forward", lambda self, x, *_: x)
    assert state.change() == "a class has another forward"


def test_our_own_hooks_are_no_change() -> None:
    model = tabled()
    state = ModelState(model.modules())
    HookRegistry.get_or_create(model.blocks[0]).register_hook("any", ModelHook())
    own(hook := lambda *_: None)
    model.blocks[1].register_forward_hook(hook)
    assert state.holds()


def test_torchs_choice_of_kernels_counts_where_it_is_asked_for() -> None:
    model, before = tabled(), torch.backends.cudnn.deterministic
    states = [ModelState(model.modules(), kernels=kernels) for kernels in (True, False)]
    torch.backends.cudnn.deterministic = not before
    try:
        assert [state.holds() for state in states] == [False, True]
    finally:
        torch.backends.cudnn.deterministic = before


def test_another_attention_processor_shows_and_so_do_its_settings() -> None:
    model = case("FluxTransformer2DModel").build()
    attention = model.transformer_blocks[0].attn
    attention.processor.scale = [1.0]
    state = ModelState(model.modules())
    attention.processor.scale[0] = 0.5
    assert not state.holds()
    attention.processor.scale[0] = 1.0
    assert state.holds()
    attention.set_processor(copy.copy(attention.processor))
    assert state.change() == "attention processors are others or have other settings"


def test_weights_that_the_model_drops_are_not_kept() -> None:
    model = tabled()
    state, weight = ModelState(model.modules()), weakref.ref(model.blocks[0].norm.weight)
    model.blocks[0].norm.weight = torch.nn.Parameter(torch.ones(8))
    gc.collect()
    assert weight() is None
    assert not state.holds()


def test_a_state_that_comes_back_has_its_number_again() -> None:
    model = Plain()
    generation, own = Generation(model, model.modules), model.blocks[0].ff
    other = torch.nn.Identity()
    numbers = []
    for part in (own, other, own, other):
        model.blocks[0].ff = part
        numbers.append(generation.check())
    assert numbers == [1, 2, 1, 2]
    with torch.no_grad():
        next(own.parameters()).add_(1)
    model.blocks[0].ff = own
    assert generation.check() == 3


def test_what_lies_elsewhere_for_now_is_no_change() -> None:
    """accelerate puts new tensors on the meta device after each call."""
    model = torch.nn.Linear(2, 2, device="meta")
    state = ModelState([model])
    model.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    assert state.holds()


ADAPTERS: dict[str, Callable[[Any], object]] = {
    "scaled": lambda model: model.set_adapters("style", 0.5),
    "disabled": lambda model: model.disable_adapters(),
    "another": lambda model: model.set_adapters("other", 1.0),
    "merged": lambda model: model.fuse_lora(),
    "deleted": lambda model: model.delete_adapters("style"),
}


@pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:Adapter style was active which is now deleted:UserWarning")
@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters_that_are_loaded_set_or_scaled_show(change: str) -> None:
    peft = pytest.importorskip("peft")
    model = case("FluxTransformer2DModel").build()
    for name in ("other", "style"):
        state = ModelState(model.modules())
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), name)
        assert not state.holds()
    model.set_adapters("style", 1.0)
    state = ModelState(model.modules())
    assert state.holds()
    ADAPTERS[change](model)
    assert not state.holds()
