"""Where a model is, and which ones are refused before anything of theirs can run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.arch.folder import check_folder
from samovar.core.errors import ModelError
from samovar.engine.models import (
    fetch_model,
    find_model,
    find_variant,
    load_pipeline,
    resolve_dtype,
    without_remote_code,
)


def test_names_folders_and_what_is_neither(folder: Path, tmp_path: Path) -> None:
    found = find_model("emoji")
    assert found is not None
    assert (found / "model_index.json").is_file()
    assert find_model(str(folder)) == folder
    assert find_model("black-forest-labs/FLUX.1-dev") is None, "to be had from the hub"
    for wrong in ("emojy", "../etc", "/nowhere/at/all", str(tmp_path), "a/b/c", "", "http://x/y"):
        with pytest.raises(ModelError, match="is not a built-in model"):
            find_model(wrong)
    with pytest.raises(ModelError, match="must be a name or a folder, not 3"):
        find_model(3)  # type: ignore[arg-type]


def test_a_name_of_the_hub_without_a_network_is_a_clear_error() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(ModelError, match=r"'nobody/no-such-model' is not a folder here and could not be downloaded"):
        fetch_model("nobody/no-such-model")


class Canary:
    """What a pickle can do: run a command when it is read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> object:
        return os.system, (f"touch {self._file}",)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".ckpt"])
def test_pickled_weights_are_refused_and_never_read(folder: Path, tmp_path: Path, suffix: str) -> None:
    copy, canary = tmp_path / "copy", tmp_path / "canary"
    shutil.copytree(folder, copy)
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    (copy / "vae" / f"diffusion_pytorch_model{suffix}").write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(ModelError, match=rf"diffusion_pytorch_model{suffix} is a pickle, which can run code"):
        load_pipeline(copy, torch.float32)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists(), "the canary sings if it is read"


@pytest.mark.parametrize("where", ["pipeline", "component"])
def test_code_that_comes_with_a_model_is_refused_and_never_run(folder: Path, tmp_path: Path, where: str) -> None:
    copy, canary = tmp_path / "copy", tmp_path / "canary"
    shutil.copytree(folder, copy)
    code = f"open({str(canary)!r}, 'w')\nfrom diffusers import FluxPipeline as Own, AutoencoderKL as OwnVae\n"
    index = json.loads((copy / "model_index.json").read_text())
    if where == "pipeline":
        (copy / "own.py").write_text(code)
        index["_class_name"] = ["own", "Own"]
    else:
        (copy / "vae" / "own.py").write_text(code)
        index["vae"] = ["own", "OwnVae"]
    (copy / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(
        ModelError, match=r"asks for code that comes with the model: .*own\.py.* trust_remote_code=True"
    ):
        load_pipeline(copy, torch.float32)
    assert not canary.exists()
    assert check_folder(copy, trust_remote_code=True) == index


def test_a_part_that_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"copy cannot be loaded: .* Check its files\."):
        load_pipeline(tmp_path / "copy", torch.float32)
    (tmp_path / "copy" / "model_index.json").write_text('{"_class_name": "NoPipeline"}')
    with pytest.raises(ModelError, match=r"names the class 'NoPipeline', which diffusers .* does not have"):
        load_pipeline(tmp_path / "copy", torch.float32)


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({"quant_method": "modelopt", "quant_type": "FP8"}, "needs a package that is not installed: .*modelopt"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "diffusers loads such weights on a GPU only"),
    ],
    ids=["package", "GPU"],
)
def test_a_part_whose_quantiser_cannot_run_is_refused(
    quantised: dict[str, Any], expected: str, folder: Path, tmp_path: Path
) -> None:
    if "bitsandbytes" in quantised.values():
        pytest.importorskip("bitsandbytes")
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
    copy = Path(shutil.copytree(folder, tmp_path / "model"))
    file = copy / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantised}))
    with pytest.raises(ModelError, match=expected):
        load_pipeline(copy, torch.float32)


def test_remote_code_is_switched_off_while_what_is_not_trusted_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.utils import dynamic_modules_utils

    environment = dict(os.environ)
    monkeypatch.setattr(dynamic_modules_utils, "DIFFUSERS_DISABLE_REMOTE_CODE", False)
    monkeypatch.setattr(dynamic_modules_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    with without_remote_code():
        assert dynamic_modules_utils.DIFFUSERS_DISABLE_REMOTE_CODE
    load_pipeline(folder, torch.float32)
    assert not dynamic_modules_utils.DIFFUSERS_DISABLE_REMOTE_CODE
    assert dict(os.environ) == environment
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "own.py").write_text("from diffusers import FluxPipeline\n\n\nclass Own(FluxPipeline):\n    pass\n")
    index = json.loads((copy / "model_index.json").read_text()) | {"_class_name": ["own", "Own"]}
    (copy / "model_index.json").write_text(json.dumps(index))
    assert type(load_pipeline(copy, torch.float32, trust_remote_code=True)).__name__ == "Own"


def renamed(folder: Path, parts: tuple[str, ...], variant: str) -> None:
    for part in parts:
        for file in (folder / part).glob("*.safetensors"):
            file.rename(file.with_name(f"{file.stem}.{variant}.safetensors"))


def test_a_folder_that_only_has_a_variant_is_loaded(folder: Path, tmp_path: Path) -> None:
    assert find_variant(folder) is None
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    renamed(copy, ("transformer", "text_encoder_2"), "fp16")
    assert find_variant(copy) == "fp16", "the other parts have no variant, and are loaded as they are"
    ours, theirs = (load_pipeline(each, torch.float32).transformer.state_dict() for each in (copy, folder))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    renamed(copy, ("vae",), "bf16")
    with pytest.raises(ModelError, match="mixes the variants bf16, fp16"):
        find_variant(copy)


def test_sharded_variants_are_known_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    name = tmp_path / "transformer" / "diffusion_pytorch_model.fp16-00001-of-00002.safetensors"
    name.touch()
    assert find_variant(tmp_path) == "fp16"
    (tmp_path / "transformer" / "diffusion_pytorch_model-00001-of-00002.safetensors").touch()
    assert find_variant(tmp_path) is None


def test_auto_is_bfloat16_on_gpus() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [resolve_dtype("auto", device) for device in (cpu, gpu)] == [torch.float32, torch.bfloat16]
    assert resolve_dtype("float16", cpu) == torch.float16


def test_a_folder_that_is_missing_beside_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "flux").mkdir(parents=True)
    (tmp_path / "models" / "flux" / "model_index.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"There is no model 'fluks' in the folder 'models'. It has 'flux'"):
        fetch_model("models/fluks")
