"""Models and arguments that nobody here would have written: no crash, no trace of a trial, and computed steps exact."""

from __future__ import annotations

import random
import types
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from driving import COND, UNGUARDED, Plain, at, differing, loop
from peft import LoraConfig

from pipelines import PIPELINES
from samovar.cache import apply_teacache_hook, make_cache_backend
from samovar.hooks import call_context

NEVER = {**UNGUARDED, "rel_l1_thresh": 1e-12}
ALWAYS = {**UNGUARDED, "rel_l1_thresh": float("inf")}


def mask(hook: Any, branch: str = "only") -> str:
    found: str = hook.stats().branches[branch].mask
    return found


# ------------------------------------------------------------------------------------------------ state of a model


class Stateful(Plain):
    """Its output depends on state that it keeps and moves at every call."""

    def __init__(self, state: Any, draw: Any) -> None:
        super().__init__()
        self.state, self._draw = state, draw

    def forward(self, *args: Any) -> torch.Tensor:
        return super().forward(*args) * (1 + 0.1 * self._draw(self.state))


def counted(state: Any) -> float:
    state["calls"] += 1
    return float(state["calls"])


def held(state: Any) -> float:
    state.calls += 1
    return float(state.calls)


def written(state: Any) -> float:
    state += 1
    return float(state[0])


STATES: dict[str, tuple[Any, Any]] = {
    "a generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda state: float(torch.rand((), generator=state)),
    ),
    "a counter": (Counter, counted),
    "a dictionary with a default": (lambda: defaultdict(int), counted),
    "an object": (lambda: types.SimpleNamespace(calls=0), held),
    "an array": (lambda: np.zeros(1), written),
    "Python's random numbers": (lambda: None, lambda _: random.random()),
    "numpy's random numbers": (lambda: None, lambda _: float(np.random.rand())),
    "torch's random numbers": (lambda: None, lambda _: float(torch.rand(()))),
}


@pytest.mark.parametrize("kind", STATES)
def test_trials_leave_a_models_state_alone(kind: str) -> None:
    make, draw = STATES[kind]

    def run(cached: bool) -> list[torch.Tensor]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        model = Stateful(make(), draw)
        if cached:
            apply_teacache_hook(model, NEVER)
        return loop(model)

    assert differing(run(cached=True), run(cached=False)) == []


@pytest.mark.parametrize("change", ["attribute", "buffer", "forward"])
def test_a_part_without_weights_may_change_at_any_time(change: str) -> None:
    class Rope(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = 1.0
            self.register_buffer("scale", torch.ones(1))

        def forward(self, c: torch.Tensor) -> torch.Tensor:
            scaled: torch.Tensor = c * self.theta * self.scale
            return scaled

    class Turning(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.rope = Rope()

        def embed(self, time: torch.Tensor, conditioning: torch.Tensor) -> torch.Tensor:
            return super().embed(time, self.rope(conditioning))

    def run(model: Turning) -> list[torch.Tensor]:
        outputs = []
        with torch.no_grad(), call_context(branch="only"):
            for step in range(10):
                if step == 5 and change == "attribute":
                    model.rope.theta = 2.0
                elif step == 5 and change == "buffer":
                    model.rope.scale.mul_(2)
                elif step == 5:
                    model.rope.forward = lambda c: 3 * c
                outputs.append(model(*at(step), COND))
        return outputs

    model = Turning()
    apply_teacache_hook(model, NEVER)
    assert differing(run(model), run(Turning())) == []


# ------------------------------------------------------------------------------------------------ arguments


class Extended(Plain):
    def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, extra: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden_states, timestep, encoder_hidden_states)


class Frozen(Mapping[str, Any]):
    def __init__(self, **items: Any) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Single:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __copy__(self) -> Any:
        raise TypeError("no copies")


class Pair(list[Any]):
    def __init__(self, one: Any, other: Any) -> None:
        super().__init__([one, other])


def circle() -> Any:
    nodes = [types.SimpleNamespace(value=float(index)) for index in range(4)]
    for node in nodes:
        node.others = nodes
    return nodes[0]


EXTRAS: dict[str, Any] = {
    "a mapping": lambda: Frozen(a=COND.clone(), b=1),
    "a view of a dictionary": lambda: types.MappingProxyType({"a": COND.clone()}),
    "what cannot be copied": lambda: Single(COND.clone()),
    "a list of its own kind": lambda: Pair(COND.clone(), 1),
    "a sparse tensor": lambda: COND.clone().to_sparse(),
    "a tensor without data": lambda: torch.empty(2, device="meta"),
    "objects in a circle": circle,
}


@pytest.mark.parametrize("kind", EXTRAS)
def test_arguments_of_any_kind_are_taken_as_the_bare_model_takes_them(kind: str) -> None:
    extra = EXTRAS[kind]()
    before = dict(vars(extra)) if hasattr(extra, "__dict__") else None

    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        with torch.no_grad(), call_context(branch="only"):
            return [model(*at(step), COND, extra) for step in range(6)]

    model = Extended()
    hook = apply_teacache_hook(model, NEVER)
    assert differing(run(model), run(Extended())) == []
    assert mask(hook) == "#" * 6
    assert before is None or all(vars(extra)[name] is value for name, value in before.items()), "nothing is replaced"


def test_times_of_numpy_are_times() -> None:
    model = Plain()
    model.embed = types.MethodType(  # type: ignore[method-assign]
        lambda self, t, c: (self.embed_t(torch.full((1, 1), float(t))) + self.embed_c(c))[:, None], model
    )
    hook = apply_teacache_hook(model, ALWAYS)
    with torch.no_grad(), call_context(branch="only"):
        for name in ("one", "two"):
            for step in range(6):
                model(at(step, name=name)[0], np.float32(1 - step / 6), COND)
    assert mask(hook) == "#.....", "the second run is one of its own"


def test_of_the_times_of_tokens_the_largest_counts() -> None:
    """Those of a frame that is given stand at zero."""
    model = Plain()
    model.embed = types.MethodType(  # type: ignore[method-assign]
        lambda self, t, c: (self.embed_t(t[:, 1:]) + self.embed_c(c))[:, None], model
    )
    hook = apply_teacache_hook(model, ALWAYS)
    with torch.no_grad(), call_context(branch="only"):
        for step in range(6):
            model(at(step)[0], torch.tensor([[0.0, 1 - step / 6]]), COND)
    assert mask(hook) == "#....."


# ------------------------------------------------------------------------------------------------ between blocks


def test_what_a_model_adds_in_place_between_blocks_counts_once() -> None:
    class Controlled(Plain):
        strength = 0.0

        def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x, temb)
                x += self.strength
            return x

    model, bare = Controlled(), Controlled()
    hook = apply_teacache_hook(model, ALWAYS)
    with torch.no_grad(), call_context(branch="only"):
        computed = model(*at(0), COND)
        assert torch.equal(computed, bare(*at(0), COND))
        skipped = model(*at(1), COND)
        embedded = bare.embed_x(at(1)[0]) - bare.embed_x(at(0)[0])
        expected = computed + torch.nn.functional.linear(embedded, bare.unembed.weight)
    assert mask(hook) == "#."
    torch.testing.assert_close(skipped, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", ["single_transformer_blocks.*to_q", "transformer_blocks.*to_q"])
def test_adapters_that_are_scaled_anywhere_end_a_history(where: str) -> None:
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    pipe.transformer.add_adapter(
        LoraConfig(r=2, target_modules=rf".*{where}", init_lora_weights=False), adapter_name="one"
    )
    cache: Any = make_cache_backend({"backend": "tea_cache", **ALWAYS})
    handle = cache.enable(pipe)

    def scale(pipe: Any, index: int, time: Any, given: Any) -> Any:
        if index == 4:
            pipe.transformer.set_adapters("one", 0.1)
        return given

    tiny.run(pipe, 10, callback_on_step_end=scale)
    masks = {branch.mask for branch in cache.stats().denoisers["transformer"].branches.values()}
    assert masks == {"#....#...."}
    handle.detach()
