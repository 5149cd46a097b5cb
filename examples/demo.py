"""Skipped steps, seen: twelve images and a clip by the built-in models, exact and cached: `make demo`."""

from __future__ import annotations

import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # Before torch is imported, as the command line does.

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

PROMPTS = [
    "a grinning cat, 3d style", "rocket, flat style", "red heart, noto style", "robot, 3d style",
    "octopus, noto style", "pizza, flat style", "unicorn, 3d style", "hot beverage, 3d style",
    "frog, flat style", "birthday cake, noto style", "ghost, 3d style", "rainbow, flat style",
]  # fmt: skip
CLIP = "rocket, 3d style, flying up"
COLUMNS, SCALE, MARGIN, CAPTION, HEADER = 3, 2, 16, 26, 28


def sheet(exact: list[Image.Image], cached: list[Image.Image], captions: list[str]) -> Image.Image:
    """For each prompt the exact image and, beside it, the one with skipped steps."""
    side = exact[0].width * SCALE
    rows = -(-len(exact) // COLUMNS)
    size = (COLUMNS * (2 * side + MARGIN) + MARGIN, HEADER + rows * (side + CAPTION + MARGIN))
    page = Image.new("RGB", size, "#f2f2f2")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(15)
    for column in range(COLUMNS):
        left = MARGIN + column * (2 * side + MARGIN)
        for shift, title in ((0, "exact"), (side, "steps skipped")):
            draw.text((left + shift + side / 2, 6), title, fill="#888888", font=font, anchor="ma")
    for number, caption in enumerate(captions):
        row, column = divmod(number, COLUMNS)
        left, top = MARGIN + column * (2 * side + MARGIN), HEADER + row * (side + CAPTION + MARGIN)
        for shift, image in ((0, exact[number]), (side, cached[number])):
            page.paste(image.resize((side, side), Image.Resampling.LANCZOS), (left + shift, top))
        draw.text((left + side, top + side + 4), caption, fill="#222222", font=font, anchor="ma")
    return page


def psnr(one: Image.Image, other: Image.Image) -> float:
    """How close two images are, in dB."""
    difference = np.asarray(one.convert("RGB"), float) - np.asarray(other.convert("RGB"), float)
    return float(10 * np.log10(255**2 / max(float((difference**2).mean()), 1e-9)))


def clip(file: Path) -> None:
    """The same clip by the built-in video model, exact and with skipped steps, side by side."""
    from samovar import Omni
    from samovar.media import Video

    results = []
    for cache in (None, "auto"):
        with Omni("motion", cache=cache, progress=False) as omni:
            results.append(omni.generate(CLIP, seed=7)[0])
    exact, cached = results
    (stats,) = cached.cache
    frames = np.concatenate([result.videos[0].frames for result in results], 2).repeat(4, 1).repeat(4, 2)
    Video(frames, exact.videos[0].fps).save(file)
    print(
        f"A clip of {len(frames)} frames: {exact.seconds:.1f} s; {stats.skipped} of {stats.computed + stats.skipped} "
        f"forwards skipped: {cached.seconds:.1f} s. Both are in {file}."
    )


def main() -> None:
    print("Samovar: loading the built-in model ...", flush=True)
    started = time.perf_counter()
    from samovar import Omni

    images: dict[str, list[Image.Image]] = {}
    seconds: dict[str, float] = {}
    counts = [0, 0]
    for name, tolerance in {"exact": None, "cached": "fast"}.items():
        with Omni("emoji", tolerance=tolerance, progress=False) as omni:
            if name == "exact":
                waited = time.perf_counter() - started
                print(f"ready after {waited:.1f} s, {omni.load_seconds:.1f} s of it for the weights")
            results = [omni.generate(prompt, seed=7)[0] for prompt in tqdm(PROMPTS, unit="image", desc=name)]
        images[name] = [result.images[0] for result in results]
        seconds[name] = sum(result.seconds for result in results)
        for result in results:
            for stats in result.cache:
                counts = [counts[0] + stats.computed, counts[1] + stats.skipped]
    file = Path("out") / "demo.png"
    file.parent.mkdir(exist_ok=True)
    sheet(images["exact"], images["cached"], PROMPTS).save(file)
    closeness = sorted(psnr(*pair) for pair in zip(images["exact"], images["cached"], strict=True))
    print(
        f"{len(PROMPTS)} images, every step computed: {seconds['exact']:.0f} s\n"
        f"{counts[1]} of {sum(counts)} forwards skipped: {seconds['cached']:.0f} s, "
        f"{seconds['exact'] / seconds['cached']:.2f} times as fast; PSNR {closeness[len(closeness) // 2]:.0f} dB, "
        f"at least {closeness[0]:.0f} dB\nThe sheet is in {file}."
    )
    clip(file.with_suffix(".gif"))


if __name__ == "__main__":
    main()
