"""Settings as they are written down become methods, or are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.core.errors import SettingError
from samovar.lab.methods import quantised, read_method


def test_forms_of_a_setting(tmp_path: Path) -> None:
    assert read_method("tea_cache").settings == {"backend": "tea_cache"}
    assert read_method({"backend": "tea_cache"}).settings == {"backend": "tea_cache"}
    assert read_method({"rel_l1_thresh": 0.2}).settings == {"backend": "tea_cache", "rel_l1_thresh": 0.2}
    file = tmp_path / "tuned.json"
    file.write_text('{"cache": {"backend": "tea_cache", "schedule": "##.#"}, "num_inference_steps": 4}')
    method = read_method(file)
    assert method.settings == {"backend": "tea_cache", "schedule": "##.#"}
    assert not method.is_adaptive
    assert read_method({"backend": "tea_cache", "rel_l1_thresh": 0.1}).is_adaptive


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(SettingError, match=r"rel_l1_tresh.*'rel_l1_thresh'"):
        read_method({"rel_l1_tresh": 0.2})
    with pytest.raises(SettingError, match=r"'tea_cach'.*'tea_cache'"):
        read_method({"backend": "tea_cach"})
    with pytest.raises(SettingError, match="'none' means no cache"):
        read_method("none")


def test_names_of_quantised_weights() -> None:
    assert quantised("int8").name == "int8 weights"
    assert quantised(Path("files/flux-Q4_0.gguf")).name == "flux-Q4_0.gguf weights"
    by_part = quantised({"transformer": "int8", "text_encoder": "int4"})
    assert by_part.name == "transformer int8, text_encoder int4 weights"
    assert by_part.key != quantised({"transformer": "int8", "text_encoder": "int8"}).key
