"""PSNR and SSIM on cases that can be worked out by hand; LPIPS gives the published values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samovar.core.errors import SettingError
from samovar.lab.metrics import HIGHEST_PSNR, Quality, average, lpips, measure, psnr, ssim

IMAGES = Path(__file__).parent / "images"


def grey(value: float, size: int = 16) -> torch.Tensor:
    return torch.full((1, 3, size, size), value)


def sample(name: str) -> torch.Tensor:
    with Image.open(IMAGES / f"{name}.png") as file:
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)[None] / 255


def test_psnr_of_a_known_error() -> None:
    one_pixel = grey(0.5)
    one_pixel[0, 0, 3, 4] += 0.25
    expected = -10 * math.log10(0.25**2 / (3 * 16 * 16))
    assert psnr(one_pixel, grey(0.5)).item() == pytest.approx(expected, abs=1e-3)
    assert psnr(grey(0.5), grey(0.5)).item() == HIGHEST_PSNR


def test_ssim_is_luminance_where_all_is_flat_and_sees_structure_that_psnr_does_not() -> None:
    a, b = 0.4, 0.6
    assert ssim(grey(a, 8), grey(b, 8)).item() == pytest.approx((2 * a * b + 1e-4) / (a * a + b * b + 1e-4), abs=1e-6)
    torch.manual_seed(0)
    stripes = (torch.arange(32) % 2).float().expand(1, 3, 32, 32) * 0.5 + 0.25
    shifted, noisy = stripes + 0.1, stripes + 0.1 * torch.randn(stripes.shape).sign()
    assert psnr(shifted, stripes).item() == pytest.approx(psnr(noisy, stripes).item(), abs=1e-4)
    assert ssim(shifted, stripes).item() > ssim(noisy, stripes).item() + 0.02
    assert ssim(1 - stripes, stripes).item() < -0.9, "the opposite is structure too"


def test_lpips_of_the_sample_images_of_its_repository() -> None:
    reference = sample("ex_ref")
    pair = torch.cat([sample("ex_p0"), sample("ex_p1")])
    assert lpips(reference.repeat(2, 1, 1, 1), pair).tolist() == pytest.approx([0.7219, 0.1376], abs=1e-4)
    small = reference[:, :, :16, :24]
    assert lpips(small, small).item() == 0
    assert lpips(small, 1 - small).item() > 0.1, "the network sees nothing in images that are not enlarged"


def test_each_image_has_its_own_figures() -> None:
    exact = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    same, other = measure(torch.stack([exact[0], 1 - exact[1]]), exact)
    assert same == Quality(HIGHEST_PSNR, pytest.approx(1.0), 0.0)
    assert (other.psnr < 10, other.ssim < 0, other.lpips > 0) == (True,) * 3
    assert average([same, other]).psnr == pytest.approx((same.psnr + other.psnr) / 2)
    with pytest.raises(SettingError, match="two equal shapes"):
        measure(exact, exact[:1])


def test_a_video_is_the_mean_of_its_frames_and_how_they_change() -> None:
    """A constant shift leaves motion alone, and flicker leaves each frame as close as that."""
    exact = torch.rand(1, 20, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1
    signs = torch.tensor([1.0, -1.0]).repeat(10).view(1, 20, 1, 1, 1)
    (shifted,), (flickers,) = measure(exact + 0.05, exact), measure(exact + 0.05 * signs, exact)
    assert shifted.psnr == pytest.approx(flickers.psnr, abs=1e-3) == pytest.approx(26.02, abs=0.01)
    assert (shifted.motion, flickers.motion) == (HIGHEST_PSNR, pytest.approx(20.0, abs=0.01)), "off by 0.1 each time"
    assert flickers[:3] == pytest.approx(average(measure((exact + 0.05 * signs)[0], exact[0]))[:3])
    assert measure(exact[:, :1], exact[:, :1])[0].motion is None, "one frame does not move"
