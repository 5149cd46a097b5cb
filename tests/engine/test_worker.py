"""A worker on a tiny pipeline: bits, seeds, steps, odd prompts, and what goes wrong."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import ask, pixels, result_of, worker_of
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import (
    CancelledRequestError,
    EngineError,
    NanLatentsError,
    OutOfMemoryError,
    SettingError,
)
from samovar.engine import Event, Listener, Preview, Progress, Request, Worker, call_pipeline
from samovar.engine.calling import notes_on
from samovar.hooks import HookRegistry, ModelHook


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Worker:
    return worker_of(folder)


@contextlib.contextmanager
def hooked(worker: Worker, hook: ModelHook) -> Iterator[None]:
    """A hook next to the denoiser."""
    registry = HookRegistry.get_or_create(worker.pipeline.transformer)
    registry.register_hook("zz of a test", hook)
    try:
        yield
    finally:
        registry.remove_hook("zz of a test")


def test_defaults_of_the_model_are_used_and_can_be_overridden(tiny: Worker) -> None:
    result = result_of(tiny.make(Request("a cat", OmniDiffusionSamplingParams(seed=4))))
    assert (result.images[0].size, result.params.num_inference_steps, result.seeds) == ((32, 16), 2, (4,))
    assert result_of(tiny.make(ask(width=16))).images[0].size == (16, 16)


def test_a_seed_gives_the_same_image_alone_and_among_others(tiny: Worker) -> None:
    several = result_of(tiny.make(ask(seed=4, num_outputs_per_prompt=3)))
    assert several.seeds == (4, 5, 6)
    assert np.array_equal(pixels(several, 1), pixels(tiny.make(ask(seed=5))))
    assert not np.array_equal(pixels(several, 0), pixels(several, 1))
    drawn = result_of(tiny.make(ask(seed=None)))
    assert np.array_equal(pixels(drawn), pixels(tiny.make(ask(seed=drawn.seeds[0]))))


def test_what_a_pipeline_draws_without_its_generator_follows_the_seed() -> None:
    drawn: list[float] = []

    class Pipeline:
        def __call__(self, prompt: str, generator: Any) -> None:
            drawn.append(torch.rand(()).item())

    torch.manual_seed(1)
    before = torch.get_rng_state()
    for seed in (3, 4, 3):
        call_pipeline(Pipeline(), ["a cat"], [seed], {})
    assert drawn[0] == drawn[2] != drawn[1]
    assert torch.equal(torch.get_rng_state(), before), "and nobody else's draws do"


def test_offload_changes_no_bit(folder: Path) -> None:
    cache = {"cache": {"backend": "tea_cache", "schedule": "#.#.#"}}
    resident = result_of(worker_of(folder, **cache).make(ask()))
    assert len(resident.cache) == 1
    for settings in (
        {"enable_cpu_offload": True},
        {"enable_layerwise_offload": True},
        {"gpu_memory": "3GiB"},
        {"offload": "model", "exclude": "vae,text_encoder"},
    ):
        worker = worker_of(folder, **cache, **settings)
        assert "offload: " in str(worker.explain())
        result = result_of(worker.make(ask()))
        assert np.array_equal(pixels(result), pixels(resident)), settings
        assert [stats.to_dict() for stats in result.cache] == [stats.to_dict() for stats in resident.cache]
        worker.close()


# ------------------------------------------------------------------------------------------------ steps


@pytest.fixture(scope="module")
def stepping(folder: Path) -> Worker:
    return worker_of(folder, cache={"backend": "tea_cache", "schedule": "##.#.#"})


SIX = ask(num_inference_steps=6, how={"num_previews": 2})


def test_every_step_is_told_with_what_the_cache_did(stepping: Worker) -> None:
    plain = pixels(stepping.make(replace(SIX, num_previews=0)))
    before, events, kind = set(vars(stepping.pipeline.scheduler)), list[Event](), type(stepping.pipeline.scheduler)

    def note(event: Event) -> None:
        events.append(event)
        assert type(stepping.pipeline.scheduler) is kind, "which some pipelines compare"

    result = stepping.make(SIX, Listener(note, lambda: False))
    steps = [event for event in events if isinstance(event, Progress)]
    assert [(step.step, step.num_steps) for step in steps] == [(step, 6) for step in range(1, 7)]
    assert [step.is_computed for step in steps] == [mark == "#" for mark in "##.#.#"]
    previews = [event for event in events if isinstance(event, Preview)]
    assert [event.step for event in previews] == [2, 4]
    assert set(vars(stepping.pipeline.scheduler)) == before
    assert np.array_equal(pixels(result), plain), "previews change no bit"
    apart = [np.abs(np.asarray(preview.image).astype(int) - plain).mean() for preview in previews]
    assert apart[1] < apart[0], "they come nearer"


def test_a_request_that_is_cancelled_stops_after_the_step(stepping: Worker) -> None:
    steps: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, Progress):
            steps.append(event.step)

    assert isinstance(stepping.make(SIX, Listener(note, lambda: len(steps) >= 3)), CancelledRequestError)
    assert isinstance(stepping.make(SIX, Listener(note, lambda: True)), CancelledRequestError)
    assert steps == [1, 2, 3], "nothing is begun for nobody"


class Spoiled(ModelHook):
    def __init__(self, call: int, value: float) -> None:
        self._left, self._value = call, value

    def post_forward(self, module: Any, output: Any) -> Any:
        self._left -= 1
        return (output[0] * self._value, *output[1:]) if self._left == 0 else output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_checked_at_every_step_and_the_next_image_is_clean(stepping: Worker, value: float) -> None:
    clean = result_of(stepping.make(SIX))
    with hooked(stepping, Spoiled(4, value)):
        error = stepping.make(SIX)
    assert isinstance(error, NanLatentsError)
    assert (error.step, "##.#" in str(error.cache), "Try without the cache" in str(error)) == (4, True, True)
    again = result_of(stepping.make(SIX))
    assert np.array_equal(pixels(again), pixels(clean))
    assert [stats.to_dict() for stats in again.cache] == [stats.to_dict() for stats in clean.cache]


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(height=18), "height must be a multiple of 4 for this model, not 18: try 16 or 20"),
        (ask(max_sequence_length=1000), r"FluxPipeline refuses these settings: .*max_sequence_length.* cannot be"),
        (ask(options={"sigmas": 1}), r"FluxPipeline refuses these settings: .*\. Check sigmas\.$"),
        (ask(how={"image": Image.new("RGB", (8, 8))}), "FluxPipeline takes no image"),
    ],
)
def test_what_the_pipeline_refuses_is_a_mistake_of_the_request(tiny: Worker, request_: Request, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        result_of(tiny.make(request_))


def test_too_little_memory_names_the_size_and_the_worker_goes_on(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    before, side = pixels(tiny.make(ask())), 2**22
    with pytest.raises(OutOfMemoryError, match=f"not enough memory for image of {side} x {side} pixels: .+"):
        result_of(tiny.make(ask(height=side, width=side, num_inference_steps=1)))
    assert np.array_equal(pixels(tiny.make(ask())), before)

    def fail(*args: Any, **call: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(tiny.pipeline, "encode_prompt", fail)
    with pytest.raises(OutOfMemoryError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        result_of(tiny.make(ask("another prompt")))


def test_what_breaks_inside_a_pipeline_is_an_error_of_the_engine(tiny: Worker) -> None:
    class Broken(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("shapes do not fit")

    with hooked(tiny, Broken()), pytest.raises(EngineError, match="FluxPipeline failed: RuntimeError: shapes do not"):
        result_of(tiny.make(ask()))
    assert result_of(tiny.make(ask())).seeds == (3,)


def test_a_package_that_diffusers_lacks_is_named(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"is_torchvision_available": bool}
    exec(compile("def fail(*args, **call):\n    return transforms.resize\n", "module.py", "exec"), names)
    monkeypatch.setattr(tiny.pipeline, "encode_prompt", names["fail"])
    with pytest.raises(EngineError, match="it needs torchvision, which is not installed: pip install torchvision"):
        result_of(tiny.make(ask("yet another prompt")))


def test_notes_say_what_of_a_request_had_no_effect(tiny: Worker) -> None:
    assert result_of(tiny.make(ask())).notes == ()
    (note,) = result_of(tiny.make(ask("a " * 5000))).notes
    assert note.endswith("tokens, and the model read the first 8")
    (note,) = result_of(tiny.make(ask(guidance_scale=9.0))).notes
    assert note == "guidance_scale has no effect: the model has no guidance embedding; use true_cfg_scale"
    tuned = OmniDiffusionSamplingParams(height=32, width=32, true_cfg_scale=2.0)
    for exact in (False, True):
        noted = [*notes_on(ask(height=64, width=32, how={"exact": exact}), [], tiny.pipeline, tuned)]
        assert noted == ["the cache was tuned with height=32; with 64, how near it stays is unknown"] * (not exact)


def test_a_tolerance_is_that_of_its_request(folder: Path, tiny: Worker) -> None:
    worker, counts = worker_of(folder, cache="auto"), list[int]()
    for tolerance, said in (("exact", "0.0"), (1.0, "1.0"), (None, "high")):
        result = result_of(worker.make(ask(num_inference_steps=12, how={"tolerance": tolerance})))
        assert [stats.denoisers["transformer"].settings for stats in result.cache] == [f"tolerance={said}"]
        counts.append(result.cache[0].computed)
        if tolerance == "exact":
            assert np.array_equal(pixels(result), pixels(tiny.make(ask(num_inference_steps=12))))
    assert counts[1] < counts[2] <= counts[0] == 12
    exact = result_of(worker.make(ask(num_inference_steps=12, how={"exact": True})))
    assert exact.cache == ()
    assert np.array_equal(pixels(exact), pixels(tiny.make(ask(num_inference_steps=12))))
    with pytest.raises(SettingError, match="Choose cache='auto'"):
        result_of(tiny.make(ask(how={"tolerance": 1.0})))


def test_exact_is_without_any_cache(folder: Path, tiny: Worker) -> None:
    worker, events = worker_of(folder, cache={"backend": "tea_cache", "rel_l1_thresh": 1e9}), list[Event]()
    exact = result_of(
        worker.make(ask(num_inference_steps=12, how={"exact": True}), Listener(events.append, lambda: False))
    )
    assert np.array_equal(pixels(exact), pixels(tiny.make(ask(num_inference_steps=12))))
    assert {event.is_computed for event in events if isinstance(event, Progress)} == {None}
    cached = result_of(worker.make(ask(num_inference_steps=12)))
    assert cached.cache[0].skipped > 0
    assert not np.array_equal(pixels(exact), pixels(cached))


def test_images_are_drawn_anew_or_repainted_with_the_same_weights(folder: Path, tiny: Worker) -> None:
    start = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
    worker, made = worker_of(folder, task="img2img"), list[Any]()
    for strength in (0.4, 1.0):
        events: list[Event] = []
        request = ask(strength=strength, how={"image": start})
        result = result_of(worker.make(request, Listener(events.append, lambda: False)))
        assert result.images[0].size == (40, 24), "as large as what it was made of"
        made.append(pixels(result))
        assert [event.step for event in events if isinstance(event, Progress)] == list(range(1, int(5 * strength) + 1))
    assert not np.array_equal(*made)
    with pytest.raises(SettingError, match=r"refuses these settings.* It was given no image"):
        result_of(worker.make(ask()))
    worker.close()
    worker, half = worker_of(folder, task="inpaint"), Image.new("L", (40, 24), 255)
    half.paste(0, (0, 0, 20, 24))
    transparent = start.copy()
    transparent.putalpha(half.point(lambda level: 255 - level))
    masked = pixels(worker.make(ask(how={"image": start, "inputs": {"mask": half}})))
    assert np.array_equal(masked, pixels(worker.make(ask(how={"image": transparent}))))
    whole = {"image": start, "inputs": {"mask": Image.new("L", (40, 24), 255)}}
    assert not np.array_equal(masked, pixels(worker.make(ask(how=whole))))
    assert worker.warm_up() > 0.0, "it gives all that is needed"
    worker.close()


def test_threads_take_turns_where_requests_cannot_meet(tiny: Worker) -> None:
    cases = {"a cat": 3, "a dog": 5, "an owl": 4}
    alone = {prompt: pixels(tiny.make(ask(prompt, num_inference_steps=steps))) for prompt, steps in cases.items()}
    made: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda p=p, n=n: made.update({p: tiny.make(ask(p, num_inference_steps=n))}))
        for p, n in cases.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt, image in alone.items():
        assert np.array_equal(pixels(made[prompt]), image), prompt


def test_a_gpu_that_no_longer_obeys_is_noticed_and_a_failed_warm_up_says_how_to_go_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    worker = worker_of(folder)
    assert worker.is_healthy()
    assert worker.usage().memory_bytes > 50_000_000
    monkeypatch.setattr(worker, "make", lambda request: OutOfMemoryError("too large"))
    with pytest.raises(EngineError, match="The warm-up failed: too large To start without one, give warm_up=False"):
        worker.warm_up()
    monkeypatch.setattr(worker, "device", torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    assert not worker.is_healthy()
