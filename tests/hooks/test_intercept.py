"""Hooks of ours beside those of others: torch, accelerate, diffusers, peft and torch.compile."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.hooks
import diffusers.hooks.hooks as diffusers_hooks
import peft
import pytest
import torch
import torch._dynamo
from diffusers import FirstBlockCacheConfig, LayerSkipConfig, MagCacheConfig, apply_layer_skip
from diffusers.hooks import apply_group_offloading
from torch._dynamo.utils import counters

import zoo
from samovar.core.interop import global_hooks
from samovar.hooks import HookRegistry, ModelHook


class Layer(torch.nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return [*x, "forward"]


class Marking:
    """The same hook for each library."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return ([*args[0], type(self).__name__],), kwargs


class Ours(Marking, ModelHook): ...


class Theirs(Marking, diffusers_hooks.ModelHook): ...


class Accelerate(Marking, accelerate.hooks.ModelHook): ...


ATTACH: dict[str, Callable[[Any], Any]] = {
    "Ours": lambda m: HookRegistry.get_or_create(m).register_hook("ours", Ours()),
    "Theirs": lambda m: diffusers_hooks.HookRegistry.check_if_exists_or_initialize(m).register_hook(Theirs(), "theirs"),
    "Accelerate": lambda m: accelerate.hooks.add_hook_to_module(m, Accelerate()),
}
REMOVE: dict[str, Callable[[Any], Any]] = {
    "Ours": lambda m: HookRegistry.get_or_create(m).remove_hook("ours"),
    "Theirs": lambda m: m._diffusers_hook.remove_hook("theirs"),
    "Accelerate": lambda m: accelerate.hooks.remove_hook_from_module(m),
}


def ours_on(module: Any) -> Any:
    ATTACH["Ours"](module)
    return module


# ------------------------------------------------------------------------------------------------ other libraries


def test_hooks_of_three_libraries_come_and_go_in_any_order() -> None:
    for attach, remove in itertools.product(itertools.permutations(ATTACH), repeat=2):
        # accelerate and diffusers both save and restore `forward`: between them, the last to come must go first.
        if [name for name in remove if name != "Ours"] != [name for name in attach if name != "Ours"][::-1]:
            continue
        module, left = Layer(), set(attach)
        for name in attach:
            ATTACH[name](module)
        assert module([])[0] == "Ours", "outside of others, whoever came first"
        for name in remove:
            REMOVE[name](module)
            left.discard(name)
            assert sorted(module([])) == sorted([*left, "forward"]), (attach, remove)
        assert type(module) is Layer


def test_we_know_every_kind_of_hook_that_torch_runs_around_forward() -> None:
    """Without any of them a call takes a short way: a new kind in torch must be known."""
    kinds = {name for name in vars(torch.nn.Module()) if name.endswith("_hooks") and "state_dict" not in name}
    assert kinds == {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    of_all = set(torch.nn.modules.module._has_any_global_hook.__code__.co_names)
    marks = {"_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"}  # Of some of the hooks.
    tables = [id(getattr(torch.nn.modules.module, name)) for name in of_all - marks]
    assert sorted(tables) == sorted(map(id, global_hooks()))


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_wrapper_that_calls_the_original_twice_does_not_call_us_twice(ours_first: bool) -> None:
    class Twice(diffusers_hooks.ModelHook):
        def new_forward(self, module: torch.nn.Module, x: Any) -> Any:
            return self.fn_ref.original_forward(self.fn_ref.original_forward(x))

    def theirs(module: Any) -> None:
        diffusers_hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(Twice(), "twice")

    module = Layer()
    for attach in (ATTACH["Ours"], theirs)[:: 1 if ours_first else -1]:
        attach(module)
    assert module([]) == ["Ours", "forward", "forward"]


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return args, kwargs


def lora(model: Any) -> None:
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False))


CPU = torch.device("cpu")
FEATURES: dict[str, Callable[[Any], Any]] = {
    "first block cache": lambda m: m.enable_cache(FirstBlockCacheConfig(threshold=0.0)),
    "mag cache": lambda m: m.enable_cache(
        MagCacheConfig(num_inference_steps=4, mag_ratios=torch.ones(4), threshold=0.0)
    ),
    "layer skip": lambda m: apply_layer_skip(m, LayerSkipConfig(indices=[0], fqn="transformer_blocks")),
    "group offload": lambda m: apply_group_offloading(
        m, onload_device=CPU, offload_device=CPU, offload_type="leaf_level"
    ),
    "layerwise casting": lambda m: m.enable_layerwise_casting(
        storage_dtype=torch.bfloat16, compute_dtype=torch.float32
    ),
    "lora": lora,
}


@pytest.mark.parametrize("theirs", FEATURES.values(), ids=FEATURES)
def test_real_features_of_others_on_a_hooked_model(theirs: Callable[[Any], None]) -> None:
    """What diffusers and peft put on a model works as on a bare one, whoever came first, and after we are gone."""
    flux = next(case for case in zoo.load() if case.id == "FluxTransformer2DModel")

    def run(model: Any) -> Any:
        with torch.no_grad(), model.cache_context("cond"):
            return model(**flux.inputs(0), return_dict=False)[0]

    def ours(model: Any) -> None:
        for module in (model, *model.transformer_blocks):
            HookRegistry.get_or_create(module).register_hook("count", hook := Counting())
            hooks.append(hook)

    alone = flux.build()
    theirs(alone)
    expected = run(alone)
    for order in ((ours, theirs), (theirs, ours)):
        hooks: list[Counting] = []
        both = flux.build()
        for attach in order:
            attach(both)
        assert torch.equal(run(both), expected)
        assert hooks[0].calls == 1
        for module in (both, *both.transformer_blocks):
            HookRegistry.get_or_create(module).reset()
        assert torch.equal(run(both), run(alone))


# ------------------------------------------------------------------------------------------------ classes


def test_a_method_that_others_replace_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patched(Layer): ...

    def wrapping(name: str, mark: str) -> Callable[..., Any]:
        plain = getattr(torch.nn.Module, name)
        return lambda self, x: [*plain(self, x), mark]

    module, hooked = ours_on(Patched()), ["Ours", "forward"]
    for cls, name, function, expected in (
        (Patched, "forward", lambda self, x: [*x, "patched"], ["Ours", "patched"]),
        (Patched, "__call__", wrapping("__call__", "called"), [*hooked, "called"]),
        (torch.nn.Module, "__call__", wrapping("__call__", "anywhere"), [*hooked, "anywhere"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(cls, name, function, raising=False)
            assert module([]) == module.forward([]) == ours_on(Patched())([]) == expected
        assert module([]) == hooked

    class Between(Layer):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return [*super()._call_impl(*args, **kwargs), "between"]

    assert ours_on(Between())([]) == [*hooked, "between"]


def test_another_swap_of_the_class_is_left_alone() -> None:
    """torch's parametrisations and lazy modules swap the class too. Ours goes without undoing theirs."""

    class Zero(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(weight)

    module, lazy, x = torch.nn.Linear(2, 2), torch.nn.LazyLinear(3), torch.ones(1, 2)
    counts = [Counting(), Counting()]
    for one, hook in zip((module, lazy), counts, strict=True):
        HookRegistry.get_or_create(one).register_hook("count", hook)
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Zero())
    assert torch.equal(module(x), module.bias[None])
    HookRegistry.get_or_create(module).reset()
    assert torch.equal(module(x), module.bias[None])
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    lazy(x), lazy(x)
    assert lazy.__class__ is torch.nn.Linear
    assert [hook.calls for hook in counts] == [1, 2]
    HookRegistry.get_or_create(lazy).reset()
    assert type(lazy) is type(module) is torch.nn.Linear


# ------------------------------------------------------------------------------------------------ torch.compile


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x)) + x


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * 2
        return x


class Shift(Counting):
    """Changes tensors and a counter, as a cache or an offload does."""

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return super().pre_forward(module, args[0] + 1, *args[1:], **kwargs)

    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output - 1


class Repeat(ModelHook):
    def new_forward(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.call_original(module, self.call_original(module, x))


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that dynamo makes during a test; `keep` runs them as they are, so that no compiler is needed."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield []
    torch._dynamo.reset()


def keep(graphs: list[Any]) -> Callable[..., Any]:
    return lambda graph, inputs: graphs.append(graph) or graph


def hook_blocks(model: Model, make: Callable[[], ModelHook] = Shift) -> list[Any]:
    hooks = [make() for _ in model.blocks]
    for block, hook in zip(model.blocks, hooks, strict=True):
        HookRegistry.get_or_create(block).register_hook("hook", hook)
    return hooks


@pytest.mark.parametrize("compile_first", [False, True])
def test_a_compiled_block_stays_one_graph(graphs: list[Any], compile_first: bool) -> None:
    model, plain, x = Model(), Model(), torch.randn(2, 4)
    plain.load_state_dict(model.state_dict())
    hook_blocks(plain)
    hooks = [] if compile_first else hook_blocks(model)
    backend = keep(graphs)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    hooks = hooks or hook_blocks(model)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    assert [hook.calls for hook in hooks] == [3, 3, 3]
    assert len(graphs) == 1, "all blocks share one graph, and no call after the first makes another"


@pytest.mark.parametrize("make", [Shift, Repeat])
def test_compiling_around_hooked_blocks_gives_the_same(graphs: list[Any], make: Callable[[], ModelHook]) -> None:
    model, x = Model(), torch.randn(2, 4)
    hooks = hook_blocks(model, make)
    expected = model(x)
    compiled = torch.compile(model, backend=keep(graphs))
    assert torch.equal(compiled(x), expected)
    compiled(x)
    after_second = len(graphs), counters["frames"]["total"]
    assert torch.equal(compiled(x), expected)
    assert (len(graphs), counters["frames"]["total"]) == after_second, "nothing is looked at again"
    assert make is Repeat or [hook.calls for hook in hooks] == [4, 4, 4]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_outside_graph"):
        torch.compile(model, fullgraph=True, backend=keep(graphs))(x)


def test_hooks_run_however_and_whenever_the_model_is_compiled(graphs: list[Any]) -> None:
    model, x, hook = Model(), torch.randn(2, 4), Shift()
    before = torch.compile(model, backend=keep(graphs))
    bare = model(x)
    assert torch.equal(before(x), bare)
    HookRegistry.get_or_create(model).register_hook("hook", hook)
    expected = model(x)
    assert not torch.equal(expected, bare)
    assert torch.equal(before(x), expected), "compiled before it was hooked"
    assert torch.equal(torch.compile(model, backend=keep(graphs))(x), expected)
    assert torch.equal(torch.compile(model.forward, backend=keep(graphs))(x), expected)
    model.compile(backend=keep(graphs))
    assert torch.equal(model(x), expected)
    assert hook.calls == 5
    HookRegistry.get_or_create(model).reset()
    assert torch.equal(model(x), bare)
