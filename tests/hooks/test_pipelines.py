"""A hooked pipeline knows when a run begins and ends and where it is, and is otherwise what it was."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    FluxPipeline,
    HeunDiscreteScheduler,
    UniPCMultistepScheduler,
)

import zoo
from pipelines import PIPELINES
from samovar.core.errors import SettingError
from samovar.hooks import (
    HookRegistry,
    ModelHook,
    PipelineHook,
    Position,
    Run,
    call_context,
    current_context,
    current_run,
    hook_pipeline,
    pipeline_hooks,
    running,
)

FLUX = PIPELINES["flux"]


class Watch(PipelineHook):
    """Notes which runs begin and end."""

    def __init__(self, name: str = "", events: list[tuple[str, Any]] | None = None) -> None:
        self.name = name
        self.events: list[tuple[str, Any]] = [] if events is None else events

    def start_run(self, run: Run) -> None:
        self.events.append((f"start {self.name}".strip(), run))

    def end_run(self, run: Run) -> None:
        self.events.append((f"end {self.name}".strip(), run))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


class Own:
    """A pipeline of one's own."""

    def __init__(self, body: Callable[[], Any] = lambda: None) -> None:
        self.body = body

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


def footprint(pipe: Any) -> tuple[type, dict[str, int]]:
    return type(pipe), {name: id(value) for name, value in vars(pipe).items()}


@pytest.fixture(scope="module")
def flux() -> Any:
    return FLUX.build(0)


@pytest.fixture
def hooked(flux: Any) -> Iterator[tuple[Any, Watch]]:
    """A real pipeline with a hook, which comes off again whatever the test does."""
    watch, before = Watch(), footprint(flux)
    with hook_pipeline(flux, "watch", watch):
        yield flux, watch
    assert footprint(flux)[0] is before[0]
    assert set(footprint(flux)[1]) - set(before[1]) <= {"_guidance_scale", "_joint_attention_kwargs", "_num_timesteps",
        "_current_timestep", "_interrupt"}, "what diffusers itself writes in a call"  # fmt: skip


# ------------------------------------------------------------------------------------------------ on and off


def test_hooking_and_unhooking_leave_no_trace(flux: Any) -> None:
    bare = FLUX.run(flux, steps=2)
    before = footprint(flux)
    one = hook_pipeline(flux, "one", Watch())
    two = hook_pipeline(flux, "two", Watch())
    assert list(pipeline_hooks(flux)) == ["one", "two"]
    one.detach()
    assert list(pipeline_hooks(flux)) == ["two"]
    assert type(flux) is not FluxPipeline, "still hooked"
    two.detach()
    assert footprint(flux) == before
    assert type(flux) is FluxPipeline
    assert pipeline_hooks(flux) == {}
    two.detach()
    assert footprint(flux) == before
    assert torch.equal(FLUX.run(flux, steps=2), bare)


def test_a_name_that_is_taken_is_refused_and_the_first_stays(hooked: tuple[Any, Watch]) -> None:
    pipe, watch = hooked
    before = footprint(pipe)
    with pytest.raises(SettingError, match="FluxPipeline has a pipeline hook 'watch' already"):
        hook_pipeline(pipe, "watch", Watch())
    assert footprint(pipe) == before
    assert pipeline_hooks(pipe) == {"watch": watch}


def test_a_hooked_pipeline_is_still_what_it_is(hooked: tuple[Any, Watch]) -> None:
    pipe, _ = hooked
    assert isinstance(pipe, FluxPipeline)
    assert type(pipe).__name__ == pipe.__class__.__name__ == "FluxPipeline"
    assert type(pipe).__module__ == FluxPipeline.__module__
    assert type(pipe).__qualname__ == FluxPipeline.__qualname__
    assert type(pipe).__doc__ == FluxPipeline.__doc__
    assert pipe.device == pipe._execution_device == torch.device("cpu")
    assert set(pipe.components) == {"vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer",
        "scheduler", "image_encoder", "feature_extractor"}  # fmt: skip
    assert pipe.to("cpu") is pipe


def test_two_pipelines_of_one_class(flux: Any) -> None:
    other, watches = FLUX.build(1), [Watch(), Watch()]
    bare, before = FLUX.run(other, steps=1), footprint(other)
    handle = hook_pipeline(flux, "watch", watches[0])
    assert footprint(other) == before, "the other one is not hooked"
    FLUX.run(other, steps=1)
    assert not watches[0].events
    other_handle = hook_pipeline(other, "watch", watches[1])
    FLUX.run(other, steps=1)
    assert [watch.names for watch in watches] == [[], ["start", "end"]]
    handle.detach()
    FLUX.run(other, steps=1)
    assert len(watches[1].events) == 4, "still hooked"
    other_handle.detach()
    assert torch.equal(FLUX.run(other, steps=1), bare)
    assert type(other) is type(flux) is FluxPipeline


def test_saving_a_hooked_pipeline_saves_a_bare_one(hooked: tuple[Any, Watch], tmp_path: Path) -> None:
    pipe, _ = hooked
    pipe.save_pretrained(tmp_path)
    read = FluxPipeline.from_pretrained(tmp_path)
    read.set_progress_bar_config(disable=True)
    assert type(read) is FluxPipeline
    assert "samovar" not in (tmp_path / "model_index.json").read_text()
    assert torch.equal(FLUX.run(zoo.as_built(read), steps=1), FLUX.run(pipe, steps=1))


class Locked(Watch):
    """A hook with a part that cannot be copied, as hooks have."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize("make", [Watch, Locked])
@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_are_bare(way: str, make: type[Watch]) -> None:
    pipe = Settled()
    hook_pipeline(pipe, "watch", make())
    other: Any = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": _pickled, "torch.save": _saved}[way](pipe)
    assert type(other) is Settled
    assert vars(other) == {"steps": 3}
    assert list(pipeline_hooks(pipe)) == ["watch"]
    assert other() == pipe() == 3


class Settled:
    """A pipeline that can be pickled."""

    def __init__(self) -> None:
        self.steps = 3

    def __call__(self) -> int:
        return self.steps


def _pickled(pipe: Any) -> Any:
    return pickle.loads(pickle.dumps(pipe))


def _saved(pipe: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(pipe, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def test_a_deep_copy_of_a_real_pipeline_runs_and_is_bare(hooked: tuple[Any, Watch]) -> None:
    pipe, watch = hooked
    other = copy.deepcopy(pipe)
    assert type(other) is FluxPipeline
    assert torch.equal(FLUX.run(other, steps=1), FLUX.run(pipe, steps=1))
    assert watch.names == ["start", "end"], "of the pipeline itself alone"


@pytest.mark.parametrize("attribute", ["device", "_execution_device"])
def test_what_a_pipeline_says_of_its_device_itself_stays(attribute: str) -> None:
    """Pipelines of other libraries keep it as a plain attribute, and change it."""
    pipe = Own()
    setattr(pipe, attribute, "cuda:3")
    handle = hook_pipeline(pipe, "watch", Watch())
    assert getattr(pipe, attribute) == "cuda:3"
    setattr(pipe, attribute, "cuda:4")
    assert getattr(pipe, attribute) == "cuda:4"
    handle.detach()
    assert getattr(pipe, attribute) == "cuda:4"


def test_a_pipeline_without_a_device_has_none_when_hooked() -> None:
    pipe = Own()
    hook_pipeline(pipe, "watch", Watch())
    assert not hasattr(pipe, "device")
    assert not hasattr(pipe, "_execution_device")


def test_a_hook_says_where_the_pipeline_computes(flux: Any) -> None:
    class Elsewhere(PipelineHook):
        execution_device = torch.device("meta")

    with hook_pipeline(flux, "watch", Watch()):
        with hook_pipeline(flux, "elsewhere", Elsewhere()):
            assert flux.device == flux._execution_device == torch.device("meta")
        assert flux.device == flux._execution_device == torch.device("cpu")


def test_a_call_that_others_put_on_the_class_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As caches of other libraries do, before or after a pipeline is hooked."""
    pipe, watch = Settled(), Watch()
    handle = hook_pipeline(pipe, "watch", watch)
    assert pipe() == 3
    bare = Settled.__call__
    monkeypatch.setattr(Settled, "__call__", lambda self: 10 + bare(self))
    assert pipe() == Settled()() == 13
    handle.detach()
    hook_pipeline(pipe, "watch", watch)
    assert pipe() == 13
    monkeypatch.undo()
    assert pipe() == Settled()() == 3
    assert watch.names == ["start", "end"] * 4


class Slotted:
    __slots__ = ("scheduler",)


class Final:
    def __init_subclass__(cls) -> None:
        raise TypeError("this class is final")


@pytest.mark.parametrize(
    "pipe", [object(), Slotted(), Final(), SimpleNamespace()], ids=lambda pipe: type(pipe).__name__
)
def test_what_cannot_be_hooked_is_refused_by_name(pipe: Any) -> None:
    before = type(pipe)
    with pytest.raises(SettingError, match=type(pipe).__name__):
        hook_pipeline(pipe, "watch", Watch())
    assert type(pipe) is before


# ------------------------------------------------------------------------------------------------ runs


def test_a_run_is_around_every_call_and_gone_after_it(hooked: tuple[Any, Watch]) -> None:
    pipe, watch = hooked
    seen: list[Any] = []

    def note(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        run = current_run()
        assert run is not None
        assert run.pipeline is pipe
        assert run.request == current_context().request
        seen.append(run)
        return {}

    for _ in range(2):
        FLUX.run(pipe, steps=2, callback_on_step_end=note)
        assert current_run() is None
        assert current_context().request is None
    assert watch.names == ["start", "end"] * 2
    runs = [run for _, run in watch.events]
    assert runs[0] is runs[1] is seen[0] is seen[1]
    assert runs[2] is runs[3] is seen[2]
    assert runs[0].request != runs[2].request, "each call is a request of its own"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_run_ends_however_it_ends(hooked: tuple[Any, Watch], error: type[BaseException]) -> None:
    pipe, watch = hooked

    def stop(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        raise error("enough")

    with pytest.raises(error, match="enough"):
        FLUX.run(pipe, steps=2, callback_on_step_end=stop)
    assert watch.names == ["start", "end"]
    assert current_run() is None
    assert current_context().request is None
    FLUX.run(pipe, steps=1)
    assert watch.names == ["start", "end"] * 2


def test_a_request_that_was_named_is_kept() -> None:
    watch, pipe = Watch(), Own(lambda: current_context().request)
    hook_pipeline(pipe, "watch", watch)
    with call_context(request="mine", branch="cond"):
        assert pipe() == "mine"
    assert {run.request for _, run in watch.events} == {"mine"}
    assert pipe() not in (None, "mine")


def test_a_pipeline_that_calls_itself_is_in_one_run_and_one_that_calls_another_in_two() -> None:
    watches = Watch(), Watch()
    inner = Own(current_run)
    outer = Own(lambda deeper: outer(False) if deeper else (current_run(), inner(), current_run()))
    hook_pipeline(outer, "watch", watches[0])
    hook_pipeline(inner, "watch", watches[1])
    before, within, after = outer(True)
    assert before is after is watches[0].events[0][1]
    assert within is watches[1].events[0][1]
    assert (before.pipeline, within.pipeline) == (outer, inner)
    assert [watch.names for watch in watches] == [["start", "end"]] * 2


def test_hooks_of_a_pipeline_start_in_order_and_end_in_reverse_all_of_them() -> None:
    events: list[tuple[str, Any]] = []

    class Broken(Watch):
        def end_run(self, run: Run) -> None:
            super().end_run(run)
            raise OSError("cannot end")

    pipe = Own()
    for name, kind in (("a", Watch), ("b", Broken), ("c", Watch)):
        hook_pipeline(pipe, name, kind(name, events))
    with pytest.raises(OSError, match="cannot end"):
        pipe()
    assert [name for name, _ in events] == ["start a", "start b", "start c", "end c", "end b", "end a"]
    assert current_run() is None


def test_a_hook_that_cannot_start_ends_the_run() -> None:
    events: list[tuple[str, Any]] = []

    class Broken(Watch):
        def start_run(self, run: Run) -> None:
            raise OSError("cannot start")

    pipe = Own(lambda: events.append(("called", None)))
    for name, kind in (("a", Watch), ("b", Broken), ("c", Watch)):
        hook_pipeline(pipe, name, kind(name, events))
    with pytest.raises(OSError, match="cannot start"):
        pipe()
    assert [name for name, _ in events if name in ("start a", "end a", "called", "start c", "end c")] == [
        "start a",
        "end a",
    ]
    assert current_run() is None


def test_a_loop_of_ones_own_can_be_a_run_of_a_pipeline() -> None:
    pipe, watch = Own(), Watch()
    hook_pipeline(pipe, "watch", watch)
    with running(pipe) as run:
        assert current_run() is run
        assert watch.names == ["start"]
        pipe()
        assert watch.names == ["start"], "a call within is part of it"
    assert watch.names == ["start", "end"]
    assert current_run() is None


def in_two_threads(call: Callable[[Callable[[], None]], Any]) -> list[BaseException]:
    """The first begins before and ends after the second begins, and before the second ends."""
    first_is_in, second_is_in, first_is_out = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def first() -> None:
        first_is_in.set()
        assert second_is_in.wait(10)

    def second() -> None:
        second_is_in.set()
        assert first_is_out.wait(10)

    def run(body: Callable[[], None], out: threading.Event) -> None:
        try:
            call(body)
        except BaseException as error:
            errors.append(error)
        finally:
            out.set()

    one = threading.Thread(target=run, args=(first, first_is_out))
    two = threading.Thread(target=run, args=(second, threading.Event()))
    one.start()
    assert first_is_in.wait(10)
    two.start()
    one.join(20)
    two.join(20)
    return errors


def test_runs_in_two_threads_do_not_meet() -> None:
    pipe, watch, seen = Own(), Watch(), []

    def body(wait: Callable[[], None]) -> None:
        wait()
        seen.append(current_run())

    pipe.body = body
    hook_pipeline(pipe, "watch", watch)
    assert in_two_threads(pipe) == []
    started = [run for name, run in watch.events if name == "start"]
    assert started == seen
    assert len(set(started)) == 2
    assert watch.names == ["start", "start", "end", "end"]


# ------------------------------------------------------------------------------------------------ modules as pipelines


class ModulePipeline(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Linear(2, 2)

    def forward(self, body: Callable[..., Any], *args: Any) -> Any:
        return body(*args)


def test_a_pipeline_that_is_a_module() -> None:
    pipe, watch = ModulePipeline(), Watch()
    before = footprint(pipe)
    handle = hook_pipeline(pipe, "watch", watch)
    seen = pipe(current_run)
    assert seen is watch.events[0][1]
    assert seen.pipeline is pipe
    with pytest.raises(ZeroDivisionError):
        pipe(lambda: 1 // 0)
    assert watch.names == ["start", "end"] * 2
    assert current_run() is None
    copied = copy.deepcopy(pipe)
    assert type(copied) is ModulePipeline
    assert pipeline_hooks(copied) == {}
    handle.detach()
    assert footprint(pipe) == before
    assert pipe(current_run) is None
    assert "samovar" not in repr(pipe.state_dict().keys())


def test_a_module_pipeline_whose_registry_is_reset_is_bare_and_can_be_hooked_again() -> None:
    pipe, watch = ModulePipeline(), Watch()
    before = footprint(pipe)
    handle = hook_pipeline(pipe, "watch", Watch())
    HookRegistry.get_or_create(pipe).reset()
    assert footprint(pipe) == before
    with hook_pipeline(pipe, "other", watch):
        handle.detach()
        pipe(current_run)
    assert watch.names == ["start", "end"]


def test_a_class_that_others_made_of_a_hooked_one_stays() -> None:
    pipe = Own()
    with hook_pipeline(pipe, "watch", Watch()):
        derived = type("Derived", (type(pipe),), {})()
        handle = hook_pipeline(derived, "watch", Watch())
        handle.detach()
        assert type(derived).__name__ == "Derived"
        assert pipeline_hooks(derived) == {}
        other = type("Other", (Own,), {})
        pipe.__class__ = other
    assert type(pipe) is other


def test_a_module_pipeline_keeps_its_other_hooks() -> None:
    class Plus(ModelHook):
        def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
            return output + 1

    pipe, watch = ModulePipeline(), Watch()
    HookRegistry.get_or_create(pipe).register_hook("plus", Plus())
    with hook_pipeline(pipe, "watch", watch):
        assert pipe(lambda: 1) == 2
    assert pipe(lambda: 1) == 2
    assert watch.names == ["start", "end"]


def test_a_module_pipeline_that_calls_itself_is_in_one_run() -> None:
    pipe, watch = ModulePipeline(), Watch()
    hook_pipeline(pipe, "watch", watch)
    pipe(lambda: pipe(current_run))
    assert watch.names == ["start", "end"]


def test_runs_of_a_module_pipeline_in_two_threads_do_not_meet() -> None:
    pipe, watch, seen = ModulePipeline(), Watch(), []

    def body(wait: Callable[[], None]) -> None:
        wait()
        seen.append(current_run())

    hook_pipeline(pipe, "watch", watch)
    assert in_two_threads(lambda wait: pipe(body, wait)) == []
    assert [run for name, run in watch.events if name == "start"] == seen
    ends = [run for name, run in watch.events if name == "end"]
    assert ends == seen, "each thread ends its own run"


# ------------------------------------------------------------------------------------------------ where a run is

COUNTING: dict[str, Callable[[], Any]] = {
    "flow-euler": FlowMatchEulerDiscreteScheduler,
    "flow-euler-shifted": lambda: FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow-heun": FlowMatchHeunDiscreteScheduler,
    "euler": EulerDiscreteScheduler,
    "heun": HeunDiscreteScheduler,
    "dpm": DPMSolverMultistepScheduler,
    "unipc": UniPCMultistepScheduler,
    "unipc-flow": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
}
"""Schedulers that say which step it is."""


def loop(scheduler: Any, begin: int = 0) -> Iterator[Any]:
    """A denoising loop over what is left from a step on; gives each time before it is stepped over."""
    generator, sample = torch.Generator().manual_seed(0), torch.ones(1, 4, 2, 2)
    if begin:
        scheduler.set_begin_index(begin)
    for time in scheduler.timesteps[begin:]:
        yield time
        if hasattr(scheduler, "scale_model_input"):  # Some complain if nobody calls it.
            scheduler.scale_model_input(sample, time)
        sample = scheduler.step(torch.randn(sample.shape, generator=generator), time, sample).prev_sample


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # numpy's word to diffusers.
@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("begin", [0, 3])
def test_the_scheduler_says_where_a_run_is(make: Callable[[], Any], begin: int) -> None:
    pipe = Own()
    pipe.scheduler = scheduler = make()  # type: ignore[attr-defined]
    run = Run(pipe, "request")
    for steps in (6, 4):  # A second loop begins at its own beginning.
        scheduler.set_timesteps(steps)
        total = len(scheduler.timesteps)
        for number, _ in enumerate(loop(scheduler, begin), start=begin):
            position = run.position()
            sigma, then = [*scheduler.sigmas[number : number + 2].tolist(), 0.0][:2]
            assert position == Position(number, total, sigma, then)
            assert (type(position.step), type(position.total), type(position.sigma)) == (int, int, float)
            assert run.position() == position, "asking twice changes nothing"
        assert run.total() == total


@pytest.mark.parametrize("make", [DDIMScheduler], ids=["ddim"])
def test_a_scheduler_that_does_not_count_leaves_the_place_unknown(make: Callable[[], Any]) -> None:
    pipe = Own()
    pipe.scheduler = make()  # type: ignore[attr-defined]
    pipe.scheduler.set_timesteps(6)  # type: ignore[attr-defined]
    run = Run(pipe, "request")
    for _ in loop(pipe.scheduler):  # type: ignore[attr-defined]
        assert run.position() is None
    assert run.total() == 6


def test_a_pipeline_without_a_scheduler_or_timesteps() -> None:
    pipe = Own()
    assert Run(pipe, 1).position() is None
    assert Run(pipe, 1).total() is None
    pipe.scheduler = None  # type: ignore[attr-defined]
    assert Run(pipe, 1).position() is None
    assert Run(pipe, 1).total() is None
    pipe._num_timesteps = 7  # type: ignore[attr-defined]
    assert Run(pipe, 1).total() == 7


def test_nothing_is_read_from_a_device() -> None:
    pipe = Own()
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()  # type: ignore[attr-defined]
    pipe.scheduler.set_timesteps(6, device="meta")  # type: ignore[attr-defined]
    assert Run(pipe, 1).position() == Position(0, 6, None)


@pytest.mark.parametrize(("strength", "begin"), [(1.0, 0), (0.6, 4), (0.3, 7)])
def test_image_to_image_begins_half_way(flux: Any, strength: float, begin: int) -> None:
    pipe = FluxImg2ImgPipeline(**flux.components)
    pipe.set_progress_bar_config(disable=True)
    before = footprint(pipe)[0]
    seen: list[tuple[Position | None, int | None]] = []

    class Note(ModelHook):
        def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            run = current_run()
            assert run is not None
            seen.append((run.position(), run.total()))
            return args, kwargs

    HookRegistry.get_or_create(pipe.transformer).register_hook("note", Note())
    with hook_pipeline(pipe, "watch", Watch()):
        FLUX.run(pipe, steps=10, image=torch.zeros(1, 3, 16, 24), strength=strength)
    HookRegistry.get_or_create(pipe.transformer).reset()
    positions = [position for position, _ in seen if position is not None]
    assert [position.step for position in positions] == [step for step in range(begin, 10) for _ in range(2)]
    assert {position.total for position in positions} == {10}
    assert {total for _, total in seen} == {10 - begin}
    assert footprint(pipe)[0] is before


def test_a_pipelines_own_count_of_steps_comes_first(hooked: tuple[Any, Watch]) -> None:
    pipe, _ = hooked
    totals: list[Any] = []

    def note(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        run = current_run()
        assert run is not None
        totals.append((run.total(), run.position()))
        return {}

    FLUX.run(pipe, steps=5, callback_on_step_end=note)
    FLUX.run(pipe, steps=3, callback_on_step_end=note)
    assert [total for total, _ in totals] == [5] * 5 + [3] * 3
    assert [position.step for _, position in totals] == [1, 2, 3, 4, 5, 1, 2, 3], "after each step"


# ------------------------------------------------------------------------------------------------ shared denoisers


class Runs(ModelHook):
    """Notes which run each call of a module is part of."""

    def __init__(self) -> None:
        self.seen: list[Run | None] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.seen.append(current_run())
        return args, kwargs


def test_a_pipeline_made_by_from_pipe_shares_hooked_modules_and_is_itself_bare(flux: Any) -> None:
    runs = Runs()
    with hook_pipeline(flux, "watch", Watch()):
        HookRegistry.get_or_create(flux.transformer).register_hook("runs", runs)
        other = FluxImg2ImgPipeline.from_pipe(flux)
        assert type(other) is FluxImg2ImgPipeline
        assert other.transformer is flux.transformer
        assert pipeline_hooks(other) == {}
        other.set_progress_bar_config(disable=True)
        FLUX.run(other, steps=2, image=torch.zeros(1, 3, 16, 24), strength=1.0)
        assert set(runs.seen) == {None}
        for made in (flux.__class__(**flux.components), type(flux)(**flux.components)):
            assert pipeline_hooks(made) == {}
    HookRegistry.get_or_create(flux.transformer).reset()
