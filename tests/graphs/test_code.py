"""Functions and classes that others replace while a model is loaded."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch
from diffusers.models import attention_dispatch
from torch import nn
from torch.nn import functional

import zoo
from samovar.graphs import apply_graphs
from samovar.graphs.code import Reached
from samovar.graphs.snapshot import Snapshot

CASES = {case.id: case for case in zoo.load()}
FACTOR = 1.0
TABLE: dict[str, Any] = {"gains": {"one": 1.0}}


def helper(x: torch.Tensor) -> torch.Tensor:
    return inner_helper(x)


def inner_helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


class Options:
    def __init__(self) -> None:
        self.gain = 1.0


OPTIONS = Options()


def closed(gain: float) -> tuple[Any, Any]:
    """A function, and what changes a variable of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * gain

    def change(value: float) -> None:
        nonlocal gain
        gain = value

    return function, change


class Base(nn.Module):
    gain = 1.0
    gains: ClassVar = {"one": 1.0}

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Layer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.table = nn.Linear(8, 8), nn.GELU(), [helper]
        self.closed, self.change = closed(1.0)

    @property
    def scale(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table[0](self.extra(self.act(self.inner(x)))) * self.gain * self.scale
        x = self.closed(x) * TABLE["gains"]["one"] * OPTIONS.gain * self.gains["one"]
        return functional.softmax(x, -1)


def _tripled(*args: Any, **kwargs: Any) -> Any:
    return 3 * next(arg for arg in args if isinstance(arg, torch.Tensor))


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "a method": (Base, "extra", _tripled),
    "a method of a subclass": (Layer, "extra", _tripled),
    "an attribute of a class": (Base, "gain", 3.0),
    "a property": (Layer, "scale", property(lambda self: 3.0)),
    "a function that a function calls": (sys.modules[__name__], "inner_helper", _tripled),
    "a number of a file": (sys.modules[__name__], "FACTOR", 3.0),
    "a function of torch": (functional, "softmax", _tripled),
    "a function that torch's module calls": (functional, "gelu", _tripled),
    "a forward of torch's": (nn.Linear, "forward", lambda self, x: x * 3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_call(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Layer().eval(), torch.randn(3, 8)
    with torch.no_grad(), apply_graphs(model) as hook:
        before = [model(x) for _ in range(4)][-1]
        assert hook.stats().replayed == 2
        monkeypatch.setattr(*CHANGES[change], raising=False)
        found = [model(x) for _ in range(4)]
    with torch.no_grad():
        expected = model(x)
    assert not torch.equal(expected, before)
    assert [torch.equal(one, expected) for one in found] == [True] * 4


CONTENTS: dict[str, tuple[Any, Any]] = {
    "a table of a file": (TABLE["gains"], "one"),
    "a table of a class": (Base.gains, "one"),
    "an object of a file": (vars(OPTIONS), "gain"),
}


@pytest.mark.parametrize("what", [*CONTENTS, "a variable of a function"])
def test_a_change_inside_of_what_code_knows_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Layer().eval(), torch.randn(3, 8)
    with torch.no_grad(), apply_graphs(model) as hook:
        before = [model(x) for _ in range(4)][-1]
        assert hook.stats().replayed == 2
        if what in CONTENTS:
            monkeypatch.setitem(*CONTENTS[what], 3.0)
        else:
            model.change(3.0)
        found = model(x)
    with torch.no_grad():
        assert torch.equal(found, model(x))
    assert not torch.equal(found, before)


@pytest.mark.parametrize("path", [
    "torch.nn.functional.scaled_dot_product_attention",
    "diffusers.models.transformers.transformer_flux.apply_rotary_emb",
    "diffusers.models.transformers.transformer_flux.FluxAttnProcessor.__call__",
    "diffusers.models.transformers.transformer_flux.dispatch_attention_fn",
])  # fmt: skip
def test_what_other_packages_replace_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do packages of attention kernels, as their READMEs say."""
    snapshot = Snapshot(CASES["FluxTransformer2DModel"].build())
    assert snapshot.is_current()
    monkeypatch.setattr(path, lambda *args, **kwargs: None)
    assert not snapshot.is_current()


def test_another_function_in_the_table_of_attention_backends_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = attention_dispatch._AttentionBackendRegistry
    snapshot = Snapshot(CASES["FluxTransformer2DModel"].build())
    monkeypatch.setitem(registry._backends, registry._active_backend, lambda *args, **kwargs: None)
    assert not snapshot.is_current()


def test_what_is_given_up_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot(Layer())
    monkeypatch.delattr(Base, "gain")
    assert not snapshot.is_current()


def test_python_and_torch_themselves_are_not_followed() -> None:
    _, namespaces, values = Reached([Layer], [helper]).lookups()
    names = {namespace.get("__name__") for namespace in namespaces}
    assert {"torch.nn.functional", __name__} <= names
    assert not names & {"math", "sys", "numpy", "warnings"}
    assert not any(value is torch for value in values)
    assert any(value is inner_helper for value in values)
