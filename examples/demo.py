"""A dozen pictures by the built-in model on one sheet: `make demo`."""

from __future__ import annotations

import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # As the command line does: see there.

from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

PROMPTS = [
    "a grinning cat, 3d style", "rocket, flat style", "red heart, noto style", "robot, 3d style",
    "octopus, noto style", "pizza, flat style", "unicorn, 3d style", "hot beverage, 3d style",
    "frog, flat style", "birthday cake, noto style", "ghost, 3d style", "rainbow, flat style",
]  # fmt: skip
COLUMNS, SCALE, MARGIN, CAPTION = 4, 2, 12, 26


def sheet(pictures: list[Image.Image], captions: list[str]) -> Image.Image:
    """All pictures with what was asked for below each."""
    side = pictures[0].width * SCALE
    rows = -(-len(pictures) // COLUMNS)
    size = (COLUMNS * (side + MARGIN) + MARGIN, rows * (side + CAPTION + MARGIN) + MARGIN)
    page = Image.new("RGB", size, "#f2f2f2")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(15)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        row, column = divmod(number, COLUMNS)
        left, top = MARGIN + column * (side + MARGIN), MARGIN + row * (side + CAPTION + MARGIN)
        page.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (left, top))
        draw.text((left + side / 2, top + side + 4), caption, fill="#222222", font=font, anchor="ma")
    return page


def main() -> None:
    print("Samovar: loading the built-in model ...", flush=True)
    started = time.perf_counter()
    from samovar import Omni

    with Omni("emoji", progress=False) as omni:
        print(f"ready after {time.perf_counter() - started:.1f} s, {omni.load_seconds:.1f} s of it for the weights")
        results = [omni.generate(prompt, seed=7)[0] for prompt in tqdm(PROMPTS, unit="picture")]
    seconds = sum(result.seconds for result in results)
    steps = sum(result.params.num_inference_steps or 0 for result in results)
    file = Path("out") / "demo.png"
    file.parent.mkdir(exist_ok=True)
    sheet([result.images[0] for result in results], PROMPTS).save(file)
    each = seconds / len(results)
    print(
        f"{len(results)} pictures in {seconds:.0f} s, {each:.1f} s each; {steps} denoising steps, all of them computed"
    )
    print(f"the sheet is in {file}")


if __name__ == "__main__":
    main()
