"""TeaCache on whole pipelines, one for each way in which a pipeline drives its denoiser."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from driving import (
    COND,
    INFINITE,
    UNGUARDED,
    Plain,
    at,
    cached,
    counted,
    differing,
    flux,
    hooks_of,
    masks,
    recorded,
    second,
    stepped,
    tensors_in,
)

import zoo
from pipelines import PIPELINES, TinyPipeline
from samovar.arch import find_anatomy
from samovar.cache import TeaCacheBackend, apply_teacache_hook
from samovar.hooks import call_context, pipeline_hooks

STEPS, FEW = 6, 5

every = pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)
SEPARATE = {name: tiny for name, tiny in PIPELINES.items() if tiny.cfg == "separate"}


def denoisers(tiny: TinyPipeline, pipe: Any) -> list[torch.nn.Module]:
    return [getattr(pipe, name) for name in tiny.denoisers]


def leftovers(tiny: TinyPipeline, pipe: Any) -> list[Any]:
    """What a run that is over has left behind, less zeros of one element."""
    hooks = hooks_of(tiny, pipe)
    states = [state for hook in hooks for state in hook.state_manager.states()]
    return states + [tensor for tensor in tensors_in(*hooks) if tensor.numel() > 1]


@every
def test_neutral_settings_give_the_bits_of_the_bare_pipeline(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    exact, before = tiny.run(pipe, 2), set(vars(pipe))
    for settings in ({"rel_l1_thresh": 0}, {"rel_l1_thresh": INFINITE, "first_steps": 2}):
        backend = cached(pipe, **settings)
        assert torch.equal(tiny.run(pipe, 2), exact)
        backend.handle.detach()
    assert torch.equal(tiny.run(pipe, 2), exact)
    assert type(pipe) is type(tiny.build(0))
    assert set(vars(pipe)) == before
    assert pipeline_hooks(pipe) == {}
    assert not any("samovar" in entry for model in denoisers(tiny, pipe) for m in model.modules() for entry in vars(m))


@every
def test_a_skipped_step_runs_no_block(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    backend = cached(pipe, rel_l1_thresh=INFINITE)
    tiny.run(pipe, FEW)
    blocks = [
        b for model in denoisers(tiny, pipe) for stack in find_anatomy(model).stacks for b in stack.modules(model)
    ]
    with counted(blocks) as calls:
        tiny.run(pipe, FEW)
    branches = 2 if tiny.cfg == "separate" else 1
    assert len(calls) == branches * len(blocks), "each block ran once for each branch"
    assert len(masks(backend.stats())) == branches * len(tiny.denoisers)
    assert all(set(mask[1:]) == {"."} for mask in masks(backend.stats()))


def alone(model: torch.nn.Module, calls: list[tuple[Any, Any]], mask: str) -> list[Any]:
    """What a model gives in these calls when nobody else uses it, computing at the same steps."""
    own = copy.deepcopy(model)
    apply_teacache_hook(own, {"schedule": mask})
    with torch.no_grad(), call_context(branch="only"):
        outputs = [own(*args, **kwargs) for args, kwargs in calls]
    return [output[0] if isinstance(output, tuple) else output for output in outputs]


@pytest.mark.parametrize("tiny", SEPARATE.values(), ids=SEPARATE)
def test_branches_never_share_a_state(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    backend = cached(pipe, rel_l1_thresh=0.3)
    for name, model in zip(tiny.denoisers, denoisers(tiny, pipe), strict=True):
        with recorded(model) as recorder:
            tiny.run(pipe, STEPS)
        branches = backend.stats().denoisers[name].branches
        assert len(branches) == 2
        for index, branch in enumerate(branches.values()):
            assert "." in branch.mask
            expected = alone(model, recorder.calls[index::2], branch.mask)
            assert differing(recorder.outputs[index::2], expected) == []
        skipped = [step for step, sign in enumerate(branch.mask) if sign == "."]
        cond, uncond = recorder.outputs[::2], recorder.outputs[1::2]
        assert not any(torch.equal(cond[step], uncond[step]) for step in skipped), "guidance is not lost"


def test_a_branch_for_some_of_the_steps_only() -> None:
    """Guidance by leaving layers out, in the second and third quarter of a run."""
    tiny = PIPELINES["sd3"]
    pipe = tiny.build(0)
    backend = cached(pipe, rel_l1_thresh=0.3)
    settings = {"skip_guidance_layers": [1], "skip_layer_guidance_start": 0.25, "skip_layer_guidance_stop": 0.75}
    with recorded(pipe.transformer) as recorder:
        tiny.run(pipe, STEPS, **settings)
    (stats,) = backend.stats().denoisers.values()
    is_partial = ["skip_layers" in kwargs for _, kwargs in recorder.calls]
    assert 0 < sum(is_partial) < STEPS
    for partial, branch in zip((False, True), stats.branches.values(), strict=True):
        own = [index for index, found in enumerate(is_partial) if found is partial]
        assert branch.mask[0] == "#"
        assert "." in branch.mask
        expected = alone(pipe.transformer, [recorder.calls[index] for index in own], branch.mask)
        assert differing([recorder.outputs[index] for index in own], expected) == []


# ------------------------------------------------------------------------------------------------ one run after another


class GaveUp(Exception):
    pass


def at_step(step: int, action: Callable[[Any], Any]) -> Callable[..., dict[str, Any]]:
    """A callback that does something when a step has ended."""

    def callback(pipe: Any, index: int, time: Any, given: dict[str, Any]) -> dict[str, Any]:
        result = action(given) if index == step else None
        return result if isinstance(result, dict) else given

    return callback


def give_up(error: type[BaseException]) -> Callable[[Any], None]:
    def action(_: Any) -> None:
        raise error

    return action


GIVEN_UP = [(PIPELINES["wan"], GaveUp), (flux, KeyboardInterrupt), (flux, GeneratorExit)]


@pytest.mark.parametrize(("tiny", "error"), GIVEN_UP, ids=[f"{tiny.name}-{e.__name__}" for tiny, e in GIVEN_UP])
def test_a_run_that_is_given_up_leaves_nothing(tiny: TinyPipeline, error: type[BaseException]) -> None:
    pipe = tiny.build(0)
    cached(pipe, rel_l1_thresh=0.3)
    expected = tiny.run(pipe, FEW, seed=1)
    with pytest.raises(error):
        tiny.run(pipe, FEW, seed=2, callback_on_step_end=at_step(3, give_up(error)))
    assert leftovers(tiny, pipe) == []
    assert torch.equal(tiny.run(pipe, FEW, seed=1), expected)
    assert leftovers(tiny, pipe) == []


@pytest.mark.parametrize("computed", [0, 1, 2])
def test_an_error_inside_of_a_block_leaves_nothing(computed: int) -> None:
    pipe, fresh = flux.build(0), flux.build(0)
    for found in (pipe, fresh):
        cached(found, rel_l1_thresh=0.3)
    expected = flux.run(fresh, FEW)
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 2 * computed:
            raise GaveUp

    handle = pipe.transformer.transformer_blocks[0].norm1.register_forward_pre_hook(fail)
    with pytest.raises(GaveUp):
        flux.run(pipe, FEW)
    handle.remove()
    assert leftovers(flux, pipe) == []
    assert not any(module._forward_pre_hooks for module in pipe.transformer.modules()), "no hook is left either"
    assert torch.equal(flux.run(pipe, FEW), expected)


CHANGES: dict[str, dict[str, Any]] = {
    "prompt": {"prompt": "an owl at sea"},
    "size": {"height": 32, "width": 16},
    "batch": {"num_images_per_prompt": 2},
    "steps": {"steps": 7},
    "the first again": {},
}


def test_a_pipeline_is_called_again_with_something_else() -> None:
    pipe = flux.build(0)
    cached(pipe, rel_l1_thresh=0.3)
    flux.run(pipe, FEW)
    for change, given in CHANGES.items():
        call, fresh = {"steps": FEW, **given}, flux.build(0)
        backend = cached(fresh, rel_l1_thresh=0.3)
        assert torch.equal(flux.run(pipe, **call), flux.run(fresh, **call)), change
        assert "." in "".join(masks(backend.stats())), change


@pytest.mark.parametrize("name", ["flux", "sd3", "z-image"])
def test_items_of_a_batch_do_not_pollute_each_other(name: str) -> None:
    tiny = PIPELINES[name]
    pipe = tiny.build(0)
    cached(pipe, schedule="##.#.")
    prompts, negatives = ["a cat", "an owl"], ["a dog", "a dog"]

    def run(items: slice) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)][items]
        call = {**tiny.settings, "prompt": prompts[items], "negative_prompt": negatives[items]}
        result: torch.Tensor = pipe(
            generator=generators, output_type="latent", num_inference_steps=FEW, return_dict=False, **call
        )[0]
        return result

    both = run(slice(0, 2))
    for index in range(2):
        (single,) = run(slice(index, index + 1))
        assert torch.allclose(both[index], single, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(both[0], both[1], rtol=1e-2, atol=1e-2)


# ------------------------------------------------------------------------------------------------ runs side by side


def test_a_backend_serves_pipelines_that_share_a_denoiser() -> None:
    one = flux.build(0)
    other = second(one)
    exact = flux.run(one, FEW)
    backend = TeaCacheBackend({**UNGUARDED, "rel_l1_thresh": 0.3})
    handle = backend.enable(one)
    handle_2 = backend.enable(other)
    expected = flux.run(one, FEW)
    assert torch.equal(flux.run(other, FEW), expected)
    handle.detach()
    assert torch.equal(flux.run(other, FEW), expected), "it stays on the other"
    handle_2.detach()
    assert torch.equal(flux.run(one, FEW), exact)
    assert torch.equal(flux.run(other, FEW), exact)


# ------------------------------------------------------------------------------------------------ what enters blocks


def mask_of(backend: TeaCacheBackend, branch: int = 0) -> str:
    return masks(backend.stats())[branch]


@pytest.mark.parametrize("settings", [{"rel_l1_thresh": 0.9}, {"schedule": "#....."}], ids=["signal", "schedule"])
@pytest.mark.parametrize("window", [(0.5, 1.0), (0.0, 0.5)], ids=["on", "off"])
def test_control_that_is_switched_is_never_stale(window: tuple[float, float], settings: dict[str, Any]) -> None:
    tiny = PIPELINES["flux-controlnet"]
    call = {"control_guidance_start": window[0], "control_guidance_end": window[1]}
    pipe = tiny.build(0)
    backend = cached(pipe, **settings)
    with recorded(pipe.transformer) as recorder:
        tiny.run(pipe, STEPS, **call)
    for branch in range(2):
        samples = [kwargs["controlnet_block_samples"] for _, kwargs in recorder.calls[branch::2]]
        is_on = [any(bool(sample.any()) for sample in given) for given in samples]
        switched = [step for step in range(1, STEPS) if is_on[step] != is_on[step - 1]]
        assert switched
        assert {mask_of(backend, branch)[step] for step in switched} == {"#"}
        assert "." in mask_of(backend, branch)


class Adapted(Plain):
    """Its blocks see something that is not in their input."""

    def forward(  # type: ignore[override]
        self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any, joint_attention_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        hints = joint_attention_kwargs.get("ip_hidden_states", [])
        self.hint = joint_attention_kwargs["scale"] * sum(hint.mean(dim=1, keepdim=True) for hint in hints)
        return super().forward(hidden_states, timestep, encoder_hidden_states)

    def run(self, x: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, temb) + self.hint
        return x


HINT = zoo.cond("hint", 1, 1, 8)
ADAPTERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "replaced": lambda given: given.update(ip_hidden_states=[-HINT]),
    "overwritten": lambda given: given["ip_hidden_states"][0].neg_(),
    "scaled": lambda given: given.update(scale=0.5),
    "more": lambda given: given["ip_hidden_states"].append(HINT),
    "none": lambda given: given.pop("ip_hidden_states"),
}


@pytest.mark.parametrize("settings", [{"rel_l1_thresh": 0.5}, {"schedule": "#......."}], ids=["signal", "schedule"])
@pytest.mark.parametrize("change", ADAPTERS)
def test_adapters_that_change_are_never_stale(change: str, settings: dict[str, Any]) -> None:
    """At every step the same sample and time, so that nothing else can make it compute."""

    @torch.no_grad()
    def run(model: torch.nn.Module) -> list[torch.Tensor]:
        given, outputs = {"scale": 1.0, "ip_hidden_states": [HINT.clone()]}, []
        with call_context(branch="only"), stepped(model, 8) as loop:
            for step in range(8):
                if step == 4:
                    ADAPTERS[change](given)
                outputs.append(loop.call(lambda: model(*at(0), COND, given)))
        return outputs

    model = Adapted()
    hook = apply_teacache_hook(model, {**UNGUARDED, **settings})
    found, exact = run(model), run(Adapted())
    assert hook.stats().branches["only"].mask == "#...#..."
    assert torch.equal(found[4], exact[4])
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------ offload by others


def blocks_in(pipe: Any) -> set[torch.nn.Module]:
    model = pipe.transformer
    return {part for block in (*model.transformer_blocks, *model.single_transformer_blocks) for part in block.modules()}


def with_accelerate(pipe: Any, moved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are nowhere between two calls of their module."""
    accelerate = pytest.importorskip("accelerate")
    real = accelerate.hooks.AlignDevicesHook.pre_forward

    def pre_forward(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        moved.append(module)
        return real(self, module, *args, **kwargs)

    monkeypatch.setattr(accelerate.hooks.AlignDevicesHook, "pre_forward", pre_forward)
    accelerate.cpu_offload(pipe.transformer, torch.device("cpu"))


def with_group_offload(pipe: Any, moved: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.hooks import group_offloading

    real = group_offloading.ModuleGroup.onload_

    def onload(self: Any) -> Any:
        moved.extend(self.modules)
        return real(self)

    monkeypatch.setattr(group_offloading.ModuleGroup, "onload_", onload)
    cpu = torch.device("cpu")
    pipe.transformer.enable_group_offload(cpu, cpu, offload_type="block_level", num_blocks_per_group=1)


@pytest.mark.parametrize("first", [True, False], ids=["below", "on top"])
@pytest.mark.parametrize("offload", [with_accelerate, with_group_offload])
def test_offload_of_others_changes_nothing_and_moves_nothing(
    offload: Callable[..., None], first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, pipe = flux.build(0), flux.build(0)
    expected = cached(plain, rel_l1_thresh=0.3)
    moved: list[Any] = []
    if first:
        offload(pipe, moved, monkeypatch)
    backend = cached(pipe, rel_l1_thresh=0.3)
    if not first:
        offload(pipe, moved, monkeypatch)
    by_step: list[int] = []

    def callback(_: Any, index: int, time: Any, given: Any) -> Any:
        by_step.append(len(blocks & set(moved)))
        moved.clear()
        return given

    blocks = blocks_in(pipe)
    for _ in range(2):
        by_step.clear()
        assert torch.equal(flux.run(pipe, FEW, callback_on_step_end=callback), flux.run(plain, FEW))
        mask = mask_of(backend)
        assert "." in mask
        assert [count == 0 for count in by_step] == [sign == "." for sign in mask]
        found, wanted = (b.stats().denoisers["transformer"] for b in (backend, expected))
        assert found.signal == wanted.signal
        assert found.branches == wanted.branches


# ------------------------------------------------------------------------------------------------ memory


def tensors_for_the_collector(work: Callable[[], object]) -> int:
    """How many tensors lie in cycles after some work, and are there until the collector comes."""
    gc.collect()
    gc.disable()
    try:
        work()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("settings", [{"rel_l1_thresh": 0.2}])
def test_no_tensor_of_a_step_waits_for_the_collector(settings: dict[str, Any]) -> None:
    """On a GPU it would come too late."""
    tiny = PIPELINES["flux"]
    pipe = tiny.build(0)
    backend = TeaCacheBackend(settings)
    handle = backend.enable(pipe)
    tiny.run(pipe, 8)
    few, many = (tensors_for_the_collector(lambda: tiny.run(pipe, steps)) for steps in (10, 20))  # noqa: B023
    assert few == many, "but for the twins of a run"
    handle.detach()
