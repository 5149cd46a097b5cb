"""`samovar plan`: where weights would live, and what cannot fit."""

from __future__ import annotations

import json

import pytest

from samovar import cli


def test_a_plan_is_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "FluxTransformer2DModel", "--gpu-memory", "12GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["transformer", "FluxTransformer2DModel", "22.15", "GiB"]
    assert "of 57 blocks stream" in lines[1]
    assert lines[3].startswith("Expected peak: 11.")
    assert lines[-1] == "Note: activations are assumed to be 1.00 GiB per component."


def test_the_built_in_model_fits_nearly_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "Emoji", "--gpu-memory", "64MiB", "--activations", "16MiB"]) == 0
    text = capsys.readouterr().out
    assert "everything fits, nothing is offloaded" in text
    assert "assumed" not in text
    assert cli.main(["plan", "emoji", "--mode", "model"]) == 0
    assert "is loaded when it is called" in capsys.readouterr().out


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "emoji", "--mode", "layerwise", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    placements = {component["name"]: component["placement"] for component in plan["components"]}
    assert placements["transformer"] == "streams"
    assert placements["vae"] == "resident"
    assert plan["offloads_anything"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["FluxTransformer2DModel", "--gpu-memory", "1GiB"], "is not enough: at least"),
        (["emoji"], "needs a budget"),
        (["emoji", "--gpu-memory", "much"], "'much' is not a size"),
        (["emoji", "--mode", "layrwise"], "Did you mean 'layerwise'?"),
        (["FluxTransformr2DModel", "--gpu-memory", "1GiB"], "Did you mean 'FluxTransformer2DModel'?"),
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
