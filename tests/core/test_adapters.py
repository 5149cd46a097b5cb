"""A layer with an adapter gives peft's bits, with fewer operations. Settings that were seen before are known again;
weights that were merged are not."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelines import tiny_flux_pipeline
from samovar.core import adapters
from samovar.core.adapters import AdapterStates, quicken

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Already found a `peft_config`", "ignore:Adapter .* was active which is now deleted"
)
RANK, WIDTH, TOKENS = 4, 24, 10


def layer(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """peft's layer with two adapters."""
    from peft.tuners.lora.layer import Linear

    torch.manual_seed(0)
    given = {"r": RANK, "lora_alpha": RANK, "init_lora_weights": False, **settings}
    config = peft.LoraConfig(**given)
    made = Linear(torch.nn.Linear(16, WIDTH), "a", config, r=RANK, lora_alpha=config.lora_alpha)
    made.update_layer("b", RANK, lora_alpha=config.lora_alpha, config=config)
    return made.to(dtype).eval().requires_grad_(False)


def quick(one: Any) -> Any:
    made = copy.deepcopy(one)
    quicken([made])
    assert type(made) is not type(one)
    return made


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which operations there were, and how wide their outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.seen.append((func.overloadpacket.__name__, output.shape[-1]))
        return output

    def products(self) -> list[int]:
        return [width for name, width in self.seen if name == "mul"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0, 0.25, -1.0, 0.7, 3.0, 0.0, 2.0**-40])
@pytest.mark.parametrize("names", [["a"], ["b", "a"], ["a", "nowhere"], []])
def test_every_scale_gives_the_bits_of_peft(dtype: torch.dtype, scale: float, names: list[str]) -> None:
    theirs = layer(dtype)
    ours = quick(theirs)
    x = torch.randn(TOKENS, 16).to(dtype) * 3
    for one in (theirs, ours):
        one.set_adapter([name for name in names if name != "nowhere"])
        one._active_adapter = names
        one.scaling["a"] = scale
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("scale", "dtype", "widths"),
    [
        (1.0, torch.float16, []),
        (0.5, torch.float32, [RANK]),
        (0.5, torch.float16, [WIDTH]),
        (0.7, torch.float32, [WIDTH]),
        (2.0**40, torch.float32, [WIDTH]),
    ],
)
def test_the_output_is_multiplied_only_by_what_could_round(scale: float, dtype: torch.dtype, widths: list[int]) -> None:
    ours = quick(layer(dtype))
    ours.scaling["a"] = scale
    with Operations() as operations:
        ours(torch.randn(TOKENS, 16).to(dtype))
    assert operations.products() == widths


@pytest.mark.parametrize("settings", [{"lora_bias": True, "lora_alpha": 8}, {"use_dora": True}, {"lora_dropout": 0.5}])
def test_other_kinds_of_adapters_give_the_bits_of_peft(settings: dict[str, Any]) -> None:
    theirs, x = layer(**settings), torch.randn(TOKENS, 16)
    ours = quick(theirs)
    assert torch.equal(ours(x), theirs(x))
    for one in (theirs, ours):
        one.train()
    torch.manual_seed(1)
    expected = theirs(x)
    torch.manual_seed(1)
    assert torch.equal(ours(x), expected)


def test_merged_disabled_and_mixed_adapters_are_left_to_peft() -> None:
    theirs, x = layer(), torch.randn(TOKENS, 16)
    ours = quick(theirs)
    for change in (lambda one: one.merge(), lambda one: one.unmerge(), lambda one: one.enable_adapters(False)):
        for one in (theirs, ours):
            change(one)
        assert torch.equal(ours(x), theirs(x))
    for one in (theirs, ours):
        one.enable_adapters(True)
    named = {"adapter_names": ["a", "b"] * (TOKENS // 2)}
    assert torch.equal(ours(x, **named), theirs(x, **named))


def test_a_layer_computes_in_the_type_of_its_adapter() -> None:
    theirs, x = layer(torch.bfloat16), torch.randn(TOKENS, 16).to(torch.bfloat16)
    for part in (theirs.lora_A, theirs.lora_B):
        part.float()
    ours = quick(theirs)
    assert torch.equal(ours(x), theirs(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), theirs(x))


def test_other_layers_stay_peft_s() -> None:
    from peft.tuners.lora.layer import Conv2d, Linear

    class Special(torch.nn.Linear):
        """As quantised layers are."""

    config = peft.LoraConfig(r=RANK)
    layers = [
        Conv2d(torch.nn.Conv2d(3, 4, 3), "a", config, r=RANK, lora_alpha=1),
        Linear(Special(16, 16), "a", config, r=RANK, lora_alpha=1),
        torch.nn.Linear(2, 2),
    ]
    types = list(map(type, layers))
    quicken(layers)
    assert list(map(type, layers)) == types


# ------------------------------------------------------------------------------------------------ settings seen before


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
