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
        ({"mode": "layer"}, "mode", "mode='layer'. Did you mean 'layerwise'"),
        ({"gpu_memory": "12"}, "gpu_memory", "gpu_memory='12' is not a size. Did you mean '12GiB'?"),
        ({"gpu_memory": 12}, "gpu_memory", "gpu_memory=12 is not a size. Did you mean '12GiB'?"),
        ({"host_memory": "1.5T"}, "host_memory", "host_memory='1.5T' is not a size. Did you mean '1.5TiB'?"),
        ({"gpu_memory": "12 bananas"}, "gpu_memory", "is not a size. Use text such as '12GiB', or bytes."),
        ({"host_memory": -1}, "host_memory", "host_memory=-1"),
        ({"activations": {"vae": "much"}}, "activations", "activations='much'"),
        ({"exclude": True}, "exclude", "exclude=True; expected names of components"),
        ({"exclude": [3]}, "exclude", "exclude=[3]; expected names of components"),
        ({"spill_folder": {}}, "spill_folder", "spill_folder='{}' is not a folder"),
        ({"spill_folder": "a" * 5000}, "spill_folder", "is not a folder"),
        ({"compress_cache": "a\0b"}, "compress_cache", "is not a folder"),
        ({"device": "cuda:99999999999999999999"}, "device", "is not a device"),
        ({"height": 0}, "height", "height=0; expected a whole number of at least 1"),
        ({"batch": 1.5}, "batch", "batch=1.5; expected a whole number of at least 1"),
        ({"device": "gpu"}, "device", "device='gpu' is not a device"),
        ({"device": "xpu"}, "device", "device='xpu' cannot be used for offload"),
        ({"skipped": 1.0}, "skipped", "skipped=1.0; expected a fraction from 0 to below 1"),
        ({"skipped": -0.1}, "skipped", "skipped=-0.1"),
        ({"timing": {"bus": 1}}, "bus", "'bus' is not a setting of timing"),
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
    [
        ("layers", r"offload='layers'. Did you mean 'layerwise'"),
        ({"gpu_memry": 1}, r"'gpu_memry' is not a setting of offload. Did you mean 'gpu_memory'"),
        (3, r"offload=3; expected the settings of OffloadConfig"),
        ("missing.json", "'missing.json' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        OffloadConfig.read(value)
