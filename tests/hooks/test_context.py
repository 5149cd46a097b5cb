"""The request and the branch of a call, and a state for each pair of them."""

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
from samovar.hooks import BaseState, CallContext, HookRegistry, ModelHook, StateManager, call_context, current_context


class Count(BaseState):
    def __init__(self, start: int = 0) -> None:
        self.start = self.value = start

    def reset(self) -> None:
        self.value = self.start
        if self.start < 0:
            raise OSError("stuck")


class Watch(ModelHook):
    """Notes in which context each call ran."""

    def __init__(self) -> None:
        self.seen: list[CallContext] = []
        self.states = StateManager(Count)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append(current_context())
        self.states.get_state().value += 1
        return args, kwargs


def in_threads(count: int, call: Any) -> list[Any]:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(call())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_contexts_nest_end_when_the_block_raises_and_belong_to_a_thread() -> None:
    with call_context(request=1), call_context(branch="cond") as inner:
        assert inner == current_context() == CallContext(1, "cond")
        with pytest.raises(OSError, match="gone"), call_context(branch="uncond"):
            raise OSError("gone")
        with call_context(branch=None):
            assert current_context() == CallContext(1, None)
        assert in_threads(1, current_context) == [CallContext(None, None)]
        assert current_context() == CallContext(1, "cond")
    assert current_context() == CallContext(None, None)


@contextlib.contextmanager
def fails(self: torch.nn.Module, name: str) -> Iterator[None]:
    yield from range(1 // 0)


def test_diffusers_cache_context_names_our_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = next(case for case in zoo.load() if case.id == "FluxTransformer2DModel").build()
    registry = HookRegistry.get_or_create(model)
    registry.register_hook("watch", Watch())
    with call_context(request=1), model.cache_context("cond"):
        with pytest.raises(OSError, match="gone"), model.cache_context("uncond"):
            raise OSError(f"{current_context().branch} is gone")
        assert current_context() == CallContext(1, "cond")
        monkeypatch.setattr(type(model), "cache_context", fails)
        with pytest.raises(ZeroDivisionError), model.cache_context("uncond"):
            pass
        assert current_context() == CallContext(1, "cond")
        monkeypatch.undo()
    registry.reset()
    with model.cache_context("cond"):
        assert current_context().branch is None


@pytest.mark.parametrize("wrap", ["compile", "peft"])
def test_a_wrapped_model_passes_its_branch_on(wrap: str) -> None:
    case = next(case for case in zoo.load() if case.id == "FluxTransformer2DModel")
    model = case.build()
    if wrap == "compile":
        wrapper: Any = torch.compile(model, backend="eager")
    else:
        wrapper = peft.PeftModel(model, peft.LoraConfig(target_modules=["to_q"]))
    watch = Watch()
    HookRegistry.get_or_create(wrapper).register_hook("watch", watch)
    with wrapper.cache_context("cond"), torch.no_grad():
        wrapper(**case.inputs(0))
    assert watch.seen == [CallContext(None, "cond")]
    torch._dynamo.reset()


def test_states_are_kept_by_request_and_branch() -> None:
    manager = StateManager(Count, start=10)
    found = {CallContext(): manager.get_state()}
    for request in (1, 2):
        for branch in ("cond", "uncond", "third"):
            with call_context(request=request, branch=branch) as context:
                found[context] = manager.get_state()
                found[context].value += request
    assert len(set(map(id, found.values()))) == 7
    assert manager.states() == found
    manager.drop(1)
    assert set(manager.states()) == {CallContext(), *(CallContext(2, branch) for branch in ("cond", "uncond", "third"))}
    assert found[CallContext(1, "cond")].value == 10, "what is dropped is reset"
    manager.reset()
    assert manager.states() == {}
    assert {state.value for state in found.values()} == {10}


def test_states_do_not_fill_the_memory_and_one_that_is_stuck_keeps_no_other() -> None:
    manager = StateManager(Count)
    first = manager.get_state()
    first.value = 7
    for number in range(manager.max_states):
        with call_context(branch=str(number)):
            manager.get_state().start = -1
    assert len(manager.states()) == manager.max_states
    assert first.value == 0, "the one that was used longest ago was reset"
    states = list(manager.states().values())
    with pytest.raises(OSError, match="stuck"):
        manager.reset()
    assert {state.value for state in states} == {-1}
    assert manager.states() == {}
