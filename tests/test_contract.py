"""The hook contract: names and behaviour that vllm-omni and diffusers have too, from `samovar` itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import samovar
import zoo
from pipelines import PIPELINES, tiny_flux_pipeline
from samovar import (
    BaseState,
    CacheContext,
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
    assert issubclass(samovar.SequenceParallelSplitHook, ModelHook)
    assert issubclass(samovar.SequenceParallelGatherHook, ModelHook)
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


class Mine(torch.nn.Module):
    """A denoiser whose author takes its forward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.norm = torch.nn.LayerNorm(8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = self.enter(hidden_states) + text
        for block in self.blocks:
            x = x + 0.1 * block(self.norm(x) * timestep)
        return self.leave(x)


def apart(module: Any, hidden_states: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> CacheContext:
    x = module.enter(hidden_states) + text

    def run() -> tuple[torch.Tensor, ...]:
        y = x
        for block in module.blocks:
            y = y + 0.1 * block(module.norm(y) * timestep)
        return (y,)

    return CacheContext(module.norm(x) * timestep, x, None, timestep, run, module.leave)


def modulated(module: Any, hidden_states: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
    signal: torch.Tensor = module.transformer_blocks[0].norm1(hidden_states, emb=temb)[0]
    return signal


@torch.no_grad()
def loop(model: torch.nn.Module, inputs: dict[str, Any], time: str) -> list[torch.Tensor]:
    """Some steps of a sampler of one's own."""
    outputs = []
    for step in range(10):
        moved = inputs["hidden_states"] + 0.01 * step
        output = model(**inputs | {"hidden_states": moved, time: torch.tensor([1 - 0.05 * step])})
        outputs.append(output[0] if isinstance(output, tuple) else getattr(output, "sample", output))
    return outputs


@pytest.mark.parametrize("extractor", [apart, modulated], ids=["a CacheContext", "the modulated input alone"])
def test_an_extractor_of_either_signature_decides(extractor: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    if extractor is apart:
        model: torch.nn.Module = Mine()
        inputs: dict[str, Any] = {"hidden_states": torch.randn(1, 5, 4), "text": torch.ones(1, 1, 8)}
    else:
        model, inputs = model_of("FluxTransformer2DModel")
        inputs["return_dict"] = False
    exact = loop(model, inputs, "timestep")
    samovar.register_extractor("ByItsAuthor", extractor)
    try:
        assert samovar.EXTRACTOR_REGISTRY["ByItsAuthor"] is extractor
        config = TeaCacheConfig(rel_l1_thresh=1e9, transformer_type="ByItsAuthor")
        hook = samovar.apply_teacache_hook(model, config)
        assert (hook.extractor_fn, hook.config.transformer_type) == (extractor, "ByItsAuthor")
        outputs = loop(model, inputs, "timestep")
    finally:
        del samovar.EXTRACTOR_REGISTRY["ByItsAuthor"]
    (branch,) = hook.stats().branches.values()
    assert branch.skipped > branch.computed > 0
    for record, output, expected in zip(branch.steps, outputs, exact, strict=True):
        assert torch.equal(output, expected) or not record.computed
        torch.testing.assert_close(output, expected, rtol=0.2, atol=0.2)


def test_a_sequence_is_split_by_a_plan_and_put_together_again() -> None:
    model, inputs = model_of("FluxTransformer2DModel")
    before, config = type(model), SequenceParallelConfig()
    plan = {"": {"hidden_states": SequenceParallelInput(1)}, "proj_out": SequenceParallelOutput(1)}
    with torch.no_grad():
        bare = model(**inputs)[0]
        samovar.apply_sequence_parallel(model, config, plan)
        assert torch.equal(model(**inputs)[0], bare), "one rank has all of it"
        samovar.remove_sequence_parallel(model, plan)
        for declared in ("_sp_plan", "_cp_plan"):
            vars(model)[declared] = plan
            for config_or_none in (config, None):
                samovar.enable_sequence_parallel_for_model(model, config_or_none)
                assert torch.equal(model(**inputs)[0], bare)
                samovar.disable_sequence_parallel_for_model(model)
                assert type(model) is before
            del vars(model)[declared]


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


def test_omni_is_called_as_in_vllm_omni(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    params = samovar.OmniDiffusionSamplingParams(
        height=16, width=16, num_inference_steps=2, max_sequence_length=8, seed=3, true_cfg_scale=2.0
    )
    settings = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.2}, "enable_cpu_offload": True}
    with samovar.Omni(model=str(tmp_path), dtype="float32", device="cpu", progress=False, **settings) as omni:
        (result,) = omni.generate("a cat", params, negative_prompt="blurry")
        (same,) = omni.generate({"prompt": "a cat", "negative_prompt": "blurry"}, params)
        both = omni.generate([{"prompt": "a cat", "seed": 4}, "a dog"], sampling_params_list=[params, params])
        with pytest.raises(ValueError, match="There are 2 sampling_params for 3 prompts"):
            omni.generate(["a"] * 3, [params, params])
        with pytest.raises(ValueError, match="expected a mapping with the text as 'prompt'"):
            omni.generate({"negative_prompt": "blurry"})
    assert same.request_output[0].images[0].tobytes() == result.images[0].tobytes()
    assert result.images[0].size == (16, 16)
    assert [each.seeds for each in both] == [(4,), (3,)]
    with samovar.Omni(od_config=OmniDiffusionConfig(model=str(tmp_path), device="cpu", progress=False)) as omni:
        (plain,) = omni.generate("a cat", params, negative_prompt="blurry")
    assert plain.images[0].tobytes() == result.images[0].tobytes(), "two steps are too few to skip any"
