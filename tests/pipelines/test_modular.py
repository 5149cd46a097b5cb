"""Modular pipelines through the engine: the bits of the bare ones, cached and offloaded too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from samovar import Omni
from samovar.core.errors import ModelError, SettingError
from samovar.engine import Preview, Progress
from samovar.engine.planning import make_plan
from samovar.offload import OffloadConfig

from .modular import CALLS, save_modular, tiny_modular, without_decoder
from .trying import media

pytest.importorskip("diffusers", minversion="0.42")
STEPS = 4
SLOW = ("sd3", "z-image")
IMAGE, MASK = media("image", 48, 32), media("mask", 48, 32)


class Folders(dict[str, Path]):
    """Saved pipelines by name, each made when it is first asked for."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def __missing__(self, name: str) -> Path:
        self[name] = save_modular(tiny_modular(name), self._where / name)
        return self[name]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def qwen(folders: Folders) -> Iterator[Omni]:
    with Omni(str(folders["qwen"]), device="cpu", progress=False) as omni:
        yield omni


def bare(name: str, **call: Any) -> Any:
    """What the pipeline makes by itself."""
    generator = torch.Generator().manual_seed(3)
    made = tiny_modular(name)(prompt="a cat", generator=generator, num_inference_steps=STEPS, **CALLS[name] | call)
    if "images" in made.values:
        return np.asarray(made.images[0])
    return (np.asarray(made.videos[0]).clip(0, 1) * 255).round().astype(np.uint8)


def made(folder: Path, name: str, *, how: dict[str, Any], **call: Any) -> Any:
    with Omni(str(folder), device="cpu", progress=False, **how) as omni:
        (result,) = omni.generate("a cat", seed=3, num_inference_steps=STEPS, **CALLS[name] | call)
    output = result.outputs[0]
    return np.asarray(output) if isinstance(output, Image.Image) else output.frames


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow][: name in SLOW]) for name in CALLS])
@pytest.mark.filterwarnings("ignore")
def test_the_bits_are_those_of_the_bare_pipeline(name: str, folders: Folders) -> None:
    exact = bare(name)
    for how in ({"cache": "auto", "tolerance": "exact"}, {"offload": "layerwise"}):
        assert np.array_equal(made(folders[name], name, how=how), exact), how


def test_within_a_budget_they_are_too(folders: Folders) -> None:
    """The plan is made without weights, by calling the blocks."""
    size = {name: CALLS["flux"][name] for name in ("height", "width")}
    whole = make_plan(str(folders["flux"]), OffloadConfig(gpu_memory="1GiB"), size)
    budget = whole.plan.peak_bytes - 32 * 2**10
    with Omni(str(folders["flux"]), device="cpu", progress=False, gpu_memory=budget, defaults=size) as omni:
        assert "everything fits" in str(whole.plan)
        assert "everything fits" not in str(omni.explain())
        (result,) = omni.generate("a cat", seed=3, num_inference_steps=STEPS, **CALLS["flux"])
    assert np.array_equal(np.asarray(result.images[0]), bare("flux"))


@pytest.mark.filterwarnings("ignore")
def test_a_cache_skips_steps_of_both_branches(folders: Folders) -> None:
    cache = {"backend": "tea_cache", "rel_l1_thresh": 100.0, "min_steps": 2}
    for name, branches in (("flux", 1), ("qwen", 2), ("wan", 2)):
        with Omni(str(folders[name]), device="cpu", progress=False, cache=cache) as omni:
            (result,) = omni.generate("a cat", seed=3, num_inference_steps=6, **CALLS[name])
        assert result.cache[0].skipped >= 3 * branches, name


def test_what_is_missing_or_not_taken_is_said_before_anything_is_computed(qwen: Omni) -> None:
    for given, words in (
        ({"mask": MASK}, "Required input 'image' is missing. It was given no image"),
        ({"control_image": IMAGE}, "takes no control_image"),
        ({"last_image": IMAGE}, "takes no last_image. It takes mask_image, image"),
        ({"guidance_scal": 2.0}, "Did you mean 'guidance_scale'"),
        ({"num_inference_step": 2}, "Did you mean 'num_inference_steps'"),
        ({"num_frames": 5}, "makes images of its own length, and takes no num_frames"),
        ({"strength": 0.5}, "strength has no effect"),
        ({"layers": 4, "strength": "much"}, "strength='much'; expected a number"),
    ):
        with pytest.raises(SettingError, match=words):
            qwen.generate("a cat", **given)


def test_an_image_and_a_mask(qwen: Omni) -> None:
    call = {"seed": 3, "num_inference_steps": 2, "strength": 1.0, "image": IMAGE}
    whole, part = (qwen.generate("a cat", **call, **more)[0].images[0] for more in ({}, {"mask": MASK}))
    assert whole.size == part.size == (48, 32)
    assert whole.tobytes() != part.tobytes()


def test_steps_are_told_with_previews_and_a_request_can_be_left(qwen: Omni) -> None:
    call: dict[str, Any] = {"seed": 3, "num_inference_steps": 6, "num_previews": 2, "stream": True}
    events = list(qwen.generate("a cat", **call, **CALLS["qwen"]))
    steps = [(event.step, event.num_steps) for event in events if isinstance(event, Progress)]
    assert steps == [(step, 6) for step in range(1, 7)]
    assert [event.image.size for event in events if isinstance(event, Preview)] == [(32, 16)] * 2
    events = list(qwen.generate("a cat", image=IMAGE, strength=0.5, **call))
    steps = [(event.step, event.num_steps) for event in events if isinstance(event, Progress)]
    assert steps == [(1, 3), (2, 3), (3, 3)], "half of the steps are made"
    stream = qwen.generate("a cat", **call, **CALLS["qwen"])
    assert next(event for event in stream if isinstance(event, Progress)).step == 1
    stream.close()  # type: ignore[attr-defined]
    assert qwen.generate("a cat", seed=3, num_inference_steps=2, **CALLS["qwen"])[0].images


@pytest.mark.filterwarnings("ignore")
def test_a_controlnet_is_one_of_its_components(tmp_path: Path) -> None:
    from diffusers import QwenImageControlNetModel

    config = {key: value for key, value in tiny_modular("qwen").transformer.config.items() if not key.startswith("_")}
    takes = inspect.signature(QwenImageControlNetModel).parameters
    net = QwenImageControlNetModel(**{key: value for key, value in config.items() if key in takes} | {"num_layers": 1})
    for weight in net.parameters():
        torch.nn.init.constant_(weight, 0.1)
    pipe = tiny_modular("qwen")
    pipe.register_components(controlnet=net)
    save_modular(pipe, tmp_path)
    size, how = {"height": 32, "width": 48}, {"offload": "layerwise"}
    guided, plain = (made(tmp_path, "qwen", how=how, **size, **more) for more in ({"control_image": IMAGE}, {}))
    assert np.array_equal(plain, bare("qwen", **size)), "it is not called without an image"
    assert not np.array_equal(guided, plain)


def test_a_loaded_pipeline_is_what_it_was_afterwards() -> None:
    pipe = tiny_modular("flux")
    cls, before = type(pipe), set(vars(pipe))
    with Omni(pipe, progress=False, max_batch=2) as omni:
        results = omni.generate(["a cat", "a dog"], seed=3, num_inference_steps=2, **CALLS["flux"])
        assert [result.error for result in results] == [None, None]
    assert type(pipe) is cls
    assert set(vars(pipe)) == before


def test_an_output_of_no_known_kind_is_refused_at_load() -> None:
    pipe = tiny_modular("flux", without_decoder(tiny_modular("flux")))
    cls = type(pipe)
    with pytest.raises(ModelError, match=r"returns .*latents.*: it makes no images, video or sound"):
        Omni(pipe)
    assert type(pipe) is cls
