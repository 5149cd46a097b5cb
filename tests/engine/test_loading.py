"""Where a model is, what of it is refused before it can run, and how weights come in: ControlNets, quantised."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from asking import ask, pixels, worker_of

from pipelines import tiny_flux_pipeline
from pipelines.builder import Recipe, build
from pipelines.gguf_files import write_gguf
from pipelines.recipes import RECIPES
from pipelines.trying import media
from samovar.core import quantisers
from samovar.core.errors import ModelError, SettingError
from samovar.engine import OmniDiffusionConfig
from samovar.engine.models import fetch_model, find_model, find_variant, load_pipeline, resolve_dtype
from samovar.engine.quantize import Quantization

CPU = torch.device("cpu")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change(file: Path, **entries: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) | entries
    file.write_text(json.dumps(content))
    return content


def test_names_folders_and_what_is_neither(folder: Path, tmp_path: Path) -> None:
    found = find_model("emoji")
    assert found is not None
    assert (find_model(str(folder)), find_model("black-forest-labs/FLUX.1-dev")) == (folder, None), "None is the hub"
    for wrong in ("emojy", "../etc", str(tmp_path), "a/b/c", "", "http://x/y"):
        with pytest.raises(ModelError, match="is not a built-in model"):
            find_model(wrong)
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ModelError, match=r"'nobody/no-such-model' is not here and could not be downloaded"):
        fetch_model("nobody/no-such-model")
    assert [resolve_dtype("auto", torch.device(name)) for name in ("cpu", "cuda")] == [torch.float32, torch.bfloat16]


class Canary:
    """What a pickle can do: run a command when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._file}",)


def pickled(folder: Path, canary: Path) -> None:
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae" / "diffusion_pytorch_model.ckpt").write_bytes(pickle.dumps(Canary(canary)))


def own_pipeline(folder: Path, canary: Path) -> None:
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w').close()\nfrom diffusers import FluxPipeline as Own\n")
    change(folder / "model_index.json", _class_name=["own", "Own"])


def own_part(folder: Path, canary: Path) -> None:
    (folder / "vae" / "own.py").write_text(
        f"open({str(canary)!r}, 'w').close()\nfrom diffusers import AutoencoderKL as Own\n"
    )
    change(folder / "model_index.json", vae=["own", "Own"])


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (pickled, r"diffusion_pytorch_model.ckpt is a pickle, which can run code"),
        (own_pipeline, r"asks for code that comes with the model: .*own\.py.* trust_remote_code=True"),
        (own_part, r"asks for code that comes with the model: .*own\.py.* trust_remote_code=True"),
    ],
)
def test_what_could_run_code_is_refused_and_never_read(
    copy: Path, tmp_path: Path, poison: Callable[[Path, Path], None], message: str
) -> None:
    poison(copy, tmp_path / "canary")
    with pytest.raises(ModelError, match=message):
        load_pipeline(copy, torch.float32)
    assert not (tmp_path / "canary").exists()


def test_remote_code_is_switched_off_while_what_is_not_trusted_is_loaded(
    folder: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.utils import dynamic_modules_utils as switches

    monkeypatch.setattr(switches, "DIFFUSERS_DISABLE_REMOTE_CODE", False)
    monkeypatch.setattr(switches, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    seen: list[bool] = []
    load = diffusers.FluxPipeline.from_pretrained

    def noted(*args: Any, **how: Any) -> Any:
        seen.append(switches.DIFFUSERS_DISABLE_REMOTE_CODE)
        return load(*args, **how)

    monkeypatch.setattr(diffusers.FluxPipeline, "from_pretrained", noted)
    load_pipeline(folder, torch.float32)
    assert (seen, switches.DIFFUSERS_DISABLE_REMOTE_CODE) == ([True], False)
    own_pipeline(copy, tmp_path / "canary")
    load_pipeline(copy, torch.float32, trust_remote_code=True)
    assert (tmp_path / "canary").exists(), "it runs if it is trusted"


def test_a_part_that_is_missing_or_needs_another_package_is_named(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = copy / "vae" / "diffusion_pytorch_model.safetensors"
    weights = weights.rename(tmp_path / weights.name)
    with pytest.raises(ModelError, match=r"copy cannot be loaded: .* Check its files\."):
        load_pipeline(copy, torch.float32)
    weights.rename(copy / "vae" / weights.name)
    change(copy / "transformer" / "config.json", quantization_config={"quant_method": "modelopt", "quant_type": "FP8"})
    with pytest.raises(ModelError, match=r"needs a package that is not installed: .*modelopt"):
        load_pipeline(copy, torch.float32)


def test_a_folder_that_only_has_a_variant_is_loaded(folder: Path, copy: Path) -> None:
    def rename(part: str, variant: str) -> None:
        for file in (copy / part).glob("*.safetensors"):
            file.rename(file.with_name(f"{file.stem}.{variant}.safetensors"))

    assert find_variant(folder) is None
    for part in ("transformer", "text_encoder_2"):
        rename(part, "fp16")
    assert find_variant(copy) == "fp16", "the other parts have no variant, and are loaded as they are"
    ours, theirs = (load_pipeline(each, torch.float32).transformer.state_dict() for each in (copy, folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rename("vae", "bf16")
    with pytest.raises(ModelError, match="mixes the variants bf16, fp16"):
        find_variant(copy)


# ------------------------------------------------------------------------------------------------ ControlNets

CONTROL, OTHER, MASK = media("image", 48, 32), media("image", 48, 32).rotate(180), media("mask", 48, 32)
SIZE: dict[str, Any] = {"num_inference_steps": 4, "height": 32, "width": 48}


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """By family: a pipeline with its ControlNet, and the folder of both."""
    where = tmp_path_factory.mktemp("controlled")

    def of(family: str) -> tuple[Any, Path]:
        name = f"{family}ControlNetPipeline"
        pipe = build(getattr(diffusers, name), RECIPES.get(name, Recipe()))
        if not (where / family).is_dir():
            pipe.save_pretrained(where / family)
        return pipe, where / family

    return of


@pytest.mark.parametrize("family", ["Flux", "StableDiffusion3", "QwenImage"])
@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_that_was_saved_with_its_controlnet_gives_its_bits(family: str, controlled: Any) -> None:
    pipe, folder = controlled(family)
    pipe.set_progress_bar_config(disable=True)

    def bare(image: Any) -> Any:
        torch.manual_seed(3)  # Some encode the control image with noise of no generator.
        how = {"prompt": "a cat", "generator": torch.Generator().manual_seed(3), "control_image": image}
        return np.asarray(pipe(**SIZE, **how).images[0])

    exact = bare(CONTROL)
    assert not np.array_equal(exact, bare(OTHER)), "the image matters"
    for how in ({}, {"offload": "layerwise"}):
        worker = worker_of(folder, **how)
        for name in ("image", "control_image"):
            given = {"image": CONTROL} if name == "image" else {"inputs": {name: CONTROL}}
            assert np.array_equal(pixels(worker.make(ask(how=given, **SIZE))), exact), how
        worker.close()


@pytest.mark.filterwarnings("ignore")
def test_a_controlnet_goes_with_other_tasks(controlled: Any) -> None:
    _, folder = controlled("Flux")
    worker = worker_of(folder, task="inpaint", defaults={**SIZE, "max_sequence_length": 16})
    worker.warm_up()  # It gives all that is needed.
    inputs = {"mask": MASK, "control_image": CONTROL}
    assert pixels(worker.make(ask(how={"image": OTHER, "inputs": inputs}))).shape == (32, 48, 3)
    worker.close()
    with pytest.raises(SettingError, match="Give a folder that was saved with its ControlNet"):
        worker_of(folder, task="controlnet")


# ------------------------------------------------------------------------------------------------ quantised


def test_a_package_that_is_not_installed_or_a_compiler_that_cannot_trace_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "any.gguf"
    file.touch()
    if quantisers.QUANTISERS["gguf"].problem() == "":
        with pytest.raises(SettingError, match="compile=True cannot trace the weights of a GGUF file"):
            OmniDiffusionConfig("emoji", device="cpu", quantization=str(file), compile=True)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    for name, package in (("int8", "torchao>="), ("int4", "sdnq>="), (str(file), "gguf>=")):
        with pytest.raises(SettingError, match=rf"needs \w+, which is not installed.*pip install '{package}"):
            Quantization.read(name, CPU)


def test_the_model_decides_what_can_be_quantised(folder: Path) -> None:
    pytest.importorskip("torchao")
    with pytest.raises(SettingError, match=r"'transfomer' is not a component .* Did you mean 'transformer'\?"):
        load_pipeline(folder, torch.float32, quantization=Quantization.read({"transfomer": "int8"}, CPU))
    pipe = tiny_flux_pipeline()
    for settings in ({"quantization": "int8"}, {"loss": "int8", "gpu_memory": "1GiB"}):
        with pytest.raises(SettingError, match="Weights are quantised while they are loaded, and this FluxPipeline is"):
            worker_of(pipe=pipe, **settings)
    two: Any = {name: type("Part", (), {"role": "denoiser"}) for name in ("transformer", "transformer_2")}
    with pytest.raises(SettingError, match=r"has the denoisers transformer and transformer_2\. .*transformer=x\.gguf"):
        Quantization({"": "x.gguf"}).by_component(two)
    assert Quantization({"": "int8"}).by_component(two) == dict.fromkeys(two, "int8")
    with pytest.raises(SettingError, match=r"quantization='int8' is for a denoiser, and this model has none, only vae"):
        Quantization({"": "int8"}).by_component({"vae": type("Part", (), {"role": "vae"})})  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "gguf"])
def test_every_way_to_run_gives_the_same_images(folder: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip({"int4": "sdnq", "gguf": "gguf"}.get(kind, "torchao"))
    if kind == "gguf":
        kind = str(write_gguf(tmp_path / "tiny.gguf", load_pipeline(folder, torch.float32).transformer))
    images = []
    tight = {"gpu_memory": "128KiB", "activations": 0}
    for settings in ({}, {"offload": "layerwise"}, {"offload": tight}, {"cache": {"rel_l1_thresh": 0.0}}):
        worker = worker_of(folder, quantization=kind, **settings)
        images.append(pixels(worker.make(ask())).tobytes())
        text = str(worker.explain())
        assert "quantization: transformer as " in text
        assert ("between the phases of a run" in text) == ("offload" in settings), "weights come and go"
        worker.close()
    assert len(set(images)) == 1
    assert pixels(worker_of(folder).make(ask())).tobytes() != images[0], "it is quantised"


def test_components_are_quantised_each_as_asked(folder: Path) -> None:
    pytest.importorskip("torchao")
    pytest.importorskip("sdnq")
    setting = Quantization.read({"transformer": "int4", "text_encoder": "int8", "vae": "none"}, CPU)
    pipe = load_pipeline(folder, torch.float32, quantization=setting)
    linears = {path: part for path, part in pipe.transformer.named_modules() if isinstance(part, torch.nn.Linear)}
    changed = {
        path
        for path, part in linears.items()
        if type(part.weight) is not torch.nn.Parameter or type(part) is not torch.nn.Linear
    }
    assert changed
    assert all(path.startswith(("transformer_blocks.", "single_transformer_blocks.")) for path in changed)
    assert type(pipe.text_encoder.encoder.layers[0].mlp.fc1.weight).__name__ == "Int8Tensor"
    assert type(pipe.text_encoder_2.encoder.block[0].layer[0].SelfAttention.q.weight) is torch.nn.Parameter


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:inner dimension:UserWarning")  # bitsandbytes, of layers as small as these.
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "nf4"])
def test_every_kind_runs_on_a_gpu_and_streams(folder: Path, kind: str) -> None:
    pytest.importorskip({"int4": "sdnq", "nf4": "bitsandbytes"}.get(kind, "torchao"))
    images = []
    for settings in ({"quantization": kind}, {"quantization": kind, "offload": "layerwise"}, {"gpu_memory": "300MiB"}):
        worker = worker_of(folder, device="cuda", **settings)
        images.append(pixels(worker.make(ask())).tobytes())
        worker.close()
    assert images[0] == images[1] != images[2]
