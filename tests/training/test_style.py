"""The judge of style knows styles that it was taught, only by palette and texture."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training import captions, style
from training.evaluate import Judge, unit_pictures
from training.pictures import Dataset, Row

COLOURS = np.array([[220, 60, 60], [60, 180, 80], [70, 90, 230], [240, 200, 60]])
STYLES = ("plain", "shaded", "striped")
# an autoencoder that changes nothing: the latents are the picture
VAE = SimpleNamespace(device="cpu", encoder=lambda x: torch.cat([x, x], 1), decoder=lambda x: x)


@pytest.fixture(autouse=True, scope="module")
def _quick():
    before = torch.get_num_threads(), style.STEPS
    torch.set_num_threads(1)
    style.STEPS = 100
    yield
    torch.set_num_threads(before[0])
    style.STEPS = before[1]


def fill(word: str, colour: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The textures: even, darker and darker downwards, or in stripes of the two colours between."""
    light = {"plain": 0 * y + 0.8, "shaded": 1 - 0.4 * y / y.max(), "striped": 0.7 + 0.2 * (y // 4 % 2)}[word]
    return colour * light[..., None]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    """Forty boxes of random place and size, each in the three textures."""
    rng = np.random.default_rng(0)
    rows, drawn = [], []
    y, x = np.mgrid[0:48, 0:48]
    for number in range(40):
        (top, left), (height, width) = rng.integers(2, 10, 2), rng.integers(28, 36, 2)
        inside = (y >= top) & (y < top + height) & (x >= left) & (x < left + width)
        colour = COLOURS[number % 4]
        for word in STYLES:
            drawn.append(np.where(inside[..., None], fill(word, colour, y), 255).astype(np.uint8))
            rows.append(Row(f"box {number}", word, "symbol", (), f"{number:X}"))
    return Dataset(np.stack(drawn), tuple(rows), {})


@pytest.fixture(scope="module")
def nearest(dataset: Dataset) -> Judge:
    return Judge(dataset, captions.held_out(dataset.rows, 0.2))


@pytest.fixture(scope="module")
def judge(dataset: Dataset, nearest: Judge) -> style.StyleJudge:
    return style.train_judge(dataset, nearest.seen, VAE)


def test_judge_knows_the_style_of_pictures_it_never_saw(
    dataset: Dataset, nearest: Judge, judge: style.StyleJudge
) -> None:
    real = unit_pictures(dataset, nearest.held_out)
    found = nearest.obedience(real, real, real, judge)
    assert found.cases == 24
    assert found.style == found.style_real == found.style_rebuilt >= 0.9
    assert set(found.by_style) == set(STYLES)
    assert found.style_of_nearest_real < 0.5  # the same box in another style


def test_a_model_that_ignores_the_style_word_is_found_out(
    dataset: Dataset, nearest: Judge, judge: style.StyleJudge
) -> None:
    real = unit_pictures(dataset, nearest.held_out)
    first = [nearest.styles_of[dataset.rows[i].hexcode][0] for i in nearest.held_out]
    found = nearest.obedience(unit_pictures(dataset, first), real, real, judge)
    assert found.style < 0.5
    assert found.by_style["plain"] >= 0.8
    assert max(found.by_style["shaded"], found.by_style["striped"]) <= 0.2


def test_judge_is_blind_to_the_layout(dataset: Dataset) -> None:
    some = unit_pictures(dataset, range(3))
    padded = torch.nn.functional.pad(some, (20, 20, 20, 20), value=1.0)
    moved = padded.roll((6, -8), (2, 3))
    torch.testing.assert_close(style.features(moved), style.features(padded), rtol=0, atol=1e-3)
    assert (style.features(some)[0] - style.features(some)[2]).abs().max() > 0.1


def test_histograms_count_everything_once() -> None:
    points = torch.rand(2, 3, 50)
    histogram = style.soft_histogram(points, 5)
    assert histogram.shape == (2, 125)
    torch.testing.assert_close(histogram.sum(1), torch.ones(2))
    corner = style.soft_histogram(torch.tensor([[[1.0], [0.0]]]), 4)
    assert corner.argmax() == 12
    assert corner.max() == 1


def weights(judge: style.StyleJudge) -> list[torch.Tensor]:
    return [parameter for net in judge.nets for parameter in net.parameters()]


def test_the_same_seed_gives_the_same_judge(dataset: Dataset, nearest: Judge, judge: style.StyleJudge) -> None:
    torch.manual_seed(5)  # whatever was drawn before
    again = style.train_judge(dataset, nearest.seen, VAE)
    assert all(torch.equal(a, b) for a, b in zip(weights(judge), weights(again), strict=True))
