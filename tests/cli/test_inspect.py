"""`samovar inspect` and `samovar plan`, as a person and as a program see them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from pipelines import tiny_flux_pipeline
from samovar import cli


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "samovar", *arguments], capture_output=True, text=True, check=False)


def test_inspect_a_class(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "FluxTransformer2DModel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FluxTransformer2DModel  weights as bfloat16"
    assert lines[2].split() == ["denoiser", "transformer", "FluxTransformer2DModel", "11,891.18", "M", "22.15", "GiB"]
    stacks = [line for line in lines if " x Flux" in line]
    assert [line.index("GiB") for line in stacks] == [stacks[0].index("GiB")] * 2, "aligned"
    assert any(line.split()[:3] == ["step", "cache", "yes"] for line in lines)


def test_inspect_as_json(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--json")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["class_name"] == "FluxPipeline"
    assert report["components"][0]["anatomy"]["stacks"][1]["path"] == "single_transformer_blocks"


def test_a_hub_name_offline_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def offline(name: str, **_: object) -> None:
        raise LocalEntryNotFoundError("There is no network.\nAnd more.")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert cli.main(["inspect", "somebody/some-model"]) == 2
    said = capsys.readouterr().err
    assert "'somebody/some-model' is not in the local cache and could not be downloaded: There is no network." in said
    assert "hf download somebody/some-model --local-dir FOLDER" in said


def test_a_hub_name_is_read_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    asked: dict[str, Any] = {}

    def download(name: str, **how: Any) -> str:
        asked.update(how)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert cli.main(["inspect", "--model", "somebody/some-model"]) == 0
    assert capsys.readouterr().out.startswith("FluxPipeline")
    kept = {str(file.relative_to(tmp_path)) for file in _asked_for(tmp_path, asked)}
    left = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()} - kept
    assert {"model_index.json", "vae/config.json", "scheduler/scheduler_config.json"} <= kept
    assert {"tokenizer/tokenizer.json", "tokenizer_2/tokenizer.json"} <= kept
    assert left
    assert all(file.endswith(".safetensors") for file in left)


def _asked_for(folder: Path, how: dict[str, Any]) -> list[Path]:
    """The files that the hub would send."""
    from huggingface_hub.utils import filter_repo_objects

    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    patterns = {name: how.get(name) for name in ("allow_patterns", "ignore_patterns")}
    return [folder / name for name in filter_repo_objects(names, **patterns)]


# ------------------------------------------------------------------------------------------------ plan


def test_a_plan_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "FluxTransformer2DModel", "--gpu-memory", "12GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["transformer", "FluxTransformer2DModel", "22.15", "GiB"]
    assert "of 57 blocks stream" in lines[1]
    assert lines[3].startswith("Expected peak: 11.")
    assert lines[4].startswith("Note: activations are estimated for 1024 x 1024 pixels of a FluxTransformer2DModel")
    assert lines[5].startswith("Host memory: 1")


def test_the_built_in_model_fits_nearly_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "Emoji", "--gpu-memory", "64MiB", "--activations", "16MiB"]) == 0
    text = capsys.readouterr().out
    assert "everything fits, nothing is offloaded" in text
    assert "assumed" not in text
    assert cli.main(["plan", "emoji", "--gpu-memory", "320MiB"]) == 0
    assert "Note: activations are those of 128 x 128 pixels" in capsys.readouterr().out
    assert cli.main(["plan", "emoji", "--gpu-memory", "320MiB", "--height", "1024", "--width", "1024"]) == 2
    assert "of activations" in capsys.readouterr().err
    assert cli.main(["plan", "emoji", "--mode", "model"]) == 0
    assert "is loaded when it is called" in capsys.readouterr().out


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "emoji", "--mode", "layerwise", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    placements = {component["name"]: component["placement"] for component in plan["components"]}
    assert placements["transformer"] == "streams"
    assert placements["vae"] == "turns"
    assert plan["offloads_anything"] is True
    assert cli.main(["plan", "emoji", "--mode", "layerwise", "--json", "--exclude", "vae, text_encoder"]) == 0
    left = [component["name"] for component in json.loads(capsys.readouterr().out)["components"]]
    assert left == [name for name in placements if name not in ("vae", "text_encoder")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FluxTransformer2DModel", "--gpu-memory", "1GiB"], "is not enough: at least"),
        (["emoji", "--gpu-memory", "1GiB", "--height", "0"], "--height 0; expected a whole number, 1 or more"),
        (["emoji", "--gpu-memory", "1GiB", "--frames", "9"], "--frames 9 means nothing to FluxPipeline"),
        (["emoji", "--gpu-memory", "1GiB", "--height", "130"], "FluxPipeline makes --height 128 of --height 130"),
        (["emoji"], "--gpu-memory"),
        (["emoji", "--gpu-memory", "much"], "'much'; expected a size"),
        (["emoji", "--mode", "layrwise"], "Did you mean 'layerwise'?"),
        (["emoji", "--mode", "model", "--exclude", "vea"], "'vea' is not a component, so it cannot be in exclude"),
        (["FluxTransformr2DModel", "--gpu-memory", "1GiB"], "Did you mean 'FluxTransformer2DModel'?"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_plan_shows_every_choice_and_takes_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    size = ["--height", "16", "--width", "32"]
    assert cli.main(["plan", str(tmp_path), "--gpu-memory", "1GiB", "--loss", "int4", *size]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("weights"))
    assert [line.split()[0] for line in lines[head + 1 : head + 6]] == ["exact", "int8", "fp8", "int4", "nf4"]
    assert lines[head + 1].endswith("taken")
    assert lines[-1] == "Exact weights stay on the GPU, and lose least of those that do."
    assert cli.main(["plan", str(tmp_path), "--gpu-memory", "1GiB", "--quantization", "nf4", "--json", *size]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["choices"]) == 1, "it is made already"
    assert cli.main(["plan", str(tmp_path), "--quantization", "transformer=int8,unet=int8", *size]) == 2
    assert "'unet' is not a component" in capsys.readouterr().err


def test_a_gguf_file_alone_is_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["inspect"], ["plan", "--gpu-memory", "2GiB"], ["generate", "a cat"]):
        assert cli.main([*command, "t5.gguf"]) == 2
        assert "is a GGUF file, which holds one component. Give the model's folder" in capsys.readouterr().err
