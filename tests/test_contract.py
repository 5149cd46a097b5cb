"""The hook contract: names and behaviour that vllm-omni and diffusers have too, from `samovar` itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import samovar
import zoo
from pipelines import PIPELINES
from samovar import (
    BaseState,
    HookRegistry,
    ModelHook,
    ModuleDiscovery,
    OmniDiffusionConfig,
    SequenceParallelConfig,
    SequenceParallelInput,
    SequenceParallelOutput,
    StateManager,
    SupportsModuleOffload,
    TeaCacheConfig,
)
from samovar.hooks import HookOrder, call_context

NAMES = (
    "HookRegistry", "ModelHook", "StateManager", "BaseState", "TeaCacheConfig", "TeaCacheHook", "apply_teacache_hook",
    "CacheContext", "EXTRACTOR_REGISTRY", "register_extractor", "SequenceParallelConfig", "SequenceParallelInput",
    "SequenceParallelPartialInput", "SequenceParallelOutput", "SequenceParallelSplitHook", "SequenceParallelGatherHook",
    "apply_sequence_parallel", "remove_sequence_parallel", "enable_sequence_parallel_for_model",
    "disable_sequence_parallel_for_model", "SupportsModuleOffload", "ModuleDiscovery", "Omni", "AsyncOmni",
    "OmniDiffusionConfig", "OmniDiffusionSamplingParams", "DiffusionParallelConfig",
)  # fmt: skip


class Double(torch.nn.Module):
    def forward(self, x: int) -> int:
        return 2 * x


class Note(ModelHook):
    """Notes what it sees, and adds to the argument on the way in and to the output on the way out."""

    def __init__(self, name: str, seen: list[str], order: HookOrder = HookOrder.OTHER) -> None:
        self.name, self.seen, self.order = name, seen, order

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.seen.append(f"initialize {self.name}")
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append(f"pre {self.name}")
        return (args[0] + 1, *args[1:]), kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self.seen.append(f"post {self.name}")
        return output + 100

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        self.seen.append(f"reset {self.name}")
        return module


class Replace(ModelHook):
    def new_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return -self.call_original(module, *args, **kwargs)


def test_every_name_is_importable() -> None:
    assert [name for name in NAMES if not hasattr(samovar, name)] == []
    assert samovar.DiffusionParallelConfig is SequenceParallelConfig


def test_a_registry_dispatches_through_its_hooks_and_leaves_no_trace() -> None:
    module, seen = Double(), list[str]()
    before = type(module), dict(vars(module))
    registry = HookRegistry.get_or_create(module)
    assert HookRegistry.check_if_exists_or_initialize(module) is registry
    for name, order in (("b", HookOrder.OTHER), ("a", HookOrder.OTHER), ("z", HookOrder.SHARD)):
        registry.register_hook(name, Note(name, seen, order))
    assert seen == ["initialize b", "initialize a", "initialize z"]
    seen.clear()
    assert registry.dispatch(0) == module(0) == 2 * 3 + 300
    one_call = ["pre z", "pre a", "pre b", "post b", "post a", "post z"]
    assert seen == one_call * 2, "order classes come before names"
    registry.register_hook("override", Replace())
    assert module(0) == -6 + 300
    with pytest.raises(RuntimeError, match="'override' does so already"):
        registry.register_hook("second", Replace())
    assert module(0) == -6 + 300, "a refused hook changes nothing"
    assert registry.get_hook("second") is None
    hook = registry.get_hook("z")
    assert hook is not None
    hook.order = HookOrder.OTHER
    registry.update_sorted_hooks()
    seen.clear()
    module(0)
    assert seen[:3] == ["pre a", "pre b", "pre z"]
    registry.reset_hook("a")
    assert seen[-1] == "reset a"
    registry.remove_hook("override")
    assert module(0) == 306
    registry.reset()
    assert seen[-3:] == ["reset z", "reset b", "reset a"]
    assert (type(module), dict(vars(module))) == before
    assert module(1) == 2


def test_a_hook_may_answer_before_any_other_sees_the_call() -> None:
    class Answer(ModelHook):
        def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return "answer"

    module, seen = Double(), list[str]()
    registry = HookRegistry.get_or_create(module)
    registry.register_hook("note", Note("note", seen))
    registry.register_hook("answer", Answer())
    assert module(1) == "answer"
    assert seen == ["initialize note"]
    with pytest.raises(NotImplementedError):
        ModelHook().new_forward(module)


def test_states_belong_to_contexts() -> None:
    class Count(BaseState):
        def __init__(self) -> None:
            self.value = 0

        def reset(self) -> None:
            self.value = 0

    manager = StateManager(Count)
    for name in ("cond", "uncond", "cond"):
        manager.set_context(name)
        manager.get_state().value += 1
    manager.set_context("cond")
    first = manager.get_state()
    assert first.value == 2
    manager.reset()
    assert first.value == 0
    with call_context(branch="cond"):
        assert manager.get_state() is not first
    with pytest.raises(NotImplementedError):
        BaseState().reset()


def model_of(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    case = next(case for case in zoo.load() if case.id == name)
    return case.build(), case.inputs(0)


def test_teacache_is_applied_and_taken_off() -> None:
    model, inputs = model_of("FluxTransformer2DModel")
    before = type(model), set(vars(model))
    config = TeaCacheConfig(rel_l1_thresh=0.2, coefficients=[0.0, 0.0, 0.0, 1.0, 0.0])
    hook = samovar.apply_teacache_hook(model, config)
    assert isinstance(hook, samovar.TeaCacheHook)
    assert (hook.config, hook.rescale_func(0.5)) == (config, 0.5)
    assert isinstance(hook.state_manager, StateManager)
    assert hook.extractor_fn is None, "its blocks are found by structure"
    with torch.no_grad():
        model(**inputs)
    assert HookRegistry.get_or_create(model).get_hook("teacache") is hook
    HookRegistry.get_or_create(model).reset()
    assert (type(model), set(vars(model))) == before


def test_an_extractor_of_either_signature_is_chosen_by_the_type_of_the_transformer() -> None:
    def modulated(module: torch.nn.Module, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return hidden_states * temb.mean()

    def apart(module: torch.nn.Module, *args: Any, **kwargs: Any) -> samovar.CacheContext:
        raise AssertionError("nothing is called here")

    for extractor in (modulated, apart):
        samovar.register_extractor("Mine", extractor)
        try:
            assert samovar.EXTRACTOR_REGISTRY["Mine"] is extractor
            model, _ = model_of("FluxTransformer2DModel")
            hook = samovar.apply_teacache_hook(model, TeaCacheConfig(transformer_type="Mine"))
            assert hook.extractor_fn is extractor
            assert hook.config.transformer_type == "Mine"
        finally:
            del samovar.EXTRACTOR_REGISTRY["Mine"]


def test_a_sequence_is_split_by_a_plan_and_put_together_again() -> None:
    model, inputs = model_of("FluxTransformer2DModel")
    before, config = type(model), SequenceParallelConfig()
    plan = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_out": SequenceParallelOutput(1)}
    with torch.no_grad():
        bare = model(**inputs)[0]
        samovar.apply_sequence_parallel(model, config, plan)
        assert torch.equal(model(**inputs)[0], bare), "one rank has all of it"
        samovar.remove_sequence_parallel(model, plan)
        samovar.enable_sequence_parallel_for_model(model, config)
        samovar.disable_sequence_parallel_for_model(model)
        assert type(model) is before
        assert torch.equal(model(**inputs)[0], bare)


def test_modules_are_found_as_they_are_declared() -> None:
    class Declared:
        _dit_modules, _encoder_modules, _vae_modules = ("inner.net",), ("encoder",), ("decoder",)
        _resident_modules = ("extra",)

        def __init__(self) -> None:
            self.inner, self.inner.net = torch.nn.Module(), torch.nn.Linear(1, 1)
            self.encoder, self.decoder, self.extra = (torch.nn.Linear(1, 1) for _ in range(3))

    pipe = Declared()
    assert isinstance(pipe, SupportsModuleOffload)
    found = ModuleDiscovery.discover(pipe)
    assert [found.dits, found.encoders, found.vaes] == [[pipe.inner.net], [pipe.encoder], [pipe.decoder]]
    flux = PIPELINES["flux"].build(0)
    assert ModuleDiscovery.discover(flux).dits == [flux.transformer]


@pytest.mark.parametrize("variable", ["DIFFUSION_CACHE_ADAPTER", "DIFFUSION_CACHE_BACKEND"])
def test_settings_of_vllm_omni_are_understood(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"cache_config": {"rel_l1_thresh": 0.3}, "enable_cpu_offload": True, "dtype": "bfloat16", "device": "cpu"}
    for name in ("cache_backend", "cache_adapter"):
        config = OmniDiffusionConfig(model="emoji", **{name: "tea_cache"}, **copy.deepcopy(same))
        choice, offload = config.attach_config.cache, config.attach_config.offload
        assert choice is not None
        assert offload is not None
        assert (choice.settings, offload.mode) == (TeaCacheConfig(rel_l1_thresh=0.3), "model")
    with pytest.raises(ValueError, match="cache_adapter='auto' and cache_backend='tea_cache' contradict"):
        OmniDiffusionConfig(model="emoji", cache_adapter="auto", cache_backend="tea_cache")
    monkeypatch.setenv(variable, "tea_cache")
    choice = OmniDiffusionConfig(model="emoji", device="cpu").attach_config.cache
    assert choice is not None
    assert choice.backend == "tea_cache"
