"""`samovar inspect`, as a person and as a program see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
