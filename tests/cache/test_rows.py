"""Each image of a batch keeps the steps at which it was due, and no others."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from samovar.cache.rows import RowHistory, chosen


def step(number: int, images: int, copies: int = 1) -> list[torch.Tensor | None]:
    """The output of image i at step n is 10 n + i."""
    rows = [10.0 * number + image for _ in range(copies) for image in range(images)]
    return [torch.tensor(rows).reshape(-1, 1).expand(-1, 3).clone(), None]


@pytest.mark.parametrize("copies", [1, 2])
def test_any_order_of_due_steps(copies: int) -> None:
    draw, images = random.Random(0), 3
    for _ in range(50):
        history, expected = RowHistory(), [[] for _ in range(images)]  # type: ignore[var-annotated]
        for number in range(12):
            due = [number < 3 or draw.random() < 0.4 for _ in range(images)]
            if not any(due):
                continue
            history.push(-float(number), number, step(number, images, copies), due)
            for image in itertools.compress(range(images), due):
                expected[image].insert(0, number)
            for image, row in itertools.product(range(images), range(copies)):
                depth = min(len(expected[image]), 4)
                if len(expected[image]) < len(history):
                    continue  # What is beyond is looked at by images that have it.
                numbers = [past.numbers[image] for past in history.steps][:depth]
                assert numbers == expected[image][:depth]
                assert [past.places[image] for past in history.steps][:depth] == [-float(n) for n in numbers]
                values = [past.tensors[0][image + row * images, 0].item() for past in history.steps]  # type: ignore[index]
                assert values[:depth] == [10.0 * number + image for number in numbers]


def test_a_sum_for_each_image() -> None:
    history = RowHistory()
    for number in range(3):
        history.push(float(number), number, step(number, 2, copies=2), [True, True])
    outlook = history.combined([[1.0], [2.0, -1.0]])
    assert outlook is not None
    value = outlook.value(0)
    assert value is not None
    assert value[:, 0].tolist() == [20.0, 31.0, 20.0, 31.0]
    assert history.combined([[1.0] * 4, [1.0]]) is None


def test_another_form_begins_anew() -> None:
    history = RowHistory()
    history.push(0.0, 0, step(0, 2), [True, True])
    history.push(1.0, 1, step(1, 3), [True, True, True])
    assert len(history) == 1
    assert history.num_images == 3


def test_rows_of_two() -> None:
    one, other = step(1, 2), step(2, 2)
    found = chosen([True, False], one, other)
    assert found[1] is None
    assert found[0] is not None
    assert found[0][:, 0].tolist() == [10.0, 21.0]
