"""A layer with an adapter gives peft's bits, with fewer operations."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from samovar.engine.lora_layers import quicken

peft = pytest.importorskip("peft")
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
