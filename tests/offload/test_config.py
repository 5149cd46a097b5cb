"""Settings are checked when they are made, and read from a name, a mapping or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.core.errors import SettingError
from samovar.offload import OffloadConfig, Timing


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        (
            {"mode": "layer"},
            "mode",
            "expected one of 'auto', 'model', 'layerwise'. Did you mean 'layerwise'",
        ),
        ({"gpu_memory": "12"}, "gpu_memory", "Did you mean '12GiB'?"),
        ({"activations": {"vae": "much"}}, "activations", "activations='much'; expected a size"),
        ({"device": "cuda:99999999999999999999"}, "device", "is not a device"),
        ({"device": "meta"}, "device", "device='meta'; expected 'cuda' or 'cpu'"),
        ({"height": 0}, "height", "height=0; expected a whole number, 1 or more"),
        ({"skipped": 1.0}, "skipped", "skipped=1.0; expected a number from 0 to below 1"),
        ({"timing": {"bus": 1}}, "bus", "'bus' is not a setting of timing"),
        ({"timing": {"block_s": [1]}}, "block_s", "block_s=[1]; expected seconds by name"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_name(settings: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(SettingError) as refusal:
        OffloadConfig(**settings)
    assert message in str(refusal.value)
    assert refusal.value.param == param


def test_a_config_is_read_from_a_name_a_mapping_or_a_file(tmp_path: Path) -> None:
    config = OffloadConfig("layerwise", gpu_memory="8GiB", exclude=("vae",), timing=Timing(block_s={"a.b": 1.0}))
    plain = {
        "mode": "layerwise", "gpu_memory": "8GiB", "exclude": ["vae"], "timing": {"block_s": {"a.b": 1.0}},
    }  # fmt: skip
    (tmp_path / "offload.json").write_text(json.dumps(plain))
    (tmp_path / "all.yaml").write_text(f"offload: {json.dumps(plain)}")
    for given in (config, plain, tmp_path / "offload.json", str(tmp_path / "all.yaml")):
        assert OffloadConfig.read(given) == config
    assert OffloadConfig.read(None) == OffloadConfig.read("auto") == OffloadConfig()
    assert OffloadConfig.read("model") == OffloadConfig("model")
    assert OffloadConfig(exclude="vae") == OffloadConfig(exclude=("vae",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "message"),
    [("layers", r"offload='layers'. Did you mean 'layerwise'"), (True, "offload=True does not say how. Use 'auto'")],
)
def test_what_cannot_be_read_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OffloadConfig.read(value)
