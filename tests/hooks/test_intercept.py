"""Hooks of ours beside those of others: torch, accelerate, diffusers, and torch.compile."""

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
from samovar.hooks import HookRegistry, ModelHook, intercept


class Layer(torch.nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return [*x, "forward"]


class Ours(ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return ([*args[0], "ours"],), kwargs


class Counting(ModelHook):
    calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return args, kwargs


class FromDiffusers(diffusers_hooks.ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return ([*args[0], "diffusers"],), kwargs


class FromAccelerate(accelerate.hooks.ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return ([*args[0], "accelerate"],), kwargs


ATTACH: dict[str, Callable[[Layer], Any]] = {
    "ours": lambda m: HookRegistry.get_or_create(m).register_hook("ours", Ours()),
    "diffusers": lambda m: diffusers_hooks.HookRegistry.check_if_exists_or_initialize(m).register_hook(
        FromDiffusers(), "theirs"
    ),
    "accelerate": lambda m: accelerate.hooks.add_hook_to_module(m, FromAccelerate()),
}
REMOVE: dict[str, Callable[[Layer], Any]] = {
    "ours": lambda m: HookRegistry.get_or_create(m).remove_hook("ours"),
    "diffusers": lambda m: m._diffusers_hook.remove_hook("theirs"),
    "accelerate": lambda m: accelerate.hooks.remove_hook_from_module(m),
}


@pytest.mark.parametrize("library", ["diffusers", "accelerate"])
@pytest.mark.parametrize("attach_order", [0, 1])
@pytest.mark.parametrize("remove_order", [0, 1])
def test_hooks_of_others_go_on_working(library: str, attach_order: int, remove_order: int) -> None:
    names = ["ours", library]
    module = Layer()
    for name in names[:: 1 - 2 * attach_order]:
        ATTACH[name](module)
    assert sorted(module([])) == sorted([*names, "forward"])
    assert module([])[0] == "ours", "ours stands outside, whoever came first"
    for name in names[:: 1 - 2 * remove_order]:
        REMOVE[name](module)
        names_left = [other for other in names if other != name]
        expected = [*names_left, "forward"] if name == names[:: 1 - 2 * remove_order][0] else ["forward"]
        assert module([]) == expected
    assert type(module) is Layer


def test_all_three_in_every_order() -> None:
    for attach, remove in itertools.product(itertools.permutations(ATTACH), repeat=2):
        # accelerate and diffusers both save and restore `forward`: between them, the last to come must go first.
        others = [name for name in attach if name != "ours"]
        if [name for name in remove if name != "ours"] != others[::-1]:
            continue
        module, left = Layer(), set(attach)
        for name in attach:
            ATTACH[name](module)
        for name in remove:
            REMOVE[name](module)
            left.discard(name)
            assert sorted(module([])) == sorted([*left, "forward"]), (attach, remove)


def test_torch_hooks_run_inside_ours() -> None:
    module = Layer()
    ATTACH["ours"](module)
    before = module.register_forward_pre_hook(lambda m, args: ([*args[0], "torch"],))
    after = module.register_forward_hook(lambda m, args, output: [*output, "torch"])
    assert module([]) == ["ours", "torch", "forward", "torch"]
    before.remove()
    after.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(lambda m, args, output: [*output, "global"])
    assert module([]) == ["ours", "forward", "global"]
    everywhere.remove()
    assert module([]) == ["ours", "forward"]


def test_we_know_every_kind_of_hook_that_torch_runs_around_forward() -> None:
    """`call_bare` takes a short way when there are none: a new kind in torch must be known to it."""
    kinds = {name for name in vars(torch.nn.Module()) if name.endswith("_hooks") and "state_dict" not in name}
    assert kinds == {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
    of_all = set(torch.nn.modules.module._has_any_global_hook.__code__.co_names)
    marks = {"_global_forward_hooks_always_called", "_global_forward_hooks_with_kwargs"}  # Of some of the hooks.
    assert of_all - marks == {f"_global{kind}" for kind in kinds}
    known = {id(table) for table in intercept._GLOBAL_HOOKS}
    assert {id(getattr(torch.nn.modules.module, name)) for name in of_all - marks} == known


def test_a_class_with_its_own_call_keeps_it() -> None:
    class CountingCalls(Layer):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return super().__call__(*args, **kwargs)

    module = CountingCalls()
    ATTACH["ours"](module)
    assert module([]) == ["ours", "forward"]
    assert module.calls == 1


def test_another_swap_of_the_class_is_left_alone() -> None:
    """torch's parametrisations swap the class too. Ours goes without undoing theirs."""
    module = torch.nn.Linear(2, 2)
    registry = HookRegistry.get_or_create(module)

    class Doubling(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
            return output * 2

    class Zero(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(weight)

    registry.register_hook("double", Doubling())
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Zero())
    x = torch.ones(1, 2)
    assert torch.equal(module(x), module.bias[None] * 2)
    registry.remove_hook("double")
    assert torch.equal(module(x), module.bias[None])
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module(x), module.bias[None])


def test_a_lazy_module_keeps_its_hooks_when_it_changes_class() -> None:
    module = torch.nn.LazyLinear(3)
    hook = Counting()
    HookRegistry.get_or_create(module).register_hook("count", hook)
    for _ in range(2):
        module(torch.ones(1, 2))
    assert module.__class__ is torch.nn.Linear
    assert hook.calls == 2
    HookRegistry.get_or_create(module).reset()
    assert type(module) is torch.nn.Linear


def test_a_class_made_of_a_hooked_type_outlives_the_hooks() -> None:
    module = Layer()
    ATTACH["ours"](module)
    module.__class__ = type("Derived", (type(module),), {})
    assert module([]) == ["ours", "forward"]
    REMOVE["ours"](module)
    assert module([]) == module.forward([]) == ["forward"]
    assert type(module).__name__ == "Derived"


def test_the_type_equals_the_class() -> None:
    class Other(Layer):
        pass

    module, other = Layer(), Other()
    for each in (module, other):
        ATTACH["ours"](each)
    assert type(module) in (Other, Layer)
    assert Layer in (Other, type(module))
    assert type(module) in {Layer}
    assert {Layer: 1}[type(module)] == 1
    assert type(module) not in (Other, torch.nn.Module, type(other), "Layer")
    assert type("Derived", (type(module),), {}) not in (Layer, type(module))


def test_a_patched_class_is_seen_at_the_next_hooking(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patched(Layer):
        pass

    first = Patched()
    ATTACH["ours"](first)
    assert first([]) == ["ours", "forward"]
    monkeypatch.setattr(Patched, "forward", lambda self, x: [*x, "patched"])
    second = Patched()
    ATTACH["ours"](second)
    assert second([]) == ["ours", "patched"]


def test_a_method_that_is_replaced_on_the_class_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Patched(Layer):
        pass

    module = Patched()
    ATTACH["ours"](module)
    with monkeypatch.context() as patch:
        patch.setattr(Patched, "forward", lambda self, x: [*x, "patched"], raising=False)
        assert module([]) == module.forward([]) == ["ours", "patched"]
    assert module([]) == module.forward([]) == ["ours", "forward"]

    def call(self: Any, x: list[str]) -> list[str]:
        return [*torch.nn.Module.__call__(self, x), "called"]

    with monkeypatch.context() as patch:
        patch.setattr(Patched, "__call__", call)
        assert module([]) == ["ours", "forward", "called"]
    assert module([]) == ["ours", "forward"]
    plain = torch.nn.Module.__call__
    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "__call__", lambda self, x: [*plain(self, x), "anywhere"])
        assert module([]) == ["ours", "forward", "anywhere"]
    monkeypatch.setattr(Patched, "forward", lambda self, x: [*x, "patched"], raising=False)
    REMOVE["ours"](module)
    assert type(module) is Patched
    assert module([]) == ["patched"]


def test_what_stands_between_call_and_forward_is_kept() -> None:
    class Between(Layer):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return [*super()._call_impl(*args, **kwargs), "between"]

    module = Between()
    ATTACH["ours"](module)
    assert module([]) == ["ours", "forward", "between"]


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_wrapper_that_calls_the_original_twice_does_not_call_us_twice(ours_first: bool) -> None:
    class Twice(diffusers_hooks.ModelHook):
        def new_forward(self, module: torch.nn.Module, x: Any) -> Any:
            return self.fn_ref.original_forward(self.fn_ref.original_forward(x))

    module = Layer()
    if ours_first:
        ATTACH["ours"](module)
    diffusers_hooks.HookRegistry.check_if_exists_or_initialize(module).register_hook(Twice(), "twice")
    if not ours_first:
        ATTACH["ours"](module)
    assert module([]) == ["ours", "forward", "forward"]


def _first_block_cache(model: Any) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))


def _mag_cache(model: Any) -> None:
    model.enable_cache(MagCacheConfig(num_inference_steps=4, mag_ratios=torch.ones(4), threshold=0.0))


def _layer_skip(model: Any) -> None:
    apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn="transformer_blocks"))


def _group_offload(model: Any) -> None:
    apply_group_offloading(
        model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )


def _layerwise_casting(model: Any) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def _lora(model: Any) -> None:
    torch.manual_seed(0)
    model.add_adapter(peft.LoraConfig(target_modules=["to_q"], init_lora_weights=False))


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize(
    "theirs", [_first_block_cache, _mag_cache, _layer_skip, _group_offload, _layerwise_casting, _lora]
)
def test_real_features_of_others_on_a_hooked_model(theirs: Callable[[Any], None], ours_first: bool) -> None:
    """What diffusers and peft put on a model works as on a bare one, whoever came first, and after we are gone."""
    flux = next(case for case in zoo.load() if case.id == "FluxTransformer2DModel")
    alone, both = flux.build(), flux.build()
    theirs(alone)
    hooks = []

    def ours() -> None:
        for module in (both, *both.transformer_blocks):
            hooks.append(Counting())
            HookRegistry.get_or_create(module).register_hook("count", hooks[-1])

    for attach in (ours, lambda: theirs(both)) if ours_first else (lambda: theirs(both), ours):
        attach()

    def run(model: Any) -> Any:
        with torch.no_grad(), model.cache_context("cond"):
            return model(**flux.inputs(0), return_dict=False)[0]

    assert torch.equal(run(both), run(alone))
    assert hooks[0].calls == 1
    for module in (both, *both.transformer_blocks):
        HookRegistry.get_or_create(module).reset()
    assert torch.equal(run(both), run(alone))


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


class Shift(ModelHook):
    """Changes tensors and a counter, as a cache or an offload does."""

    calls = 0

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module: torch.nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output - 1


class Repeat(ModelHook):
    def new_forward(self, module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.call_original(module, self.call_original(module, x))


@pytest.fixture
def graphs() -> Iterator[list[Any]]:
    """The graphs that dynamo makes during a test, run as they are: no compiler is needed."""
    torch._dynamo.reset()
    found: list[Any] = []
    yield found
    torch._dynamo.reset()


def _backend(graphs: list[Any]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    return backend


def _hook_blocks(model: Model, make: Callable[[], ModelHook] = Shift) -> list[Any]:
    hooks = [make() for _ in model.blocks]
    for block, hook in zip(model.blocks, hooks, strict=True):
        HookRegistry.get_or_create(block).register_hook("hook", hook)
    return hooks


@pytest.mark.parametrize("compile_first", [False, True])
def test_a_compiled_block_stays_one_graph(graphs: list[Any], compile_first: bool) -> None:
    model, x = Model(), torch.randn(2, 4)
    plain = Model()
    plain.load_state_dict(model.state_dict())
    _hook_blocks(plain)
    if not compile_first:
        hooks = _hook_blocks(model)
    backend = _backend(graphs)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    if compile_first:
        hooks = _hook_blocks(model)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
    assert [hook.calls for hook in hooks] == [3, 3, 3]
    assert len(graphs) == 1, "all blocks share one graph, and no call after the first makes another"


@pytest.mark.parametrize("make", [Shift, Repeat])
def test_compiling_around_hooked_blocks_gives_the_same(graphs: list[Any], make: Callable[[], ModelHook]) -> None:
    model, x = Model(), torch.randn(2, 4)
    hooks = _hook_blocks(model, make)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, backend=_backend(graphs))
        assert torch.equal(compiled(x), expected)
        compiled(x)
        after_second = len(graphs), counters["frames"]["total"]
        for _ in range(3):
            assert torch.equal(compiled(x), expected)
    assert (len(graphs), counters["frames"]["total"]) == after_second, "nothing is looked at again"
    if make is Shift:
        assert [hook.calls for hook in hooks] == [6, 6, 6]


def test_compiling_a_hooked_model_gives_the_same(graphs: list[Any]) -> None:
    model, x = Model(), torch.randn(2, 4)
    hook = Shift()
    HookRegistry.get_or_create(model).register_hook("hook", hook)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(torch.compile(model, backend=_backend(graphs))(x), expected)
        model.compile(backend=_backend(graphs))
        assert torch.equal(model(x), expected)
    assert hook.calls == 3
    HookRegistry.get_or_create(model).reset()
    with torch.no_grad():
        assert torch.allclose(model(x), torch.compile(model, backend=_backend(graphs))(x))


def test_hooks_run_on_what_was_compiled_before_and_on_a_compiled_forward(graphs: list[Any]) -> None:
    model, x, hook = Block(), torch.randn(2, 4), Shift()
    compiled_before = torch.compile(model, backend=_backend(graphs))
    with torch.no_grad():
        bare = model(x)
        assert torch.equal(compiled_before(x), bare)
        HookRegistry.get_or_create(model).register_hook("hook", hook)
        expected, hook.calls = model(x), 0
        assert not torch.equal(expected, bare)
        assert torch.equal(compiled_before(x), expected), "compiled before it was hooked"
        assert torch.equal(torch.compile(model.forward, backend=_backend(graphs))(x), expected)
    assert hook.calls == 2


def test_a_whole_graph_around_hooked_blocks_is_refused_by_torch(graphs: list[Any]) -> None:
    model = Model()
    _hook_blocks(model)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="_call_outside_graph"):
        torch.compile(model, fullgraph=True, backend=_backend(graphs))(torch.randn(2, 4))
