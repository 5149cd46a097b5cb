"""LPIPS gives the published values, without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samovar.lab.lpips import lpips

PICTURES = Path(__file__).parent / "pictures"


def picture(name: str) -> torch.Tensor:
    with Image.open(PICTURES / f"{name}.png") as file:
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize(("other", "value"), [("ex_p0", 0.7219), ("ex_p1", 0.1376)])
def test_the_sample_pictures_of_the_lpips_repository(other: str, value: float) -> None:
    assert lpips(picture("ex_ref"), picture(other)).item() == pytest.approx(value, abs=1e-4)


def test_equal_pictures_do_not_differ_and_order_does_not_matter() -> None:
    one, other = picture("ex_ref"), picture("ex_p1")
    assert lpips(one, one).item() == 0
    assert lpips(one, other).item() == pytest.approx(lpips(other, one).item(), abs=1e-7)


def test_a_batch_gives_each_pair_its_own_value() -> None:
    reference = picture("ex_ref")
    both = lpips(reference.repeat(2, 1, 1, 1), torch.cat([picture("ex_p0"), picture("ex_p1")]))
    assert both.tolist() == pytest.approx([0.7219, 0.1376], abs=1e-4)


def test_small_pictures_are_enlarged() -> None:
    small = picture("ex_ref")[:, :, :16, :24]
    assert lpips(small, small).item() == 0
    assert lpips(small, 1 - small).item() > 0.1
