"""A ControlNet guides a model from a folder beside it, as in a pipeline that was saved with it."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from pipelines.builder import Recipe, build
from pipelines.recipes import RECIPES
from pipelines.trying import media
from samovar import Omni
from samovar.core.errors import ModelError, SettingError
from samovar.engine.controlnet import controlled_class, controlnet_bytes, read_controlnets

CONTROL, OTHER, MASK = media("image", 48, 32), media("image", 48, 32).rotate(180), media("mask", 48, 32)
FAMILIES = {
    "FluxPipeline": "FluxControlNetPipeline",
    "StableDiffusion3Pipeline": "StableDiffusion3ControlNetPipeline",
    "QwenImagePipeline": "QwenImageControlNetPipeline",
}
CALL: dict[str, Any] = {"num_inference_steps": 4, "height": 32, "width": 48}


class Models:
    """Tiny models with a ControlNet each: the whole pipeline, the model without it, and the ControlNet alone."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def of(self, family: str) -> tuple[Any, Path, str, str]:
        name = FAMILIES[family]
        pipe = build(getattr(diffusers, name), RECIPES.get(name, Recipe()))
        whole, model, net = (self._where / f"{family}-{part}" for part in ("whole", "model", "net"))
        if not whole.is_dir():
            cls = getattr(diffusers, family)
            pipe.save_pretrained(whole)
            parts = {key: part for key, part in pipe.components.items() if key in inspect.signature(cls).parameters}
            cls(**parts).save_pretrained(model)
            pipe.controlnet.save_pretrained(net)
        return pipe, whole, str(model), str(net)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def flux(models: Models) -> Iterator[Omni]:
    _, _, model, net = models.of("FluxPipeline")
    with Omni(model, task="controlnet", controlnet=net, device="cpu", progress=False) as omni:
        yield omni


def bare(pipe: Any, **call: Any) -> Any:
    torch.manual_seed(3)  # Some encode the control image with noise of no generator.
    pipe.set_progress_bar_config(disable=True)
    made = pipe(prompt="a cat", generator=torch.Generator().manual_seed(3), **CALL, **call)
    return np.asarray(made.images[0])


def pixels(omni: Omni, **call: Any) -> Any:
    return np.asarray(omni.generate("a cat", seed=3, **CALL | call)[0].images[0])


def made(model: Any, how: dict[str, Any], **call: Any) -> Any:
    with Omni(str(model), device="cpu", progress=False, **how) as omni:
        return pixels(omni, **call)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore")
def test_the_bits_are_those_of_the_bare_pipeline(family: str, models: Models) -> None:
    pipe, whole, model, net = models.of(family)
    exact = bare(pipe, control_image=CONTROL)
    assert not np.array_equal(exact, bare(pipe, control_image=OTHER)), "the image matters"
    ways = ({"cache": "auto", "tolerance": "exact"}, {"offload": "layerwise"})
    for how in ways:
        assert np.array_equal(made(model, {"controlnet": net, **how}, image=CONTROL), exact), how
    assert np.array_equal(made(whole, {"cache": {"backend": "tea_cache", "rel_l1_thresh": 0.0}}, image=CONTROL), exact)


@pytest.mark.filterwarnings("ignore")
def test_offload_leaves_the_controlnet_on_the_device_and_counts_it(models: Models) -> None:
    pipe, _, model, net = models.of("FluxPipeline")
    with Omni(model, task="controlnet", controlnet=net, device="cpu", progress=False, offload="model") as omni:
        row = next(line for line in str(omni.explain()).splitlines() if "FluxControlNetModel" in line)
        assert "stays" in row
        assert np.array_equal(pixels(omni, image=CONTROL), bare(pipe, control_image=CONTROL))


@pytest.mark.filterwarnings("ignore")
def test_a_cache_skips_steps(models: Models) -> None:
    _, _, model, net = models.of("FluxPipeline")
    cache = {"backend": "tea_cache", "rel_l1_thresh": 100.0, "min_steps": 2}
    with Omni(model, controlnet=net, cache=cache, device="cpu", progress=False) as omni:
        (result,) = omni.generate("a cat", seed=3, image=CONTROL, **CALL | {"num_inference_steps": 6})
    assert result.cache[0].skipped >= 3


def test_the_image_is_named_as_people_do_and_what_is_missing_is_said(flux: Omni) -> None:
    assert flux.can_edit
    assert np.array_equal(pixels(flux, image=CONTROL), pixels(flux, control_image=CONTROL))
    with pytest.raises(SettingError, match=r"refuses these settings: .* It was given no control_image"):
        flux.generate("a cat", **CALL)
    with pytest.raises(SettingError, match="image and control_image are the same input"):
        flux.generate("a cat", image=CONTROL, control_image=CONTROL)
    with pytest.raises(SettingError, match="must be an image, not several images"):
        flux.generate("a cat", image=[CONTROL, CONTROL])
    with pytest.raises(SettingError, match="takes no mask"):
        flux.generate("a cat", image=CONTROL, mask=MASK)
    with pytest.raises(SettingError, match="Did you mean 'controlnet_conditioning_scale'"):
        flux.generate("a cat", image=CONTROL, controlnet_condition_scale=0.5)


def test_the_size_is_that_of_the_control_image_unless_given(flux: Omni) -> None:
    assert flux.generate("a cat", image=CONTROL, num_inference_steps=1)[0].images[0].size == CONTROL.size


def test_with_an_image_and_with_a_mask(models: Models) -> None:
    _, _, model, net = models.of("FluxPipeline")
    with Omni(model, task="img2img", controlnet=net, device="cpu", progress=False) as omni:
        assert type(omni._open().pipeline).__name__ == "FluxControlNetImg2ImgPipeline"  # type: ignore[attr-defined]
        with pytest.raises(SettingError, match=r"refuses these settings: .* It was given no control_image"):
            omni.generate("a cat", image=CONTROL)
        one, other = (pixels(omni, image=OTHER, strength=1.0, control_image=each) for each in (CONTROL, MASK))
        assert not np.array_equal(one, other)
    size = {"height": 32, "width": 48, "max_sequence_length": 16}
    with Omni(model, task="inpaint", controlnet=net, defaults=size, device="cpu", progress=False) as omni:
        omni._open().warm_up()  # type: ignore[attr-defined] # It gives all that is needed.
        assert pixels(omni, image=OTHER, mask=MASK, control_image=CONTROL).shape == (32, 48, 3)


def test_several_controlnets_take_an_image_each(models: Models) -> None:
    _, _, model, net = models.of("FluxPipeline")
    with Omni(model, controlnet=[net, net], device="cpu", progress=False) as omni:
        both = pixels(omni, image=[CONTROL, OTHER])
        assert np.array_equal(both, pixels(omni, image=[CONTROL, OTHER], controlnet_conditioning_scale=[1.0, 1.0]))
        assert not np.array_equal(both, pixels(omni, image=[CONTROL, OTHER], controlnet_conditioning_scale=0.5))
        with pytest.raises(SettingError, match="There are 2 ControlNets, so image must be 2 images"):
            omni.generate("a cat", image=CONTROL)


def test_a_controlnet_that_does_not_fit_is_refused(models: Models, tmp_path: Path) -> None:
    _, whole, model, net = models.of("FluxPipeline")
    _, _, _, qwen = models.of("QwenImagePipeline")
    for controlnet, words in (
        (qwen, "is a 'QwenImageControlNetModel', and FluxControlNetPipeline takes a FluxControlNetModel"),
        (str(whole), "is a whole pipeline. Give it as the model"),
        (str(tmp_path / "none"), "is not a folder with the config.json of a ControlNet"),
        (3, "expected a folder or a name on the hub"),
        ([], "expected a folder or a name on the hub"),
    ):
        with pytest.raises(SettingError, match=words):
            Omni(model, controlnet=controlnet)
    wide = tmp_path / "wide"
    shutil.copytree(net, wide)
    config = json.loads((wide / "config.json").read_text()) | {"num_attention_heads": 24}
    (wide / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingError, match="is for a model with num_attention_heads=24, and this one has 2"):
        Omni(model, controlnet=str(wide))


def test_a_pickle_is_not_read(models: Models, tmp_path: Path) -> None:
    _, _, model, net = models.of("FluxPipeline")
    shutil.copytree(net, tmp_path / "net")
    (tmp_path / "net" / "diffusion_pytorch_model.safetensors").unlink()
    torch.save({}, tmp_path / "net" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle, which can run code"):
        Omni(model, controlnet=str(tmp_path / "net"))


def test_tasks_without_what_they_need_are_refused(models: Models) -> None:
    pipe, whole, model, net = models.of("FluxPipeline")
    with pytest.raises(SettingError, match=r"task='controlnet' needs a ControlNet.*Give its folder as controlnet"):
        Omni(model, task="controlnet")
    with pytest.raises(SettingError, match="Did you mean 'controlnet'"):
        Omni(model, task="control_net")
    with pytest.raises(SettingError, match=r"This FluxControlNetPipeline is loaded\. Load it with its ControlNet"):
        Omni(pipe, controlnet=net)
    with pytest.raises(SettingError, match="diffusers has no pipeline like WanPipeline that a ControlNet guides"):
        Omni("motion", controlnet=net)
    assert read_controlnets(Path(net)) == (net,)
    assert controlnet_bytes([net]) == (Path(net) / "diffusion_pytorch_model.safetensors").stat().st_size
    with Omni(str(whole), task="controlnet", device="cpu", progress=False) as omni:
        assert omni.can_edit, "a pipeline that was saved with its ControlNet needs no other"


@pytest.mark.parametrize(
    ("family", "task", "expected"),
    [
        ("FluxPipeline", None, "FluxControlNetPipeline"),
        ("FluxControlNetPipeline", "inpaint", "FluxControlNetInpaintPipeline"),
        ("FluxImg2ImgPipeline", "controlnet", "FluxControlNetPipeline"),
        ("StableDiffusion3Pipeline", "inpaint", "StableDiffusion3ControlNetInpaintingPipeline"),
        ("QwenImagePipeline", "inpaint", "QwenImageControlNetInpaintPipeline"),
        ("StableDiffusionXLPipeline", "img2img", "StableDiffusionXLControlNetImg2ImgPipeline"),
        ("ZImagePipeline", None, "ZImageControlNetPipeline"),
        ("SanaPipeline", "controlnet", "SanaControlNetPipeline"),
        ("HunyuanDiTPipeline", "controlnet", "HunyuanDiTControlNetPipeline"),
    ],
)
def test_the_pipeline_is_found_in_diffusers_tables_or_by_its_name(family: str, task: str | None, expected: str) -> None:
    assert controlled_class(getattr(diffusers, family), task).__name__ == expected
