"""Runs of pipelines that are not hooked, but share a hooked module: found on the call stack, and adopted."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxImg2ImgPipeline,
)

from pipelines import PIPELINES
from samovar.hooks import (
    BranchHook,
    CallContext,
    Handle,
    HookRegistry,
    ModelHook,
    PipelineHook,
    Run,
    call_context,
    current_context,
    hook_pipeline,
    pipeline_hooks,
    run_around,
)

FLUX = PIPELINES["flux"]
IMAGE = torch.linspace(0, 1, 3 * 16 * 24).reshape(1, 3, 16, 24)


class Seen(ModelHook):
    """Notes which run each call is part of."""

    def __init__(self, adopt: Callable[[Any], None] | None = None) -> None:
        self.adopt = adopt
        self.runs: list[Run | None] = []
        self.positions: list[int | None] = []
        self.contexts: list[CallContext] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        run = run_around(module, self.adopt)
        position = run.position() if run else None
        self.runs.append(run)
        self.positions.append(position.step if position else None)
        self.contexts.append(current_context())
        return args, kwargs


class Ends(PipelineHook):
    def __init__(self) -> None:
        self.events: list[tuple[str, Run]] = []

    def start_run(self, run: Run) -> None:
        self.events.append(("start", run))

    def end_run(self, run: Run) -> None:
        self.events.append(("end", run))


class Adopting:
    """What a feature does: it hooks the pipelines that are found, and detaches all of them together."""

    def __init__(self) -> None:
        self.hook = Ends()
        self.pipelines: list[Any] = []
        self.handles: list[Handle] = []

    def __call__(self, pipeline: Any) -> None:
        self.handles.append(hook_pipeline(pipeline, "ends", self.hook))
        self.pipelines.append(pipeline)

    def detach(self) -> None:
        for handle in self.handles:
            handle.detach()


class Own:
    """A pipeline of one's own, which is called as the real ones are."""

    def __init__(self, model: torch.nn.Module, inner: Any = None) -> None:
        self.model = model
        self.inner = inner
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def __call__(self, steps: int = 3, stop: int | None = None) -> None:
        self.scheduler.set_timesteps(steps)
        sample = torch.zeros(1, 2)
        for index, time in enumerate(self.scheduler.timesteps):
            if self.inner is not None:
                self.inner()
            output = self.model(sample)
            if index == stop:
                raise KeyboardInterrupt
            sample = self.scheduler.step(output, time, sample, return_dict=False)[0]


def watched(adopt: Callable[[Any], None] | None = None) -> tuple[torch.nn.Module, Seen]:
    model, seen = torch.nn.Linear(2, 2), Seen(adopt)
    HookRegistry.get_or_create(model).register_hook("seen", seen)
    return model, seen


def runs_of(seen: Seen) -> list[Run]:
    return list(dict.fromkeys(run for run in seen.runs if run is not None))


def test_a_call_of_a_pipeline_that_is_not_hooked_is_one_run() -> None:
    model, seen = watched()
    pipe = Own(model)
    for _ in range(3):
        pipe()
    runs = runs_of(seen)
    assert seen.runs == [run for run in runs for _ in range(3)]
    assert len({run.request for run in runs}) == len(runs) == 3
    assert seen.positions == [0, 1, 2] * 3
    assert runs[0].pipeline is pipe
    assert runs[0].total() == 3
    model(torch.zeros(1, 2))
    assert seen.runs[-1] is None
    assert pipeline_hooks(pipe) == {}


def test_a_hooked_pipeline_comes_first_and_one_without_the_module_last() -> None:
    model, seen = watched()
    pipe, other = Own(model), Own(torch.nn.Linear(2, 2))
    hook = Ends()
    hook_pipeline(pipe, "ends", hook)
    pipe()
    assert {id(run) for run in seen.runs} == {id(hook.events[0][1])}
    hook_pipeline(other, "ends", Ends())
    other.inner = lambda: model(torch.zeros(1, 2))
    seen.runs.clear()
    other()
    assert {run.pipeline for run in seen.runs} == {other}, "there is no other that it could be"


def test_a_pipeline_inside_another() -> None:
    model, seen = watched()
    outer = Own(model, inner=Own(model))
    outer(steps=2)
    inner_runs = [run for run in runs_of(seen) if run.pipeline is outer.inner]
    outer_runs = [run for run in runs_of(seen) if run.pipeline is outer]
    assert (len(inner_runs), len(outer_runs)) == (2, 1)


def test_a_pipeline_that_is_found_is_adopted() -> None:
    adopting = Adopting()
    model, seen = watched(adopting)
    pipe = Own(model)
    for _ in range(3):
        pipe()
    assert adopting.pipelines == [pipe]
    runs = runs_of(seen)
    assert [name for name, _ in adopting.hook.events] == ["start", "end"] * 3
    assert [run for _, run in adopting.hook.events] == [run for run in runs for _ in range(2)]
    adopting.detach()
    assert type(pipe) is Own
    assert vars(pipe).keys() == {"model", "inner", "scheduler"}


def test_a_hook_that_is_attached_during_a_call_sees_the_start_and_the_end_of_its_run() -> None:
    ends, handles = Ends(), []
    model, seen = watched(lambda pipeline: None)

    def inner() -> None:
        if not handles:
            handles.append(hook_pipeline(pipe, "ends", ends))

    pipe = Own(model, inner)
    pipe()
    pipe()
    runs = runs_of(seen)
    assert ends.events == [(name, run) for run in runs for name in ("start", "end")]
    assert len(runs) == 2


@pytest.mark.parametrize("after", ["the same", "another", "nothing"])
def test_a_run_that_is_given_up_ends_with_the_next_call_from_elsewhere(after: str) -> None:
    adopting = Adopting()
    model, seen = watched(adopting)
    pipe = Own(model)
    with pytest.raises(KeyboardInterrupt):
        pipe(stop=0)
    assert [name for name, _ in adopting.hook.events] == ["start"]
    if after == "nothing":
        model(torch.zeros(1, 2))
        assert [name for name, _ in adopting.hook.events] == ["start", "end"]
    else:
        (pipe if after == "the same" else Own(model))()
        assert [name for name, _ in adopting.hook.events][:3] == ["start", "end", "start"]
        assert len(runs_of(seen)) == 2
    assert adopting.hook.events[0][1] is adopting.hook.events[1][1]


def test_a_request_that_was_named_is_that_of_the_run() -> None:
    model, seen = watched()
    with call_context(request="mine"):
        Own(model)()
    assert {run.request for run in runs_of(seen)} == {"mine"}


def test_what_cannot_be_hooked_or_referred_to_does_no_harm() -> None:
    class Slotted:
        __slots__ = ("model", "scheduler")

        def __init__(self, model: Any) -> None:
            self.model, self.scheduler = model, None

        def __call__(self) -> None:
            self.model(torch.zeros(1, 2))

    class Unhookable(Own):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    adopting = Adopting()
    model, seen = watched(adopting)
    Slotted(model)()
    assert seen.runs == [None]
    pipe = Unhookable(model)
    pipe()
    pipe()
    assert len(runs_of(seen)) == 2
    assert adopting.pipelines == []


def test_nothing_is_kept_alive() -> None:
    model, _ = watched()
    pipe = Own(model)
    pipe()
    reference = weakref.ref(pipe)
    del pipe
    gc.collect()
    assert reference() is None
    held: list[weakref.ref[Any]] = []

    class Large(Own):
        def __call__(self, *args: Any) -> None:
            large = torch.zeros(100)
            held.append(weakref.ref(large))
            self.model(torch.zeros(1, 2))
            del large
            assert held[0]() is None, "a look at a frame must not keep what is in it"

    Large(model)()


def test_threads() -> None:
    model, seen = watched()
    threads = [threading.Thread(target=Own(model)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs_of(seen)) == 3
    assert len(seen.runs) == 9


# ------------------------------------------------------------------------------------------------ real pipelines


def auto_from_pipe(pipe: Any) -> Any:
    with warnings.catch_warnings():  # It imports all of diffusers' pipelines.
        warnings.simplefilter("ignore")
        from diffusers import AutoPipelineForImage2Image
    return AutoPipelineForImage2Image.from_pipe(pipe)


@pytest.mark.parametrize("is_attached_first", [True, False])
@pytest.mark.parametrize("make", [FluxImg2ImgPipeline.from_pipe, auto_from_pipe])
def test_from_pipe(make: Callable[[Any], Any], is_attached_first: bool) -> None:
    pipe = FLUX.build(0)
    other = None if is_attached_first else make(pipe)
    adopting, seen = Adopting(), Seen()
    adopting(pipe)
    seen.adopt = adopting
    registry = HookRegistry.get_or_create(pipe.transformer)
    branches = BranchHook()
    branches.adopt = adopting
    registry.register_hook("branches", branches)
    registry.register_hook("seen", seen)
    other = other or make(pipe)
    assert type(other) is FluxImg2ImgPipeline
    assert other.transformer is pipe.transformer
    assert pipeline_hooks(other) == {}
    call = {"prompt": "a cat", "image": IMAGE, "strength": 0.5, "height": 16, "width": 24, "max_sequence_length": 8}
    other.set_progress_bar_config(disable=True)
    for _ in range(2):
        other(num_inference_steps=6, output_type="latent", **call)
    FLUX.run(pipe, steps=3)
    assert [name for name, _ in adopting.hook.events] == ["start", "end"] * 3
    runs = runs_of(seen)
    assert [run.pipeline for run in runs] == [other, other, pipe]
    assert seen.positions[:6] == [3, 4, 5] * 2
    requests = list(dict.fromkeys(context.request for context in seen.contexts))
    assert requests == [run.request for run in runs], "calls belong to the request of their run"
    adopting.detach()
    assert type(pipe).__bases__ == FLUX.build(0).__class__.__bases__
    assert type(other) is FluxImg2ImgPipeline


def test_an_attached_pipeline_can_be_saved_and_taken_apart(tmp_path: Path) -> None:
    pipe = FLUX.build(0)
    expected = FLUX.run(pipe)
    hook_pipeline(pipe, "ends", Ends())
    HookRegistry.get_or_create(pipe.transformer).register_hook("branches", BranchHook())
    pipe.save_pretrained(tmp_path)
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    for other in (loaded, pipe.__class__(**pipe.components), type(pipe)(**pipe.components)):
        other.set_progress_bar_config(disable=True)
        assert pipeline_hooks(other) == {}
        assert torch.equal(FLUX.run(other), expected)
