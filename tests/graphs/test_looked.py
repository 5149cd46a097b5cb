"""Whatever a forward reads from its modules, however it is held, is seen to change, and not replayed past."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from samovar.graphs import apply_graphs
from samovar.graphs.looked import Looked
from samovar.graphs.snapshot import Snapshot
from samovar.hooks import NOT_BYPASSED, HookRegistry, ModelHook


class Settings:
    """An object of a library's own, such as an attention processor."""

    def __init__(self, deeper: Any = None) -> None:
        self.gain, self.table, self.deeper = 1.0, {"gains": [1.0]}, deeper


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain: Any = 1.0) -> None:
        self.gain = gain


class Odd(dict[str, Any]):
    """A table that cannot be copied."""

    def copy(self) -> Any:
        raise TypeError("There is one of me.")


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.inner, self.bare = nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Identity()
        self.rows, self.pair, self.line = [[1.0], [2.0]], ([1.0],), deque([1.0])
        self.settings, self.list, self.slotted = Settings(Settings()), [Settings()], Slotted()
        self.deep, self.slotted_tensor = {"a": {"b": {"c": [1.0]}}}, Slotted(torch.ones(8))
        self.register_buffer("parts", torch.ones(2))
        self.hidden, self.shift = [nn.Linear(8, 8)], {"one": torch.zeros(1)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = self.settings
        x = x * self.rows[0][0] * self.pair[0][0] * self.line[0] * settings.gain * settings.table["gains"][0]
        x = x * settings.deeper.gain * self.list[0].gain * self.slotted.gain * self.deep["a"]["b"]["c"][0]
        x = self.hidden[0](self.inner(self.bare(x * self.slotted_tensor.gain * self.parts.sum()))) + self.shift["one"]
        return self.act(self.norm(x)) + self.bare._buffers.get("bias", 0.0)


def _adapt(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.t()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a setting of torch's module": lambda m: setattr(m.norm, "eps", 0.5),
    "a function of torch's module": lambda m: setattr(m.act, "approximate", "tanh"),
    "a list in a list": lambda m: m.rows[0].__setitem__(0, 3.0),
    "a list in a tuple": lambda m: m.pair[0].__setitem__(0, 3.0),
    "a queue": lambda m: m.line.__setitem__(0, 3.0),
    "a list that is as long": lambda m: setattr(m, "rows", [[3.0], [2.0]]),
    "an object": lambda m: setattr(m.settings, "gain", 3.0),
    "a list in an object": lambda m: m.settings.table["gains"].__setitem__(0, 3.0),
    "an object in an object": lambda m: setattr(m.settings.deeper, "gain", 3.0),
    "an object in a list": lambda m: setattr(m.list[0], "gain", 3.0),
    "an object with slots": lambda m: setattr(m.slotted, "gain", 3.0),
    "a tensor in an object with slots": lambda m: setattr(m.slotted_tensor, "gain", torch.zeros(8)),
    "deep in a table": lambda m: m.deep["a"]["b"]["c"].__setitem__(0, 3.0),
    "a weight of a module in a list": lambda m: setattr(m.hidden[0], "weight", nn.Parameter(torch.eye(8))),
    "the memory of it": lambda m: setattr(m.hidden[0].weight, "data", torch.eye(8)),
    "a tensor in a table": lambda m: m.shift.update(one=torch.ones(1)),
    "a buffer where there was none": lambda m: m.bare.register_buffer("bias", torch.ones(8)),
    "a buffer in another table": lambda m: vars(m.bare).update(_buffers={"bias": torch.ones(8)}),
    "a weight, transposed where it is": lambda m: _adapt(m.inner.weight),
    "less of a buffer, where it is": lambda m: setattr(m.parts, "data", m.parts.data[:1]),
    "the same bits as other numbers": lambda m: setattr(m.parts, "data", m.parts.data.view(torch.int32)),
    "other hooks": lambda m: vars(m.inner).update(_forward_hooks={1: lambda module, args, output: output * 2}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_call(change: str) -> None:
    torch.manual_seed(0)
    model, x = Holder().eval(), torch.randn(3, 8)
    with torch.no_grad(), apply_graphs(model) as hook:
        before = [model(x) for _ in range(4)][-1]
        assert hook.stats().replayed == 2
        CHANGES[change](model)
        found = [model(x) for _ in range(4)]
    with torch.no_grad():
        expected = model(x)
    assert not torch.equal(expected, before)
    assert [torch.equal(one, expected) for one in found] == [True] * 4


def test_equal_values_are_no_change() -> None:
    model = Holder()
    snapshot = Snapshot(model)
    model.rows, model.settings.gain, model.deep = [[1.0], [2.0]], float("1.0"), {"a": {"b": {"c": [1.0]}}}
    assert snapshot.is_current()
    model.deep["a"]["b"]["c"][0] = 2.0
    assert not snapshot.is_current(), "what has taken its place counts from now on"


def test_an_equal_tensor_is_another_one() -> None:
    """A replay would read the memory of the old one, whatever is written into the new one later."""
    model = Holder()
    model.slotted.gain = torch.ones(1)
    snapshot = Snapshot(model)
    assert snapshot.is_current()
    model.slotted.gain = torch.ones(1)
    assert not snapshot.is_current()
    snapshot = Snapshot(model)
    model.shift["one"] = torch.zeros(1)
    assert not snapshot.is_current()


def test_a_model_that_cannot_be_looked_at_runs_with_the_reason() -> None:
    model, x = Holder().eval(), torch.randn(3, 8)
    model.settings.table = Odd(gains=[1.0])
    with torch.no_grad():
        expected = model(x)
        with apply_graphs(model) as hook:
            found = [model(x) for _ in range(4)]
    assert [torch.equal(one, expected) for one in found] == [True] * 4
    assert hook.stats().replayed == 0
    assert hook.stats().reasons == ("what it depends on cannot be compared (TypeError: There is one of me.)",)


def test_modules_that_an_object_knows_take_no_part() -> None:
    model, other = Holder(), nn.Linear(4, 4)
    model.settings.deeper.owner = other
    assert other not in Looked(model).modules
    assert model.hidden[0] in Looked(model).modules
    assert model.hidden[0] not in Looked(model, {model.hidden[0]}).modules


def test_another_hook_of_ours_on_a_hooked_module() -> None:
    class Passes(ModelHook):
        may_be_left_out = True

        def bypass(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return NOT_BYPASSED

    class Doubles(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return 2 * output

    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    registry = HookRegistry.get_or_create(model[0])
    registry.register_hook("passes", Passes())
    with torch.no_grad(), apply_graphs(model) as hook:
        before = [model(x) for _ in range(4)][-1]
        assert hook.stats().replayed == 2
        registry.register_hook("doubles", Doubles())
        found = model(x)
        registry.remove_hook("doubles")
        assert not torch.equal(found, before)
        assert torch.equal(model(x), before)
