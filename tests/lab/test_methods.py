"""Settings as they are written down become methods, or are refused by name; what is promised of images holds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lab.tiny import row
from samovar.core.errors import SettingError
from samovar.lab import Task
from samovar.lab.methods import Method, quantised, read_method
from samovar.lab.verdict import lower_bound, sentences, shown_speedup, values_below


def test_forms_of_a_setting(tmp_path: Path) -> None:
    assert read_method("tea_cache").settings == read_method({"backend": "tea_cache"}).settings
    by_threshold = read_method({"rel_l1_thresh": 0.2})
    assert by_threshold.settings == {"backend": "tea_cache", "rel_l1_thresh": 0.2}
    file = tmp_path / "tuned.json"
    file.write_text('{"cache": {"backend": "tea_cache", "schedule": "##.#"}, "num_inference_steps": 4}')
    saved = read_method(file)
    assert saved.settings == {"backend": "tea_cache", "schedule": "##.#"}
    assert (by_threshold.is_adaptive, saved.is_adaptive) == (True, False)


def test_no_cache_is_no_method() -> None:
    with pytest.raises(SettingError, match="'none' means no cache: exact images are always made"):
        read_method("none")


def test_names_and_keys() -> None:
    assert quantised(Path("files/flux-Q4_0.gguf")).name == "flux-Q4_0.gguf weights"
    by_part = quantised({"transformer": "int8", "text_encoder": "int4"})
    assert by_part.name == "transformer int8, text_encoder int4 weights"
    assert by_part.key != quantised({"transformer": "int8", "text_encoder": "int8"}).key
    keys = [Method("mine", "any", {"weights": {step: {0: 2.0}}}).key for step in (1, "1")]
    assert keys[0] == keys[1], "loaded from a file it is the same"


def test_the_bound_holds_where_a_few_images_are_of_another_kind() -> None:
    rng = random.Random(0)

    def image() -> float:
        return rng.gauss(30, 3) if rng.random() < 0.06 else rng.gauss(70, 2)

    for count in (45, 128):
        bounds = [lower_bound([image() for _ in range(count)]) for _ in range(200)]
        shares = [sum(image() >= bound for _ in range(400)) / 400 for bound in bounds]
        assert sum(share >= 0.94 for share in shares) / 200 > 0.85
    assert [values_below(count) for count in (44, 45, 76, 77, 128)] == [-1, 0, 0, 1, 2]
    assert lower_bound([40.0] * 31 + [20.0]) == 20.0, "of few images nothing more is known than the lowest"


def test_a_sentence_that_a_person_can_act_on() -> None:
    tasks = [Task(f"image {number}", number) for number in range(50)]
    values = [60.0, 41.4, *[55.0] * 46, 47.0, 39.6]
    auto = row(values, computed=10.4, name="auto tolerance=0.02", speedup=1.87)
    assert sentences(auto, tasks) == [
        "auto tolerance=0.02: 95% of images like these stay above 39 dB; 1.9 times as fast, 10.4 of 20 steps computed.",
        "The worst: 'image 49', seed 49: 40 dB; 'image 1', seed 1: 41 dB; 'image 48', seed 48: 47 dB.",
    ]
    few, _ = sentences(row(values[:8], speedup=30.0), tasks)
    assert "all 8 images stay above 41 dB (45 or more would show what 95% keep)" in few
    assert "times as fast" not in few, "counts do not explain it"
    (exact,) = sentences(row([100.0] * 3, computed=20), tasks)
    assert exact == "a: all 3 images are the exact ones; 20 of 20 steps computed."
    (broken,) = sentences(row([float("nan"), 40.0]), tasks)
    assert "1 of 2 images are NaN or infinite" in broken
    shown = [shown_speedup(row([40.0], computed=8, speedup=speedup)) for speedup in (2.6, 12.05, None)]
    assert shown == ["2.60x", "disturbed", "-"]
