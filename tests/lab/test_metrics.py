"""PSNR and SSIM on cases that can be worked out by hand; LPIPS gives the published values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samovar.lab.metrics import HIGHEST_PSNR, Quality, average, lpips, measure, psnr, ssim


def grey(value: float, size: int = 16) -> torch.Tensor:
    return torch.full((1, 3, size, size), value)


def test_psnr_of_a_known_error() -> None:
    assert psnr(grey(0.5), grey(0.6)).item() == pytest.approx(20.0, abs=1e-4)  # A mean square of 0.01.
    one_pixel = grey(0.5)
    one_pixel[0, 0, 3, 4] += 0.25
    expected = -10 * math.log10(0.25**2 / (3 * 16 * 16))
    assert psnr(one_pixel, grey(0.5)).item() == pytest.approx(expected, abs=1e-3)


def test_equal_images_have_the_highest_psnr() -> None:
    assert psnr(grey(0.5), grey(0.5)).item() == HIGHEST_PSNR


def test_ssim_of_flat_images_is_their_luminance() -> None:
    a, b = 0.4, 0.6
    expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
    assert ssim(grey(a), grey(b)).item() == pytest.approx(expected, abs=1e-6)


def test_ssim_sees_structure_that_psnr_does_not() -> None:
    torch.manual_seed(0)
    stripes = (torch.arange(32) % 2).float().expand(1, 3, 32, 32) * 0.5 + 0.25
    shifted, noisy = stripes + 0.1, stripes + 0.1 * torch.randn(stripes.shape).sign()
    assert psnr(shifted, stripes).item() == pytest.approx(psnr(noisy, stripes).item(), abs=1e-4)
    assert ssim(shifted, stripes).item() > ssim(noisy, stripes).item() + 0.02
    assert ssim(stripes, stripes).item() == pytest.approx(1.0, abs=1e-6)
    assert ssim(1 - stripes, stripes).item() < -0.9, "the opposite is structure too"


def test_images_smaller_than_the_window() -> None:
    assert ssim(grey(0.5, 8), grey(0.5, 8)).item() == pytest.approx(1.0, abs=1e-6)


def test_measure_has_all_three_for_each_image() -> None:
    exact = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    images = torch.stack([exact[0], 1 - exact[1]])
    same, other = measure(images, exact)
    assert same == Quality(HIGHEST_PSNR, pytest.approx(1.0), 0.0)
    assert other.psnr < 10
    assert other.ssim < 0
    assert other.lpips > 0
    assert average([same, other]).psnr == pytest.approx((same.psnr + other.psnr) / 2)


# ------------------------------------------------------------------------------------------------ LPIPS

IMAGES = Path(__file__).parent / "images"


def sample(name: str) -> torch.Tensor:
    with Image.open(IMAGES / f"{name}.png") as file:
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)[None] / 255


@pytest.mark.parametrize(("other", "value"), [("ex_p0", 0.7219), ("ex_p1", 0.1376)])
def test_the_sample_images_of_the_lpips_repository(other: str, value: float) -> None:
    assert lpips(sample("ex_ref"), sample(other)).item() == pytest.approx(value, abs=1e-4)


def test_equal_images_do_not_differ_and_order_does_not_matter() -> None:
    one, other = sample("ex_ref"), sample("ex_p1")
    assert lpips(one, one).item() == 0
    assert lpips(one, other).item() == pytest.approx(lpips(other, one).item(), abs=1e-7)


def test_a_batch_gives_each_pair_its_own_value() -> None:
    reference = sample("ex_ref")
    both = lpips(reference.repeat(2, 1, 1, 1), torch.cat([sample("ex_p0"), sample("ex_p1")]))
    assert both.tolist() == pytest.approx([0.7219, 0.1376], abs=1e-4)


def test_small_images_are_enlarged() -> None:
    small = sample("ex_ref")[:, :, :16, :24]
    assert lpips(small, small).item() == 0
    assert lpips(small, 1 - small).item() > 0.1


def test_a_video_is_the_mean_of_its_frames_and_how_they_change() -> None:
    """A constant shift leaves motion alone, and flicker leaves each frame as close as that."""
    exact = torch.rand(1, 20, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    signs = torch.tensor([1.0, -1.0]).repeat(10).view(1, 20, 1, 1, 1)
    (shifted,), (flickers,) = measure(exact + 0.05, exact), measure(exact + 0.05 * signs, exact)
    assert shifted.psnr == pytest.approx(flickers.psnr, abs=1e-3) == pytest.approx(26.02, abs=0.01)
    assert shifted.motion == HIGHEST_PSNR
    assert flickers.motion == pytest.approx(20.0, abs=0.01), "each change is off by 0.1"
    frames = measure((exact + 0.05 * signs)[0], exact[0])
    assert flickers[:3] == pytest.approx(average(frames)[:3])
    assert frames[0].motion is None
    assert measure(exact[:, :1], exact[:, :1])[0].motion is None, "one frame does not move"
    assert average([flickers, shifted]).motion == pytest.approx((20.0 + HIGHEST_PSNR) / 2, abs=0.01)
