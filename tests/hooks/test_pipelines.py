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

    def __init__(self, name: str = "", events: list[tuple[str, Any]] | None = None, fails: str = "") -> None:
        self.name, self.fails = name, fails
        self.events: list[tuple[str, Any]] = [] if events is None else events
        self.lock = threading.Lock()  # Hooks have parts that cannot be copied.

    def _note(self, event: str, run: Run) -> None:
        self.events.append((f"{event} {self.name}".strip(), run))
        if event == self.fails:
            raise OSError(f"cannot {event}")

    def start_run(self, run: Run) -> None:
        self._note("start", run)

    def end_run(self, run: Run) -> None:
        self._note("end", run)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.events]


class Own:
    """A pipeline of one's own."""

    def __init__(self, body: Callable[..., Any] = lambda: None, **attributes: Any) -> None:
        self.body = body
        vars(self).update(attributes)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


class Settled:
    """A pipeline that can be pickled."""

    def __init__(self) -> None:
        self.steps = 3

    def __call__(self) -> int:
        return self.steps


class ModulePipeline(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = torch.nn.Linear(2, 2)

    def forward(self, body: Callable[..., Any] = lambda: None, *args: Any) -> Any:
        return body(*args)


def footprint(pipe: Any) -> tuple[type, dict[str, int]]:
    return type(pipe), {name: id(value) for name, value in vars(pipe).items()}


@pytest.fixture(scope="module")
def flux() -> Any:
    pipe = FLUX.build(0)
    FLUX.run(pipe, steps=1)  # diffusers writes what it counts on the pipeline.
    return pipe


@pytest.fixture
def hooked(flux: Any) -> Iterator[tuple[Any, Watch]]:
    """A real pipeline with a hook, which comes off again whatever the test does."""
    watch, before = Watch(), type(flux)
    with hook_pipeline(flux, "watch", watch):
        yield flux, watch
    assert type(flux) is before


# ------------------------------------------------------------------------------------------------ on and off


def test_hooking_and_unhooking_leave_no_trace(flux: Any) -> None:
    other = FLUX.build(1)
    bare, before, of_other = FLUX.run(flux, steps=2), footprint(flux), footprint(other)
    one, two = (hook_pipeline(flux, name, Watch()) for name in ("one", "two"))
    assert list(pipeline_hooks(flux)) == ["one", "two"]
    with pytest.raises(SettingError, match="FluxPipeline has a pipeline hook 'two' already"):
        hook_pipeline(flux, "two", Watch())
    assert footprint(other) == of_other, "another pipeline of the class is not hooked"
    one.detach()
    assert list(pipeline_hooks(flux)) == ["two"]
    assert type(flux) is not FluxPipeline, "still hooked"
    for _ in range(2):
        two.detach()
        assert footprint(flux) == before
    assert torch.equal(FLUX.run(flux, steps=2), bare)


def test_a_hooked_pipeline_is_still_what_it_is(hooked: tuple[Any, Watch], tmp_path: Path) -> None:
    pipe, watch = hooked
    assert isinstance(pipe, FluxPipeline)
    for name in ("__name__", "__module__", "__qualname__", "__doc__"):
        assert getattr(type(pipe), name) == getattr(pipe.__class__, name) == getattr(FluxPipeline, name)
    assert pipe.device == pipe._execution_device == torch.device("cpu")
    assert set(pipe.components) == {"vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "transformer",
        "scheduler", "image_encoder", "feature_extractor"}  # fmt: skip
    pipe.save_pretrained(tmp_path)
    assert "samovar" not in (tmp_path / "model_index.json").read_text()
    read = FluxPipeline.from_pretrained(tmp_path)
    read.set_progress_bar_config(disable=True)
    images = [FLUX.run(one, steps=1) for one in (copy.deepcopy(pipe), zoo.as_built(read), pipe)]
    assert torch.equal(images[0], images[2])
    assert torch.equal(images[1], images[2])
    assert watch.names == ["start", "end"], "of the pipeline itself alone"


@pytest.mark.parametrize("way", ["deepcopy", "copy", "pickle", "torch.save"])
def test_copies_are_bare(way: str) -> None:
    pipe, buffer = Settled(), io.BytesIO()
    hook_pipeline(pipe, "watch", Watch())
    if way == "torch.save":
        torch.save(pipe, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        other = pickle.loads(pickle.dumps(pipe)) if way == "pickle" else getattr(copy, way)(pipe)
    assert type(other) is Settled
    assert vars(other) == {"steps": 3}
    assert list(pipeline_hooks(pipe)) == ["watch"]
    assert other() == pipe() == 3


def test_where_a_pipeline_computes(flux: Any) -> None:
    """As it says itself, in other libraries by a plain attribute, unless a hook knows better."""

    class Elsewhere(PipelineHook):
        execution_device = torch.device("meta")

    with hook_pipeline(flux, "watch", Watch()):
        with hook_pipeline(flux, "elsewhere", Elsewhere()):
            assert flux.device == flux._execution_device == torch.device("meta")
        assert flux.device == flux._execution_device == torch.device("cpu")
    for attribute in ("device", "_execution_device"):
        pipe = Own(**{attribute: "cuda:3"})
        with hook_pipeline(pipe, "watch", Watch()):
            assert getattr(pipe, attribute) == "cuda:3"
            setattr(pipe, attribute, "cuda:4")
        assert getattr(pipe, attribute) == "cuda:4"
    assert not hasattr(Own(), "device")


class Slotted:
    __slots__ = ("scheduler",)


class Final:
    def __init_subclass__(cls) -> None:
        raise TypeError("this class is final")


@pytest.mark.parametrize("make", [object, Slotted, Final, SimpleNamespace])
def test_what_cannot_be_hooked_is_refused_by_name(make: type) -> None:
    pipe = make()
    with pytest.raises(SettingError, match=make.__name__):
        hook_pipeline(pipe, "watch", Watch())
    assert type(pipe) is make


# ------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_run_is_around_every_call_however_it_ends(
    hooked: tuple[Any, Watch], error: type[BaseException] | None
) -> None:
    pipe, watch = hooked
    seen: list[Any] = []

    def note(pipe: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        run = current_run()
        assert run is not None
        assert (run.pipeline, run.request) == (pipe, current_context().request)
        assert (run.total(), run.position().step) == (3, step + 1), "after the step"  # type: ignore[union-attr]
        seen.append(run)
        if error is not None:
            raise error("enough")
        return {}

    for _ in range(2):
        if error is None:
            FLUX.run(pipe, steps=3, callback_on_step_end=note)
        else:
            with pytest.raises(error, match="enough"):
                FLUX.run(pipe, steps=3, callback_on_step_end=note)
        assert current_run() is None
        assert current_context().request is None
    assert watch.names == ["start", "end"] * 2
    runs = [run for _, run in watch.events]
    assert runs[0] is runs[1] is seen[0]
    assert runs[2] is runs[3] is seen[-1]
    assert runs[0].request != runs[2].request, "each call is a request of its own"
    assert runs[0].arguments["prompt"] == "a cat"


@pytest.mark.parametrize("make", [Own, lambda body: ModulePipeline()], ids=["object", "module"])
def test_requests_and_runs_within_runs(make: Callable[..., Any]) -> None:
    watch, pipe = Watch(), make(lambda body, *args: body(*args))
    before = footprint(pipe)
    with hook_pipeline(pipe, "watch", watch), call_context(request="mine", branch="cond"):
        assert pipe(current_context).request == "mine"
        assert pipe(pipe, current_run) is watch.events[-1][1]
        assert watch.names == ["start", "end"] * 2, "a pipeline that calls itself is in one run"
        inner, others = Own(current_run), Watch()
        with hook_pipeline(inner, "watch", others):
            run, within, after = pipe(lambda: (current_run(), inner(), current_run()))
        assert run is after is watch.events[-1][1]
        assert within is others.events[0][1]
        assert (run.pipeline, within.pipeline) == (pipe, inner)
        assert run.request == "mine" != within.request
        with pytest.raises(ZeroDivisionError):
            pipe(lambda: 1 // 0)
        with running(pipe) as run:
            pipe(lambda: None)
            assert watch.names[-1] == "start", "a call within is part of a loop of one's own"
    assert watch.names == ["start", "end"] * 5
    assert current_run() is None
    assert footprint(pipe) == before
    assert pipe(current_run) is None


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ("end", ["start a", "start b", "start c", "end c", "end b", "end a"]),
        ("start", ["start a", "start b", "end b", "end a"]),
    ],
)
def test_hooks_start_in_order_and_end_in_reverse_whichever_fails(fails: str, expected: list[str]) -> None:
    events: list[tuple[str, Any]] = []
    pipe = Own()
    for name in "abc":
        hook_pipeline(pipe, name, Watch(name, events, fails if name == "b" else ""))
    with pytest.raises(OSError, match=f"cannot {fails}"):
        pipe()
    assert [name for name, _ in events] == expected
    assert current_run() is None


# ------------------------------------------------------------------------------------------------ where a run is

COUNTING: dict[str, Callable[[], Any]] = {
    "flow-euler": FlowMatchEulerDiscreteScheduler,
    "flow-heun": FlowMatchHeunDiscreteScheduler,
    "heun": HeunDiscreteScheduler,
    "dpm": DPMSolverMultistepScheduler,
    "unipc-flow": lambda: UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
}
"""Schedulers that count their steps."""


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
def test_the_scheduler_says_where_a_run_is(make: Callable[[], Any]) -> None:
    scheduler = make()
    pipe = Own(scheduler=scheduler)
    run = Run(pipe, "request")
    for steps, begin in ((6, 0), (4, 3)):  # A second loop has its own beginning.
        scheduler.set_timesteps(steps)
        for number, _ in enumerate(loop(scheduler, begin), start=begin):
            sigma, then = [*scheduler.sigmas[number : number + 2].tolist(), 0.0][:2]
            length = len(scheduler.timesteps)
            expected = Position(number, length, sigma, then, length, scheduler.timesteps)
            assert run.position() == run.position() == expected, "asking twice changes nothing"
        assert run.total() == len(scheduler.timesteps)


def test_where_a_run_is_may_be_unknown() -> None:
    """Without a scheduler, with one that does not count, and where it could only be read from a device."""
    assert [run(Run(Own(), 1)) for run in (Run.position, Run.total)] == [None, None]
    pipe = Own(scheduler=None, _num_timesteps=7)
    assert (Run(pipe, 1).position(), Run(pipe, 1).total()) == (None, 7)
    pipe = Own(scheduler=DDIMScheduler())
    pipe.scheduler.set_timesteps(6)
    for _ in loop(pipe.scheduler):
        assert (Run(pipe, 1).position(), Run(pipe, 1).total()) == (None, 6)
    pipe = Own(scheduler=FlowMatchEulerDiscreteScheduler())
    pipe.scheduler.set_timesteps(6, device="meta")
    assert Run(pipe, 1).position() == Position(0, 6, None, 0.0, 6, pipe.scheduler.timesteps)


class Note(ModelHook):
    """Notes where each call of a module is in its run."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        run = current_run()
        self.seen.append(None if run is None else (run.position().step, run.total()))  # type: ignore[union-attr]
        return args, kwargs


def test_a_pipeline_made_by_from_pipe_shares_modules_is_bare_and_may_begin_half_way(flux: Any) -> None:
    note, call = Note(), {"image": torch.zeros(1, 3, 16, 24), "strength": 0.6}
    HookRegistry.get_or_create(flux.transformer).register_hook("note", note)
    with hook_pipeline(flux, "watch", Watch()):
        other = FluxImg2ImgPipeline.from_pipe(flux)
        assert (type(other), other.transformer) == (FluxImg2ImgPipeline, flux.transformer)
        for made in (other, flux.__class__(**flux.components), type(flux)(**flux.components)):
            assert pipeline_hooks(made) == {}
        other.set_progress_bar_config(disable=True)
        FLUX.run(other, steps=5, **call)
        assert set(note.seen) == {None}
        note.seen.clear()
        with hook_pipeline(other, "watch", Watch()):
            FLUX.run(other, steps=10, **call)
    HookRegistry.get_or_create(flux.transformer).reset()
    assert note.seen == [(step, 6) for step in range(4, 10) for _ in range(2)]
    assert type(other) is FluxImg2ImgPipeline
