"""Request and branch: known from the pipeline or from the conditioning, and a state for each."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import peft
import pytest
import torch
import torch._dynamo

import zoo
from pipelines import tiny_flux_pipeline
from samovar.hooks import (
    BaseState,
    CallContext,
    HookRegistry,
    ModelHook,
    StateManager,
    call_context,
    current_context,
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


def test_a_cache_context_that_fails_leaves_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def fails(self: torch.nn.Module, name: str) -> Iterator[None]:
        yield from range(1 // 0)

    model, _ = flux()
    monkeypatch.setattr(type(model), "cache_context", fails)
    HookRegistry.get_or_create(model).register_hook("watch", Watch())
    with pytest.raises(ZeroDivisionError), model.cache_context("cond"):
        pass
    assert current_context().branch is None


@pytest.mark.parametrize("wrap", ["compile", "peft"])
def test_a_wrapped_model_passes_its_branch_on(wrap: str) -> None:
    model, inputs = flux()
    if wrap == "compile":
        wrapper: Any = torch.compile(model, backend="eager")
    else:
        wrapper = peft.PeftModel(model, peft.LoraConfig(target_modules=["to_q"]))
    watch = Watch()
    HookRegistry.get_or_create(wrapper).register_hook("watch", watch)
    with wrapper.cache_context("cond"), torch.no_grad():
        wrapper(**inputs)
    assert watch.seen == [CallContext(None, "cond")]
    torch._dynamo.reset()


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

    with pytest.raises(NotImplementedError, match="Forgetful must define reset"):
        Forgetful().reset()


def test_threads_get_one_state_for_one_context() -> None:
    manager, gate, found = StateManager(Count), threading.Barrier(8), []

    def ask() -> None:
        gate.wait(timeout=20)
        found.append(manager.get_state())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(state) for state in found}) == 1


def test_states_do_not_fill_the_memory() -> None:
    manager = StateManager(Count)
    with call_context(branch="first"):
        first = manager.get_state()
        first.value = 7
    for number in range(manager.most_states):
        with call_context(branch=str(number)):
            manager.get_state()
    assert len(manager.states()) == manager.most_states
    assert first.value == 0, "the one that was used longest ago was reset"


def test_a_state_that_cannot_be_reset_keeps_none_of_the_others() -> None:
    class Stubborn(Count):
        def reset(self) -> None:
            super().reset()
            if self.start == 0:
                raise OSError("stuck")

    manager = StateManager(Stubborn)
    states = []
    for branch in "abc":
        with call_context(branch=branch):
            states.append(manager.get_state())
            states[-1].value = 5
    with pytest.raises(OSError, match="stuck"):
        manager.reset()
    assert [state.value for state in states] == [0, 0, 0]
    assert manager.states() == {}
