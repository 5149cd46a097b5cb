"""A worker on a tiny pipeline and on the built-in model: defaults, seeds, sizes, odd prompts."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import generate
from PIL import Image

from samovar import OmniDiffusionSamplingParams
from samovar.core.errors import (
    EngineError,
    ModelError,
    NanLatentsError,
    OutOfMemoryError,
    SamovarError,
    SettingError,
)
from samovar.engine import Event, Listener, OmniDiffusionConfig, Preview, Progress, Request, Worker
from samovar.hooks import HookRegistry, ModelHook

FAST = OmniDiffusionSamplingParams(num_inference_steps=1, seed=1)


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Worker:
    return Worker(OmniDiffusionConfig(str(folder), progress=False))


def pixels(image: Any) -> Any:
    return np.asarray(image)


def test_defaults_of_the_model_are_used_and_can_be_overridden(tiny: Worker) -> None:
    result = generate(tiny, "a cat", OmniDiffusionSamplingParams(seed=4))
    assert result.images[0].size == (32, 16)
    assert result.params.num_inference_steps == 2
    assert result.seeds == (4,)
    assert generate(tiny, "a cat", OmniDiffusionSamplingParams(width=16, seed=4)).images[0].size == (16, 16)


def test_a_seed_gives_the_same_image_alone_and_among_others(tiny: Worker) -> None:
    several = generate(tiny, "a cat", OmniDiffusionSamplingParams(seed=4, num_outputs_per_prompt=3))
    assert several.seeds == (4, 5, 6)
    alone = generate(tiny, "a cat", OmniDiffusionSamplingParams(seed=5))
    assert np.array_equal(pixels(several.images[1]), pixels(alone.images[0]))
    assert not np.array_equal(pixels(several.images[0]), pixels(several.images[1]))


def test_without_a_seed_one_is_drawn_and_named(tiny: Worker) -> None:
    result = generate(tiny, "a cat", OmniDiffusionSamplingParams(num_inference_steps=1))
    again = generate(tiny, "a cat", OmniDiffusionSamplingParams(num_inference_steps=1, seed=result.seeds[0]))
    assert np.array_equal(pixels(result.images[0]), pixels(again.images[0]))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"height": 18}, "height must be a multiple of 4 for this model, not 18: try 16 or 20"),
        ({"width": 2}, "width must be a multiple of 4 for this model, not 2: try 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(tiny: Worker, params: dict[str, int], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        generate(tiny, "a cat", OmniDiffusionSamplingParams(**params))


def test_a_pipeline_that_is_already_loaded_is_taken_as_it_is(folder: Path, tiny: Worker) -> None:
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    before = set(vars(pipeline.transformer))
    worker = Worker(OmniDiffusionConfig(device="cpu", cache_backend="tea_cache"), pipeline)
    assert worker.facts.defaults == OmniDiffusionSamplingParams(), "those of the pipeline"
    params = generate(tiny, "a cat", FAST).params
    assert np.array_equal(
        pixels(generate(worker, "a cat", params).images[0]), pixels(generate(tiny, "a cat", params).images[0])
    )
    worker.close()
    assert set(vars(pipeline.transformer)) - {"_diffusers_hook"} == before


def test_a_prompt_that_is_not_text_is_refused(tiny: Worker) -> None:
    with pytest.raises(SettingError, match="prompt must be text, not 3"):
        generate(tiny, 3, FAST)  # type: ignore[arg-type]


def test_a_long_prompt_is_cut_and_the_user_is_told(tiny: Worker) -> None:
    assert generate(tiny, "a cat", FAST).notes == ()
    (note,) = generate(tiny, "a " * 5000, FAST).notes
    assert note.endswith("tokens, and the model read the first 8")


def test_what_the_pipeline_refuses_is_a_setting_error(tiny: Worker) -> None:
    with pytest.raises(SettingError, match=r"FluxPipeline refuses these settings: .*max_sequence_length"):
        generate(tiny, "a cat", OmniDiffusionSamplingParams(max_sequence_length=1000))


def test_guidance_that_has_no_effect_is_noted(tiny: Worker) -> None:
    (note,) = generate(tiny, "a cat", OmniDiffusionSamplingParams(guidance_scale=9.0, num_inference_steps=1)).notes
    assert note == "guidance_scale has no effect: the model has no guidance embedding; use true_cfg_scale"


def test_a_class_that_diffusers_does_not_have_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoPipeline"}')
    with pytest.raises(ModelError, match=r"names the class 'NoPipeline', which diffusers .* does not have"):
        Worker(OmniDiffusionConfig(str(tmp_path)))


CACHE = {"cache_backend": "tea_cache", "cache_config": {"schedule": "#.#.#"}}
OFFLOADED: list[dict[str, Any]] = [
    {"enable_cpu_offload": True},
    {"enable_layerwise_offload": True},
    {"gpu_memory": "3GiB"},
    {"enable_layerwise_offload": True, "gpu_memory": "3GiB"},
    {"offload": "model", "exclude": "vae,text_encoder"},
]


@pytest.mark.parametrize("cache", [{}, CACHE], ids=["bare", "cached"])
def test_offload_changes_no_bit(folder: Path, cache: dict[str, Any]) -> None:
    params = OmniDiffusionSamplingParams(num_inference_steps=5, seed=2)
    resident = generate(Worker(OmniDiffusionConfig(str(folder), progress=False, **cache)), "a cat", params)
    assert len(resident.cache) == len(cache) // 2
    for settings in OFFLOADED:
        worker = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **cache, **settings))
        assert worker._attached.offloaded is not None
        assert ("vae" in {part.name for part in worker._attached.offloaded.plan.components}) != ("exclude" in settings)
        result = generate(worker, "a cat", params)
        assert np.array_equal(pixels(result.images[0]), pixels(resident.images[0])), settings
        assert [stats.to_dict() for stats in result.cache] == [stats.to_dict() for stats in resident.cache]
        worker.close()


def test_a_closed_worker_leaves_a_bare_pipeline(folder: Path) -> None:
    worker = Worker(
        OmniDiffusionConfig(str(folder), device="cpu", progress=False, enable_layerwise_offload=True, **CACHE)
    )
    transformer = worker.pipeline.transformer
    assert len(HookRegistry.get_or_create(transformer)._hooks) > 0
    worker.close()
    assert all(len(HookRegistry.get_or_create(module)._hooks) == 0 for module in transformer.modules())


# ------------------------------------------------------------------------------------------------ what goes wrong


def ask(prompt: Any = "a cat", **params: Any) -> Request:
    return Request(prompt, OmniDiffusionSamplingParams(**{"num_inference_steps": 5, "seed": 3, **params}))


class Spoiled(ModelHook):
    """Makes the output of one forward worthless, as an overflow would."""

    def __init__(self, forward: int, value: float) -> None:
        self._left = forward
        self._value = value

    def post_forward(self, module: Any, output: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            output[0].flatten()[7] = self._value
        return output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("cache", [{}, {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.3}}])
def test_latents_that_are_not_finite_are_an_error_and_the_next_request_is_clean(
    folder: Path, value: float, cache: dict[str, Any]
) -> None:
    worker = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **cache))
    (clean,) = worker.run([ask()])
    assert not isinstance(clean, SamovarError)
    registry = HookRegistry.get_or_create(worker.pipeline.transformer)
    registry.register_hook("spoiled", Spoiled(3, value))
    (error,) = worker.run([ask()])
    registry.remove_hook("spoiled")
    assert isinstance(error, NanLatentsError)
    assert error.step == 3
    assert str(error).startswith("After step 3 of 5 the latents contain NaN or infinity.")
    assert (error.cache is None) == (not cache)
    if cache:
        assert error.cache is not None
        assert "3 computed, 0 skipped" in error.cache
        assert "Try without the cache" in str(error)
    (again,) = worker.run([ask()])
    assert not isinstance(again, SamovarError)
    assert np.array_equal(pixels(again.images[0]), pixels(clean.images[0]))
    assert [stats.to_dict() for stats in again.cache] == [stats.to_dict() for stats in clean.cache]
    worker.close()


def test_too_little_memory_names_the_size_and_the_worker_goes_on(tiny: Worker) -> None:
    before = generate(tiny, "a cat", FAST)
    side = 2**22
    with pytest.raises(OutOfMemoryError, match=f"not enough memory for 1 image of {side} x {side} pixels: .+"):
        generate(tiny, "a cat", OmniDiffusionSamplingParams(height=side, width=side, num_inference_steps=1, seed=1))
    assert np.array_equal(pixels(generate(tiny, "a cat", FAST).images[0]), pixels(before.images[0]))


def test_what_breaks_inside_a_pipeline_is_an_error_of_the_request(tiny: Worker) -> None:
    class Broken(ModelHook):
        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("shapes do not fit")

    registry = HookRegistry.get_or_create(tiny.pipeline.transformer)
    registry.register_hook("broken", Broken())
    with pytest.raises(EngineError, match="FluxPipeline failed: RuntimeError: shapes do not fit"):
        generate(tiny, "a cat", FAST)
    registry.remove_hook("broken")
    assert generate(tiny, "a cat", FAST).seeds == (1,)


@pytest.fixture(scope="module")
def automatic(folder: Path) -> Worker:
    return Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, max_batch=4, cache="auto"))


def test_a_tolerance_for_a_request(automatic: Worker, tiny: Worker) -> None:
    request = ask("a cat", seed=3, num_inference_steps=12)
    counts = []
    for tolerance in ("exact", 1.0, None):
        (result,) = automatic.run([replace(request, tolerance=tolerance)])
        said = {"exact": "tolerance=0.0", 1.0: "tolerance=1.0", None: "tolerance=high"}[tolerance]
        assert [stats.denoisers["transformer"].settings for stats in result.cache] == [said]
        assert not isinstance(result, SamovarError)
        counts.append(result.cache[0].computed)
        if tolerance == "exact":
            assert np.array_equal(pixels(result.images[0]), pixels(generate(tiny, "a cat", request.params).images[0]))
    assert counts[1] < counts[2] <= counts[0] == 12
    (refused,) = tiny.run([replace(request, tolerance=1.0)])
    assert isinstance(refused, SettingError)
    assert refused.param == "tolerance"
    with pytest.raises(SettingError, match=r"tolerance='fats'.*'fast'"):
        replace(request, tolerance="fats")


def test_previews_change_no_bit_and_come_nearer(tiny: Worker) -> None:
    events: list[Event] = []
    request = Request("a cat", OmniDiffusionSamplingParams(num_inference_steps=9, seed=3), num_previews=3)
    seen = tiny.make(request, Listener(events.append, lambda: False))
    assert not isinstance(seen, SamovarError)
    plain = generate(tiny, "a cat", request.params)
    assert np.array_equal(pixels(seen.images[0]), pixels(plain.images[0]))
    previews = [event for event in events if isinstance(event, Preview)]
    assert [preview.step for preview in previews] == [2, 4, 7]
    apart = [np.abs(pixels(p.image).astype(float) - pixels(plain.images[0])).mean() for p in previews]
    assert apart[2] < apart[0]


def test_memory_is_told(tiny: Worker) -> None:
    assert tiny.usage().memory_bytes > 50_000_000
    assert tiny.usage().bytes_moved == 0


# ------------------------------------------------------------------------------------------------ from pictures


def editing(folder: Path, tmp_path: Path, class_name: str) -> Worker:
    """The same model behind another pipeline."""
    shutil.copytree(folder, tmp_path / "copy")
    index = tmp_path / "copy" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": class_name}))
    return Worker(OmniDiffusionConfig(str(tmp_path / "copy"), device="cpu", progress=False))


def test_a_image_can_be_drawn_anew(folder: Path, tmp_path: Path, tiny: Worker) -> None:
    worker = editing(folder, tmp_path, "FluxImg2ImgPipeline")
    assert worker.facts.can_edit
    assert not tiny.facts.can_edit
    start = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8))
    made = {}
    for strength in (0.4, 1.0):
        events: list[Event] = []
        params = OmniDiffusionSamplingParams(num_inference_steps=5, seed=3, strength=strength)
        listener = Listener(events.append, lambda: False)
        result = worker.make(Request("a cat", params, start), listener)
        assert not isinstance(result, SamovarError)
        assert result.images[0].size == (40, 24), "as large as what it was made of"
        made[strength] = pixels(result.images[0])
        assert [event.step for event in events if isinstance(event, Progress)] == list(range(1, int(5 * strength) + 1))
    assert not np.array_equal(made[0.4], made[1.0])
    (error,) = worker.run([Request("a cat")])
    assert isinstance(error, SamovarError), "it needs a picture"
    (error,) = tiny.run([Request("a cat", image=start)])
    assert "FluxPipeline takes no image" in str(error)


def test_what_is_transparent_says_where_to_paint(folder: Path, tmp_path: Path) -> None:
    worker = editing(folder, tmp_path, "FluxInpaintPipeline")
    params = OmniDiffusionSamplingParams(num_inference_steps=4, seed=3, strength=1.0)
    made = []
    for box in ((0, 0, 16, 16), (0, 0, 16, 16), (16, 0, 32, 16)):
        start = Image.new("RGBA", (32, 16), (200, 30, 30, 255))
        start.putalpha(Image.composite(Image.new("L", start.size, 0), start.getchannel("A"), boxed(start.size, box)))
        (result,) = worker.run([Request("a cat", params, start)])
        assert not isinstance(result, SamovarError)
        made.append(pixels(result.images[0]))
    assert np.array_equal(made[0], made[1])
    assert not np.array_equal(made[0], made[2])
    (error,) = worker.run([Request("a cat", params, Image.new("RGB", (32, 16)))])
    assert "needs a mask, or an image with an alpha channel" in str(error)


def boxed(size: tuple[int, int], box: tuple[int, int, int, int]) -> Image.Image:
    mask = Image.new("L", size, 0)
    mask.paste(255, box)
    return mask


def test_an_exact_image_is_that_without_a_cache(folder: Path, tiny: Worker) -> None:
    params = OmniDiffusionSamplingParams(num_inference_steps=12, seed=2)
    settings = {"rel_l1_thresh": 1e9}
    worker = Worker(OmniDiffusionConfig(str(folder), progress=False, cache_backend="tea_cache", cache_config=settings))
    events: list[Event] = []
    listener = Listener(events.append, lambda: False)
    exact = worker.make(Request("a cat", params, exact=True), listener)
    assert not isinstance(exact, SamovarError)
    assert np.array_equal(pixels(exact.images[0]), pixels(generate(tiny, "a cat", params).images[0]))
    assert exact.cache == ()
    assert {event.is_computed for event in events if isinstance(event, Progress)} == {None}
    cached = generate(worker, "a cat", params)
    assert cached.cache[0].skipped > 0
    assert not np.array_equal(pixels(exact.images[0]), pixels(cached.images[0]))
    worker.close()


# ------------------------------------------------------------------------------------------------ threads and ranks


def test_threads_take_turns(tiny: Worker) -> None:
    cases = {"a cat": 3, "a dog": 5, "an owl": 4}
    params = {prompt: OmniDiffusionSamplingParams(num_inference_steps=steps, seed=1) for prompt, steps in cases.items()}
    alone = {prompt: generate(tiny, prompt, params[prompt]) for prompt in cases}
    made: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda prompt=prompt: made.update({prompt: generate(tiny, prompt, params[prompt])}))
        for prompt in cases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in cases:
        assert np.array_equal(pixels(made[prompt].images[0]), pixels(alone[prompt].images[0])), prompt


def test_a_pause_within_a_pause_ends_with_the_outer_one(folder: Path) -> None:
    worker = Worker(OmniDiffusionConfig(str(folder), device="cpu", progress=False, **CACHE))
    cache: Any = worker._attached.cache
    (hook,) = cache._modules().values()
    with cache.paused():
        with cache.paused():
            assert hook.is_paused
        assert hook.is_paused
    assert not hook.is_paused
    worker.close()


def test_a_gpu_that_no_longer_obeys_is_noticed(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert tiny.is_healthy()
    monkeypatch.setattr(tiny, "device", torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.synchronize", fail)
    assert not tiny.is_healthy()
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert tiny.is_healthy()


def test_a_library_without_memory_is_out_of_memory(tiny: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**call: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    monkeypatch.setattr(tiny.pipeline, "encode_prompt", lambda *args, **kwargs: fail())
    with pytest.raises(OutOfMemoryError, match="CUBLAS_STATUS_ALLOC_FAILED"):
        generate(tiny, "a cat", FAST)


def test_a_warm_up_makes_an_image_and_one_that_fails_says_how_to_go_without(
    tiny: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    run = tiny._run
    monkeypatch.setattr(tiny, "_run", lambda *args: made.append(run(*args)) or made[-1])
    assert tiny.warm_up() > 0.0
    assert len(made) == 1
    monkeypatch.setattr(tiny, "make", lambda request: OutOfMemoryError("too large"))
    with pytest.raises(EngineError, match="The warm-up failed: too large To start without one, give warm_up=False"):
        tiny.warm_up()
