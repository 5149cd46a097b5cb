"""A rehearsal sees the calls of a real run, and leaves the pipeline alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from pipelines import PIPELINES, TinyPipeline
from samovar.arch.skeleton import build_pipeline, read_skeleton
from samovar.builtin import BUILTIN_MODELS
from samovar.core import nested
from samovar.core.errors import SettingError
from samovar.trace.dry_run import CallForm, DryRun, RequestSize, dry_run

every = pytest.mark.parametrize("tiny", PIPELINES.values(), ids=PIPELINES)


def size_of(tiny: TinyPipeline) -> RequestSize:
    return RequestSize(*(tiny.settings.get(name) for name in ("height", "width", "num_frames")))


def rehearsed(tiny: TinyPipeline, pipe: Any, **settings: Any) -> DryRun:
    arguments = tiny.arguments(pipe, tiny.settings | settings) | {"num_inference_steps": 2}
    return dry_run(pipe, size_of(tiny), **{k: v for k, v in arguments.items() if k not in ("height", "width")})


def real_calls(tiny: TinyPipeline, pipe: Any) -> dict[str, CallForm]:
    calls: dict[str, CallForm] = {}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}

    def note(name: str) -> Any:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, CallForm(args, kwargs))

        return hook

    handles = [part.register_forward_pre_hook(note(name), with_kwargs=True) for name, part in parts.items()]
    tiny.run(pipe, steps=2, output_type="pt")
    for handle in handles:
        handle.remove()
    return calls


def form(call: CallForm) -> Any:
    return nested.signature(nested.without_data((tuple(call.args), dict(call.kwargs))))


@every
def test_the_calls_are_those_of_a_real_run(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    rehearsal, real = rehearsed(tiny, pipe), real_calls(tiny, pipe)
    assert rehearsal.problem is None
    assert {name: form(call) for name, call in rehearsal.calls.items()} == {n: form(call) for n, call in real.items()}
    assert {*rehearsal.peaks} == {n for n, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    assert set(tiny.denoisers) <= set(rehearsal.calls)


def marks(pipe: Any) -> list[Any]:
    """What would show that somebody was here: entries, hooks, and writes."""
    parts = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    owners = [pipe, *(module for part in parts for module in part.modules())]
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in owners[1:]]
    written = [tensor._version for part in parts for tensor in (*part.parameters(), *part.buffers())]
    return [{name: id(value) for name, value in vars(owner).items()} for owner in owners] + [hooks, written]


@every
def test_the_pipeline_is_left_alone(tiny: TinyPipeline) -> None:
    pipe = tiny.build(0)
    before = tiny.run(pipe)
    state, config, marked = torch.get_rng_state(), dict(pipe.config), marks(pipe)
    scheduler = copy.deepcopy(vars(pipe.scheduler))
    rehearsed(tiny, pipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert marks(pipe) == marked
    assert dict(pipe.config) == config
    assert nested.equal(vars(pipe.scheduler), scheduler)
    assert torch.equal(tiny.run(pipe), before)


def test_a_folder_is_rehearsed_like_the_loaded_pipeline() -> None:
    from diffusers import DiffusionPipeline

    folder = BUILTIN_MODELS["emoji"]
    loaded = DiffusionPipeline.from_pretrained(folder).to(torch.float16)
    size = RequestSize(64, 96, batch=2)
    read, real = dry_run(build_pipeline(str(folder), read_skeleton(str(folder))[1]), size), dry_run(loaded, size)
    assert read.problem is None
    assert {name: form(call) for name, call in read.calls.items()} == {n: form(c) for n, c in real.calls.items()}
    assert read.peaks == real.peaks
    hidden = read.calls["transformer"].kwargs["hidden_states"]
    assert hidden.shape[0] == 2


def test_more_pixels_frames_and_images_need_more() -> None:
    ltx = PIPELINES["ltx"].build(0)
    needs = [
        dry_run(ltx, RequestSize(*size)).peaks
        for size in ((64, 64, 9), (128, 64, 9), (64, 128, 9), (64, 64, 17), (64, 64, 9, 2))
    ]
    for name in ("transformer", "vae"):
        assert all(more[name] > needs[0][name] for more in needs[1:]), name


@pytest.mark.parametrize(
    ("size", "param"),
    [({"height": 0}, "height"), ({"width": -8}, "width"), ({"frames": 1.5}, "frames"), ({"batch": True}, "batch")],
)
def test_sizes_that_are_none_are_refused(size: dict[str, Any], param: str) -> None:
    with pytest.raises(SettingError, match="whole number of at least 1") as caught:
        RequestSize(**size)
    assert caught.value.param == param


def test_frames_of_an_image_model_are_refused() -> None:
    with pytest.raises(SettingError, match="frames=9 means nothing to FluxPipeline, which takes no num_frames"):
        dry_run(PIPELINES["flux"].build(0), RequestSize(frames=9))


def test_a_size_that_the_pipeline_refuses_is_refused_in_its_words() -> None:
    with pytest.raises(SettingError, match=r"SD3|StableDiffusion3Pipeline does not take .*divisible by"):
        dry_run(PIPELINES["sd3"].build(0), RequestSize(height=17, width=16))


def test_a_component_that_fails_is_said_to_and_the_others_are_known() -> None:
    pipe = PIPELINES["flux"].build(0)

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such luck")

    pipe.vae.decoder.forward = fail
    found = dry_run(pipe, RequestSize(16, 24))
    assert found.problem == "RuntimeError: no such luck"
    assert {*found.peaks} == {"text_encoder", "text_encoder_2", "transformer"}
