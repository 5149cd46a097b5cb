"""What is promised of 95 of 100 images holds for as many; the sentence names it, and the worst images."""

from __future__ import annotations

import random

from lab.tiny import row
from samovar.lab.tasks import Task
from samovar.lab.verdict import lower_bound, sentences, values_below


def test_the_bound_holds_where_a_few_images_are_of_another_kind() -> None:
    rng = random.Random(0)

    def image() -> float:
        return rng.gauss(30, 3) if rng.random() < 0.06 else rng.gauss(70, 2)

    for count in (45, 64, 128):
        bounds = [lower_bound([image() for _ in range(count)]) for _ in range(200)]
        shares = [sum(image() >= bound for _ in range(400)) / 400 for bound in bounds]
        assert sum(share >= 0.94 for share in shares) / 200 > 0.85
    assert [values_below(count) for count in (44, 45, 76, 77, 128)] == [-1, 0, 0, 1, 2]
    assert lower_bound([40.0] * 31 + [20.0]) == 20.0, "of few images nothing more is known than the lowest"


def test_a_sentence_that_a_person_can_act_on() -> None:
    tasks = [Task(f"image {number}", number) for number in range(50)]
    values = [60.0, 41.4, *[55.0] * 46, 47.0, 39.6]
    auto = row(values, computed=10.4, method="auto tolerance=0.02", speedup=1.87)
    assert sentences(auto, tasks) == [
        "auto tolerance=0.02: 95% of images like these stay above 39 dB; 1.9 times as fast, 10.4 of 20 steps computed.",
        "The worst: 'image 49', seed 49: 40 dB; 'image 1', seed 1: 41 dB; 'image 48', seed 48: 47 dB.",
    ]
    few, _ = sentences(row(values[:8], speedup=30.0), tasks)
    assert "all 8 images stay above 41 dB (45 or more would show what 95% keep)" in few
    assert "times as fast" not in few, "counts do not explain it"
    assert sentences(row([100.0] * 3, computed=20), tasks) == [
        "a: all 3 images are the exact ones; 20 of 20 steps computed."
    ]
