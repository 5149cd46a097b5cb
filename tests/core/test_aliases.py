"""vllm-omni's spellings become ours, and nothing is said twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from samovar.core.aliases import ALIASES, resolve
from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionConfig


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"dtype": "float32"}, {"dtype": "float32"}),
        ({"cache_backend": "auto"}, {"cache": "auto"}),
        ({"cache_config": {"rel_l1_thresh": 0.1}}, {"cache": {"rel_l1_thresh": 0.1}}),
        (
            {"cache_backend": "auto", "cache_config": {"rel_l1_thresh": 0.1}},
            {"cache": {"backend": "auto", "rel_l1_thresh": 0.1}},
        ),
        ({"cache_config": "tuned.json"}, {"cache": "tuned.json"}),
        ({"cache_backend": None, "cache_config": None}, {"cache": None}),
        ({"enable_cpu_offload": True}, {"offload": "model"}),
        ({"enable_layerwise_offload": True, "enable_cpu_offload": False}, {"offload": "layerwise"}),
        ({"enable_cpu_offload": False}, {"offload": None}),
        ({"parallel_config": {"ulysses_degree": 2}}, {"parallel": {"ulysses_degree": 2}}),
        ({"ulysses_degree": 2, "cfg_parallel_size": 2}, {"parallel": {"ulysses_degree": 2, "cfg_parallel_size": 2}}),
    ],
)
def test_aliases_become_settings(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert resolve(given) == expected


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"cache": "auto", "cache_backend": "auto"}, "cache and cache_backend were both given", "cache"),
        ({"enable_cpu_offload": 1}, "enable_cpu_offload=1; expected True or False", "enable_cpu_offload"),
        (
            {"enable_cpu_offload": True, "enable_layerwise_offload": True},
            "exclude each other: .* give gpu_memory alone",
            "enable_cpu_offload",
        ),
        (
            {"parallel_config": {}, "ring_degree": 2},
            "parallel_config and ring_degree",
            "parallel_config",
        ),
        ({"cache_backend": "auto", "cache_config": [1]}, r"cache_config=\[1\]; expected a mapping", "cache_config"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        resolve(given)
    assert caught.value.param == param


def test_a_saved_file_with_a_backend_is_checked_against_the_named_one(tmp_path: Path) -> None:
    file = tmp_path / "tuned.json"
    file.write_text('{"cache": {"backend": "auto", "rel_l1_thresh": 0.3}}')
    given = {"cache_backend": "auto", "cache_config": file}
    assert resolve(given) == {"cache": file}, "as a file, with what else it holds"
    with pytest.raises(SettingError, match=r"is for the cache 'auto', not 'tea_cache'. Leave out cache_backend"):
        resolve({"cache_backend": "tea_cache", "cache_config": file})


def test_every_alias_leads_to_a_setting_and_none_hides_one() -> None:
    settings = {field.name for field in dataclasses.fields(OmniDiffusionConfig)}
    assert {alias.setting for alias in ALIASES.values()} <= settings
    assert not settings & ALIASES.keys()
