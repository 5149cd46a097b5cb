"""A modular pipeline is called and loaded like any other, and refuses what it cannot do."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.modular import CALLS, save_modular, tiny_modular, without_decoder
from samovar.arch.folder import check_folder, pipeline_class
from samovar.arch.modular import adapt
from samovar.arch.skeleton import build_pipeline, read_skeleton
from samovar.core.errors import ModelError
from samovar.trace.dry_run import RequestSize, dry_run

pytest.importorskip("diffusers", minversion="0.42")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen-Image. Not to be changed: copy it."""
    return save_modular(tiny_modular("qwen"), tmp_path_factory.mktemp("models") / "qwen")


def loaded(folder: Path) -> Any:
    cls = pipeline_class(folder, check_folder(folder))
    return cls.from_pretrained(folder, torch_dtype=torch.float32, variant=None)


def changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy with another index."""
    shutil.copytree(folder, target)
    file = target / "modular_model_index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    return target


def bits(pipe: Any, **call: Any) -> Any:
    made = pipe(prompt="a cat", generator=torch.Generator().manual_seed(3), num_inference_steps=2, **call)
    return np.asarray(made.images[0])


def test_the_call_has_a_signature_and_says_what_it_makes() -> None:
    pipe = tiny_modular("qwen")
    adapt(pipe)
    parameters = inspect.signature(pipe.__call__).parameters
    assert parameters["num_inference_steps"].default == 50
    assert parameters["height"].default == pipe.default_height
    assert parameters["guidance_scale"].default == pipe.guider.guidance_scale, "a setting of the guider"
    assert "kwargs" not in parameters
    assert "control_image" not in parameters, "there is no ControlNet"
    assert [*pipe(prompt="a", num_inference_steps=1, height=16, width=16)] == ["images"]


def test_guidance_is_for_one_call_and_matters() -> None:
    pipe = tiny_modular("qwen")
    guider = pipe.guider
    bare = pipe(prompt="a cat", generator=torch.Generator().manual_seed(3), num_inference_steps=2, **CALLS["qwen"])
    adapt(pipe)
    assert np.array_equal(bits(pipe, **CALLS["qwen"]), np.asarray(bare.images[0]))
    assert np.array_equal(bits(pipe, guidance_scale=guider.guidance_scale, **CALLS["qwen"]), np.asarray(bare.images[0]))
    assert not np.array_equal(bits(pipe, guidance_scale=1.0, **CALLS["qwen"]), np.asarray(bare.images[0]))
    with pytest.raises(AttributeError):
        pipe(prompt="a", guidance_scale=2.0, latents=3)
    assert pipe.guider is guider


def test_an_error_is_raised_and_not_printed_too(capfd: pytest.CaptureFixture[str]) -> None:
    pipe = tiny_modular("z-image")
    adapt(pipe)
    with pytest.raises(ValueError, match="divisible"):
        pipe(prompt="a", height=17, width=17, num_inference_steps=1)
    assert "Error in block" not in capfd.readouterr().err


def test_a_folder_is_loaded_wherever_it_was_saved(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    index = json.loads((moved / "modular_model_index.json").read_text())
    assert index["vae"][2]["pretrained_model_name_or_path"] == str(folder)
    pipe = loaded(moved)
    assert np.array_equal(bits(pipe, **CALLS["qwen"]), bits(loaded(folder), **CALLS["qwen"]))
    assert pipe.controlnet is None
    assert pipe.transformer.dtype == torch.float32


def test_a_skeleton_is_built_and_rehearsed(folder: Path) -> None:
    name, parts = read_skeleton(str(folder))
    assert name == "QwenImageModularPipeline"
    assert {"transformer", "vae", "text_encoder"} == set(parts)
    seen = dry_run(build_pipeline(str(folder), parts), RequestSize(32, 48))
    assert seen.problem is None
    assert set(seen.peaks) == set(parts)
    assert seen.size == RequestSize(32, 48, None, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index["vae"][2].update(subfolder="../vae"), r"'vae' is in '\.\./vae'"),
        (lambda index: index["vae"][2].update(subfolder="other"), "Download it to"),
        (lambda index: index["vae"][2].update(type_hint=["os", "system"]), "code of another library"),
        (lambda index: index["controlnet"][2].update(type_hint=["this", "d"]), "code of another library"),
        (lambda index: index["controlnet"][2].update(type_hint="os"), "the type_hint of 'controlnet' is 'os'"),
        (lambda index: index["vae"][2].update(type_hint=[None, None]), "the type_hint of 'vae'"),
        (lambda index: index.update(_blocks_class_name="SequentialPipelineBlocks"), "only blocks that diffusers"),
        (lambda index: index.update(_blocks_class_name="NoSuchBlocks"), "was made of 'NoSuchBlocks'"),
        (lambda index: index.update(_class_name="NoSuchPipeline"), "does not have"),
    ],
)
def test_an_index_that_leads_elsewhere_is_refused(folder: Path, tmp_path: Path, change: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        loaded(changed(folder, tmp_path / "changed", change))


def test_blocks_that_come_with_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    own = changed(folder, tmp_path / "own", lambda index: None)
    (own / "modular_config.json").write_text(json.dumps({"auto_map": {"ModularPipelineBlocks": "block.Evil"}}))
    (own / "block.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelError, match="comes with blocks of its own"):
        loaded(own)


def test_blocks_put_together_by_hand_are_not_left_out(tmp_path: Path) -> None:
    """diffusers loads the usual blocks in their place."""
    pipe = tiny_modular("flux", without_decoder(tiny_modular("flux")))
    with pytest.raises(ModelError, match="was made of 'SequentialPipelineBlocks'"):
        loaded(save_modular(pipe, tmp_path / "own"))
