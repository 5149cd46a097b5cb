"""Whatever a forward reads and somebody changes: seen at the next call, refused before, or found by a comparison.

Each kind says which. `found` is for what is not compared at each call (`samovar.graphs.guard` says what that is): every
so many replays the forward runs as well, and other bits turn graphs off.
"""

from __future__ import annotations

import argparse
import contextvars
import functools
import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest
import torch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import nn
from torch.nn import functional

import zoo
from samovar.graphs import GraphsConfig, apply_graphs
from samovar.graphs.guard import obstacle
from samovar.hooks import HookOrder, HookRegistry, ModelHook, watched

CASES = {case.id: case for case in zoo.load()}
EVERY = 4
THIS = sys.modules[__name__]
CONTEXT = contextvars.ContextVar("gain", default=1.0)
LOCAL = threading.local()
TABLE: dict[str, Any] = {"a": {"b": 1.0}}
FACTOR = 1.0
Seen = Literal["seen", "refused", "found"]


def helper(x: torch.Tensor) -> torch.Tensor:
    return inner_helper(x)


def inner_helper(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def tripled(*given: Any, **_: Any) -> Any:
    return 3 * next(one for one in given if isinstance(one, torch.Tensor))


class Settings:
    """An object of a library's own, such as an attention processor."""

    def __init__(self, deeper: Any = None) -> None:
        self.gain, self.table, self.deeper = 1.0, {"gains": [1.0]}, deeper


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


def closed() -> tuple[Any, Any]:
    """A function, and what changes a variable of its own."""
    gain = 1.0

    def change() -> None:
        nonlocal gain
        gain = 3.0

    return (lambda: gain), change


class Base(nn.Module):
    gain = 1.0
    gains: ClassVar = {"one": 1.0}

    def extra(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Layer(Base):
    """Reads one more thing, which `held` is or leads to."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner, self.norm, self.act = nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()
        self.held, self.read, self.number = held, read, 1.0
        self.register_buffer("parts", torch.ones(2))

    @property
    def scale(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = helper(self.extra(self.act(self.norm(self.inner(x))))) * self.gain * self.gains["one"] * self.scale
        x = x * self.number * self.parts.sum() + self.norm._buffers.get("more", 0.0)
        return functional.softmax(x * self.read(self.held), -1)


class Kind(NamedTuple):
    is_noticed: Seen
    make: Callable[[], Any]
    """Makes what the model holds."""
    read: Callable[[Any], Any]
    change: Callable[[Any], object]
    """Changes what is held."""


KINDS: dict[str, Kind] = {
    "a table": Kind("seen", lambda: {"a": 1.0}, lambda h: h["a"], lambda h: h.update(a=3.0)),
    "deep in a table": Kind("seen", lambda: {"a": [{"b": [[1.0]]}]}, lambda h: h["a"][0]["b"][0][0],
                            lambda h: h["a"][0]["b"][0].__setitem__(0, 3.0)),
    "a view of a table": Kind("seen", lambda: (table := {"a": 1.0}, types.MappingProxyType(table)),
                              lambda h: h[1]["a"], lambda h: h[0].update(a=3.0)),
    "a tensor in a table": Kind("seen", lambda: {"a": torch.ones(1)}, lambda h: h["a"],
                                lambda h: h.update(a=torch.full((1,), 3.0))),
    "the memory of a tensor": Kind("seen", lambda: {"a": torch.ones(1)}, lambda h: h["a"],
                                   lambda h: setattr(h["a"], "data", torch.full((1,), 3.0))),
    "an object": Kind("seen", Settings, lambda h: h.gain, lambda h: setattr(h, "gain", 3.0)),
    "a namespace": Kind("seen", lambda: argparse.Namespace(gain=1.0), lambda h: h.gain,
                        lambda h: setattr(h, "gain", 3.0)),
    "a partial": Kind("seen", lambda: functools.partial(max, 1.0, key=abs), lambda h: h(0.5),
                      lambda h: h.keywords.update(key=lambda number: -number)),
    "a module in an object": Kind("seen", lambda: Settings(nn.Linear(8, 8)), lambda h: h.deeper.weight[0, 0],
                                  lambda h: setattr(h.deeper, "weight", nn.Parameter(torch.eye(8)))),
    "a setting of a module in an object": Kind("seen", lambda: Settings(nn.Identity()), lambda h: h.deeper.training,
                                               lambda h: h.deeper.eval()),
    "an array": Kind("refused", lambda: np.ones(2), lambda h: float(h[0]), lambda h: h.fill(3.0)),
    "an object with slots": Kind("refused", Slotted, lambda h: h.gain, lambda h: setattr(h, "gain", 3.0)),
    "an iterator": Kind("refused", lambda: itertools.count(1.0), next, lambda h: None),
    "a generator of random numbers": Kind("refused", torch.Generator, lambda h: torch.randn(1, generator=h),
                                          lambda h: None),
    "an attribute of a function": Kind("found", lambda: helper, lambda h: h.__dict__.get("gain", 1.0),
                                       lambda h: vars(h).update(gain=3.0)),
    "a variable of a function": Kind("found", closed, lambda h: h[0](), lambda h: h[1]()),
    "a default of a function": Kind("found", lambda: Settings.__init__, lambda h: 3.0 if h.__defaults__[0] else 1.0,
                                    lambda h: setattr(h, "__defaults__", (1.0,))),
    "a context": Kind("found", lambda: None, lambda h: CONTEXT.get(), lambda h: CONTEXT.set(3.0)),
    "a thread's own": Kind("found", lambda: None, lambda h: getattr(LOCAL, "gain", 1.0),
                           lambda h: setattr(LOCAL, "gain", 3.0)),
    "the environment": Kind("found", lambda: None, lambda h: float(os.environ.get("GAIN", "1")),
                            lambda h: os.environ.update(GAIN="3")),
    "a table of a file": Kind("found", lambda: None, lambda h: TABLE["a"]["b"], lambda h: TABLE["a"].update(b=3.0)),
    "a number of a file": Kind("found", lambda: None, lambda h: 1.0, lambda h: setattr(THIS, "FACTOR", 3.0)),
    "a table of a class": Kind("found", lambda: None, lambda h: 1.0, lambda h: Base.gains.update(one=3.0)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    token, default = CONTEXT.set(1.0), Settings.__init__.__defaults__
    yield
    CONTEXT.reset(token)
    LOCAL.__dict__.clear()
    vars(helper).clear()
    os.environ.pop("GAIN", None)
    TABLE["a"]["b"] = Base.gains["one"] = THIS.FACTOR = 1.0  # type: ignore[attr-defined]
    Settings.__init__.__defaults__ = default


def check(model: nn.Module, call: Callable[[], Any], change: Callable[[], object], is_noticed: Seen) -> None:
    """Whether a change is noticed as it should be, and what runs after it gives the bare model's bits."""
    with torch.no_grad():
        with apply_graphs(model, GraphsConfig(compare_every=EVERY)) as hook:
            before = [call() for _ in range(4)][-1]
            if is_noticed == "refused":
                assert (hook.stats().replayed, len(hook.stats().reasons)) == (0, 1)
                assert "which cannot be compared" in hook.stats().reasons[0]
                return
            assert (hook.stats().replayed, hook.stats().reasons) == (2, ())
            change()
            found = [call() for _ in range(4 * EVERY)]
            stats = hook.stats()
        expected = call()
    assert not torch.equal(expected, before)
    if is_noticed == "found":
        assert [torch.equal(one, expected) for one in found[EVERY:]] == [True] * 3 * EVERY
        assert "gave other bits than the forward" in stats.reasons[-1]
        assert stats.recorded == 0
    else:
        assert [torch.equal(one, expected) for one in found] == [True] * 4 * EVERY
        assert stats.replayed > 2, "it is recorded again"


@pytest.mark.parametrize("name", KINDS)
def test_what_a_model_holds_or_its_code_knows(name: str) -> None:
    torch.manual_seed(0)
    kind, x = KINDS[name], torch.randn(3, 8)
    model = Layer(kind.make(), kind.read)
    check(model, lambda: model(x), lambda: kind.change(model.held), kind.is_noticed)


def _transpose(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t()


OF_MODULES: dict[str, Callable[[Layer], object]] = {
    "a number": lambda m: setattr(m, "number", 3.0),
    "a function of torch's module": lambda m: setattr(m.act, "approximate", "tanh"),
    "an attribute that is new": lambda m: setattr(m, "gain", 3.0),
    "a weight": lambda m: setattr(m.inner, "weight", nn.Parameter(m.inner.weight * 2)),
    "the memory of a weight": lambda m: setattr(m.inner.weight, "data", m.inner.weight.data * 2),
    "a weight, transposed where it is": lambda m: _transpose(m.inner.weight),
    "less of a buffer, where it is": lambda m: setattr(m.parts, "data", m.parts.data[:1]),
    "the same bits as other numbers": lambda m: setattr(m.parts, "data", m.parts.data.view(torch.int32)),
    "a buffer where there was none": lambda m: m.norm.register_buffer("more", torch.arange(8.0)),
    "a module": lambda m: setattr(m, "inner", nn.Identity()),
    "a module's forward": lambda m: setattr(m.inner, "forward", lambda x: x - 1.0),
    "a module's class": lambda m: setattr(m.norm, "__class__", type("Other", (nn.LayerNorm,), {"forward": tripled})),
    "a forward hook": lambda m: m.inner.register_forward_hook(lambda *given: given[2] * 2),
}


@pytest.mark.parametrize("name", OF_MODULES)
def test_a_change_of_a_module_is_seen(name: str) -> None:
    torch.manual_seed(0)
    model, x = Layer(None, lambda h: 1.0), torch.randn(3, 8)
    with torch.no_grad(), apply_graphs(model) as hook:
        before = [model(x) for _ in range(4)][-1]
        assert hook.stats().replayed == 2
        OF_MODULES[name](model)
        found = [model(x) for _ in range(4)]
    with torch.no_grad():
        expected = model(x)
    assert not torch.equal(expected, before)
    assert [torch.equal(one, expected) for one in found] == [True] * 4


PATCHES: dict[str, tuple[Any, str, Any]] = {
    "a method": (Base, "extra", tripled),
    "a forward": (Layer, "forward", lambda self, x: x * 7),
    "a property": (Layer, "scale", property(lambda self: 3.0)),
    "a function of the model's file": (THIS, "inner_helper", tripled),
    "a function of torch": (functional, "softmax", tripled),
    "a forward of torch's": (nn.Linear, "forward", lambda self, x: x * 3),
}


@pytest.mark.parametrize("name", PATCHES)
def test_what_others_put_in_the_place_of_code_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Layer(None, lambda h: 1.0), torch.randn(3, 8)
    check(model, lambda: model(x), lambda: monkeypatch.setattr(*PATCHES[name], raising=False), "seen")


# ------------------------------------------------------------------------------------------------ a model of diffusers


class Processor(FluxAttnProcessor):  # type: ignore[misc]
    """An attention processor of a user's, which scales what attention gives."""

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, gain = super().__call__(*args, **kwargs), self.read(self.held)
        return tuple(one * gain for one in output) if isinstance(output, tuple) else output * gain


OF_PROCESSORS = ("an object", "an array", "a module in an object", "a context")


def flux() -> tuple[Any, Callable[[], Any]]:
    case = CASES["FluxTransformer2DModel"]
    model = case.build()
    return model, lambda: case.run(model, 0)[0]


@pytest.mark.parametrize("name", OF_PROCESSORS)
def test_what_an_attention_processor_reads(name: str) -> None:
    kind, (model, call) = KINDS[name], flux()
    held = kind.make()
    model.set_attn_processor(Processor(held, kind.read))
    check(model, call, lambda: kind.change(held), kind.is_noticed)


@pytest.mark.parametrize("path", [
    "torch.nn.functional.scaled_dot_product_attention",
    "diffusers.models.transformers.transformer_flux.apply_rotary_emb",
    "diffusers.models.transformers.transformer_flux.FluxAttnProcessor.__call__",
    "diffusers.models.transformers.transformer_flux.dispatch_attention_fn",
])  # fmt: skip
def test_what_packages_of_kernels_replace_is_seen(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = flux()
    ran: list[int] = []
    *where, name = path.split(".")
    real = getattr(functools.reduce(getattr, where[1:], sys.modules[where[0]]), name)

    def other(*args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return real(*args, **kwargs)

    with torch.no_grad(), apply_graphs(model) as hook:
        for _ in range(4):
            call()
        assert hook.stats().replayed == 2
        monkeypatch.setattr(path, other)
        call()
        assert ran


@pytest.mark.filterwarnings("ignore::UserWarning")  # Of peft.
def test_adapters_and_backends_of_attention_are_seen() -> None:
    from peft import LoraConfig

    model, call = flux()
    changes: list[Callable[[], object]] = [
        *(lambda name=name: model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), name) for name in "ab"),  # type: ignore[misc]
        lambda: model.set_adapter("a"), model.disable_adapters, model.enable_adapters,
        lambda: model.set_adapters(["a", "b"], [0.5, 1.0]), lambda: model.set_adapters(["a", "b"], [0.7, 1.0]),
        model.fuse_lora, model.unfuse_lora, lambda: model.delete_adapters("b"),
        lambda: model.set_attention_backend("_native_math"), lambda: model.set_attention_backend("native"),
        lambda: model.transformer_blocks[0].attn.set_processor(FluxAttnProcessor()),
    ]  # fmt: skip
    with torch.no_grad(), apply_graphs(model) as hook:
        for change in changes:
            change()
            with watched():
                expected = call()
            found = [call() for _ in range(3)]
            assert [torch.equal(one, expected) for one in found] == [True] * 3
        assert hook.stats().replayed > len(changes)


# ------------------------------------------------------------------------------------------------ hooks


def test_hooks_that_a_replay_would_leave_out() -> None:
    model, _ = flux()
    assert obstacle(model) is None
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert "global hooks" in str(obstacle(model))
    handle.remove()

    class Sharded(ModelHook):
        order = HookOrder.SHARD

    registry = HookRegistry.get_or_create(model)
    registry.register_hook("shard", Sharded())
    assert obstacle(model) == "ranks exchange tensors inside its forward"
    registry.remove_hook("shard")
    from diffusers import FirstBlockCacheConfig

    model.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert "which a replay would not call" in str(obstacle(model))
    model.disable_cache()
    assert obstacle(model) is None
