"""What counts as a change of a model, and what does not."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from driving import Plain, case

from samovar.hooks import HookRegistry, ModelHook
from samovar.trace.model_state import Generation, ModelState, own


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


def the_dtype(model: Plain) -> None:
    model.blocks.half()


def the_class(model: Plain) -> None:
    model.blocks[0].norm.__class__ = type("Other", (torch.nn.LayerNorm,), {})


def the_forward(model: Plain) -> None:
    model.blocks[0].norm.forward = lambda x: x


def a_hook(model: Plain) -> None:
    model.blocks[0].register_forward_hook(lambda *_: None)


CHANGES: dict[Callable[[Plain], None], str] = {
    in_place: "weights were written in place",
    another_parameter: "modules or weights were replaced",
    another_module: "modules or weights were replaced",
    one_more_module: "modules or weights were replaced",
    one_module_less: "modules or weights were replaced",
    another_state: "modules or weights were replaced",
    the_dtype: "weights have another dtype",
    the_class: "modules have another class",
    the_forward: "a module has another forward",
    a_hook: "forward hooks came or went",
    a_buffer: "weights were written in place",
}


def tabled() -> Plain:
    model = Plain()
    model.register_buffer("table", torch.zeros(2))
    return model


@pytest.mark.parametrize("place", [0, -1])
def test_a_weight_that_is_taken_away_or_added_is_seen(place: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    state = ModelState(model.modules())
    bias = model[place]._parameters.pop("bias")
    assert not state.holds()
    model[place]._parameters["bias"] = bias
    assert state.holds()
    model[place].register_parameter("more", bias)
    assert not state.holds()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_shows(change: Callable[[Plain], None]) -> None:
    model = tabled()
    state = ModelState(model.modules())
    assert state.holds()
    change(model)
    assert not state.holds()
    assert state.change() == CHANGES[change]
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
    state = ModelState(model.modules())
    weight = weakref.ref(model.blocks[0].norm.weight)
    another_parameter(model)
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


def test_a_module_at_the_address_of_a_freed_one_is_another() -> None:
    model = Plain()
    state = ModelState(model.modules())
    before = id(model.blocks[0].ff)
    model.blocks[0].ff = torch.nn.Identity()
    others = []
    for _ in range(1000):
        others.append(torch.nn.Linear(8, 8))
        if id(others[-1]) == before:
            break
    model.blocks[0].ff = others[-1]
    assert not state.holds()


def test_what_lies_elsewhere_for_now_is_no_change() -> None:
    """accelerate puts new tensors on the meta device after each call."""
    model = torch.nn.Linear(2, 2, device="meta")
    state = ModelState([model])
    model.weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))
    assert state.holds()


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
    state = ModelState(model.modules())
    assert state.holds()
    ADAPTERS[change](model)
    assert not state.holds()


def test_an_adapter_that_is_loaded_shows() -> None:
    peft = pytest.importorskip("peft")
    model = case("FluxTransformer2DModel").build()
    state = ModelState(model.modules())
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
    assert not state.holds()
