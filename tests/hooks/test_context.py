"""Request and branch: known from the pipeline or from the conditioning, and a state for each."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import zoo
from pipelines import tiny_flux_pipeline
from samovar.hooks import (
    BaseState,
    BranchHook,
    CallContext,
    HookRegistry,
    ModelHook,
    StateManager,
    call_context,
    current_context,
    is_conditioning,
)


class Count(BaseState):
    def __init__(self, start: int = 0) -> None:
        self.start = self.value = start

    def reset(self) -> None:
        self.value = self.start


class Watch(ModelHook):
    """Notes in which context each call ran."""

    def __init__(self) -> None:
        self.seen: list[CallContext] = []
        self.states = StateManager(Count)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append(current_context())
        self.states.get_state().value += 1
        return args, kwargs


def flux() -> tuple[torch.nn.Module, dict[str, Any]]:
    case = next(case for case in zoo.load() if case.id == "FluxTransformer2DModel")
    return case.build(), case.inputs(0)


# ------------------------------------------------------------------------------------------------ contexts


def test_contexts_nest_and_end_when_the_block_raises() -> None:
    assert current_context() == CallContext(None, None)
    with call_context(request=1), call_context(branch="cond") as inner:
        assert inner == current_context() == CallContext(1, "cond")
        with pytest.raises(OSError, match="gone"), call_context(branch="uncond"):
            raise OSError("gone")
        assert current_context() == CallContext(1, "cond")
        with call_context(branch=None):
            assert current_context() == CallContext(1, None)
    assert current_context() == CallContext(None, None)


def test_threads_have_contexts_of_their_own() -> None:
    seen: list[CallContext] = []
    with call_context(request="main"):
        thread = threading.Thread(target=lambda: seen.append(current_context()))
        thread.start()
        thread.join()
    assert seen == [CallContext(None, None)]


def test_diffusers_cache_context_names_our_branch() -> None:
    model, _ = flux()
    watch = Watch()
    HookRegistry.get_or_create(model).register_hook("watch", watch)
    with model.cache_context("cond"):
        assert current_context().branch == "cond"
        inside: list[CallContext] = []
        with pytest.raises(ZeroDivisionError), model.cache_context("uncond"):
            inside.append(current_context()) or 1 / 0
        assert inside == [CallContext(None, "uncond")]
        assert current_context().branch == "cond"
    assert current_context().branch is None
    HookRegistry.get_or_create(model).reset()
    with model.cache_context("cond"):
        assert current_context().branch is None


def test_a_pipeline_that_names_its_branches_tells_us() -> None:
    pipe = tiny_flux_pipeline()
    outer, block = Watch(), Watch()
    HookRegistry.get_or_create(pipe.transformer).register_hook("watch", outer)
    HookRegistry.get_or_create(pipe.transformer.transformer_blocks[0]).register_hook("watch", block)
    call = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "latent", "max_sequence_length": 8}
    pipe("a cat", negative_prompt="a dog", true_cfg_scale=2.0, **call)
    expected = [CallContext(None, "cond"), CallContext(None, "uncond")] * 2
    assert outer.seen == block.seen == expected
    assert {key: state.value for key, state in block.states.states().items()} == dict.fromkeys(expected, 2)


# ------------------------------------------------------------------------------------------------ states


def test_states_are_kept_by_request_and_branch() -> None:
    manager = StateManager(Count, start=10)
    default = manager.get_state()
    assert manager.get_state() is default
    found = {}
    for request in (1, 2):
        for branch in ("cond", "uncond", "third"):
            with call_context(request=request, branch=branch):
                found[request, branch] = manager.get_state()
                found[request, branch].value += request
    assert len({id(state) for state in (*found.values(), default)}) == 7
    with call_context(request=1, branch="cond"):
        assert manager.get_state().value == 11
    manager.drop(1)
    assert found[1, "cond"].value == 10, "a dropped state was reset"
    assert set(manager.states()) == {CallContext(), *(CallContext(2, b) for b in ("cond", "uncond", "third"))}
    manager.reset()
    assert manager.states() == {}
    assert found[2, "cond"].value == 10


def test_a_branch_can_be_named_by_hand() -> None:
    manager = StateManager(Count)
    manager.set_context("cond")
    named = manager.get_state()
    with call_context(branch="cond"):
        assert manager.get_state() is named
    with call_context(branch="uncond"):
        assert manager.get_state() is named, "by hand wins"
    manager.set_context(None)
    assert manager.get_state() is not named
    manager.set_context("cond")
    manager.reset()
    assert manager.context == CallContext()


def test_a_state_must_say_how_it_is_reset() -> None:
    class Forgetful(BaseState):
        pass

    with pytest.raises(NotImplementedError, match="Forgetful must say how it is reset"):
        Forgetful().reset()


# ------------------------------------------------------------------------------------------------ branches


def test_what_counts_as_conditioning() -> None:
    yes = ("encoder_hidden_states", "pooled_projections", "cap_feats", "prompt_embeds", "text_embeds", "class_labels")
    no = ("hidden_states", "timestep", "img_ids", "guidance", "return_dict")
    assert [is_conditioning(name) for name in yes] == [True] * len(yes)
    assert [is_conditioning(name) for name in no] == [False] * len(no)


def test_conditioning_tensors_tell_branches_apart() -> None:
    model, inputs = flux()
    watch, branches = Watch(), BranchHook()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("watch", watch)
    registry.register_hook("branches", branches)
    others = [
        inputs | {"encoder_hidden_states": torch.randn(1, n, 12), "txt_ids": torch.zeros(n, 3)} for n in (6, 6, 4)
    ]
    with torch.no_grad():
        for _ in range(3):
            for conditioning in (inputs, *others):
                model(**conditioning | {"hidden_states": torch.randn_like(inputs["hidden_states"])})
    names = [context.branch for context in watch.seen]
    assert len(set(names)) == 4
    assert None not in names
    assert names == names[:4] * 3, "the same branch at every step, however the sample changes"


def test_a_named_branch_and_a_request_come_first() -> None:
    model, inputs = flux()
    watch = Watch()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("watch", watch)
    registry.register_hook("branches", BranchHook())
    with torch.no_grad():
        with model.cache_context("cond"):
            model(**inputs)
        for request in (1, 2):
            with call_context(request=request):
                model(**inputs)
    assert watch.seen[0] == CallContext(None, "cond")
    assert watch.seen[1].branch != watch.seen[2].branch, "equal tensors of two requests are two lines of calls"
    assert current_context() == CallContext()


def test_where_nothing_tells_the_branch_is_unknown_and_errors_leave_no_context() -> None:
    class Unconditional(torch.nn.Module):
        def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> CallContext:
            if hidden_states is None:
                raise ValueError("nothing to denoise")
            return current_context()

    model = Unconditional()
    HookRegistry.get_or_create(model).register_hook("branches", BranchHook())
    assert model(torch.zeros(1), torch.zeros(1)).branch is None
    with pytest.raises(ValueError, match="nothing to denoise"):
        model(None, None)
    assert current_context() == CallContext()


def test_a_new_tensor_is_never_mistaken_for_an_old_one_and_branches_are_few() -> None:
    class Plain(torch.nn.Module):
        def forward(self, hidden_states: int, encoder_hidden_states: Any) -> str | None:
            return current_context().branch

    model, hook = Plain(), BranchHook()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("branches", hook)
    # Each tensor is given up at once: its memory would be used again for the next if nobody held it.
    names = [model(0, {"text": [torch.full((64,), float(i))]}) for i in range(100)]
    assert len(set(names)) == 100
    assert len(hook._branches) == hook.most_branches
    kept = torch.zeros(3)
    held = weakref.ref(kept)
    first = model(0, kept)
    kept.add_(1)
    assert model(0, kept) != first, "changed in place: other conditioning"
    del kept
    registry.reset_hook("branches")
    gc.collect()
    assert held() is None
