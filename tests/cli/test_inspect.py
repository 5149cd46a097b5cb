"""`samovar inspect`, as a person and as a program see it."""

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
    assert lines[2].split() == ["denoiser", "transformer", "FluxTransformer2DModel", "11.89", "B", "22.15", "GiB"]
    stacks = [line for line in lines if " x Flux" in line]
    assert [line.index("GiB") for line in stacks] == [stacks[0].index("GiB")] * 2, "aligned"
    assert stacks[0].endswith("carries encoder_hidden_states, hidden_states")
    assert any(line.split()[:3] == ["step", "cache", "yes"] for line in lines)
    assert not any("\x1b" in line for line in lines), "no colours but on a terminal"


def test_inspect_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "emoji"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("FluxPipeline  weights as float16")
    assert "13.1 M" in text


def test_inspect_as_json_and_with_a_probe(tmp_path: Path) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    result = run("inspect", str(tmp_path), "--json", "--probe")
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["class_name"] == "FluxPipeline"
    assert report["components"][0]["anatomy"]["stacks"][1]["streams"][1] == {
        "parameter": "hidden_states",
        "kind": "image",
    }


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
    assert asked["allow_patterns"] == ["model_index.json", "config.json", "*/config.json"]


def test_quantised_weights_cannot_be_offloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_flux_pipeline().save_pretrained(tmp_path)
    config = tmp_path / "transformer" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "x"}}))
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    features = {feature["name"]: feature for feature in json.loads(capsys.readouterr().out)["features"]}
    assert features["step cache"]["works"] is True
    for name in ("layerwise offload", "model offload"):
        assert features[name]["works"] is False
        assert "transformer: quantised" in features[name]["reason"]
