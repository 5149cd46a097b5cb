"""Evaluates the exported video model, by a judge that was trained apart from it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.motion.clips import KINDS, MOTIONS, caption, draw
from training.motion.judge import Judge, verdict
from training.motion.stages import rebuild
from training.pictures import Row

FIRST_SEED = 10_000
GUIDANCE, SHIFTS = (1.5, 2.5, 4.0), (1.0, 3.0)


def share(hits: Tensor) -> float:
    return round(hits.float().mean().item(), 4)


class Sampler:
    """An exported pipeline, asked for many clips at a time."""

    def __init__(self, folder: Path, device: torch.device, batch: int) -> None:
        from diffusers import WanPipeline

        self.pipe: Any = WanPipeline.from_pretrained(folder).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.batch = batch

    def __call__(self, prompts: Sequence[str], call: dict[str, Any], shift: float, first: int = FIRST_SEED) -> Tensor:
        """Clips (N, 3, T, H, W) in -1..1, the i-th from seed first + i."""
        self.pipe.scheduler = type(self.pipe.scheduler).from_config(self.pipe.scheduler.config, shift=shift)
        out = []
        for i in range(0, len(prompts), self.batch):
            some = list(prompts[i : i + self.batch])
            seeds = [torch.Generator("cpu").manual_seed(first + i + j) for j in range(len(some))]
            wishes = {**call, "negative_prompt": [call["negative_prompt"]] * len(some), "output_type": "pt"}
            frames = self.pipe(some, generator=seeds, **wishes).frames
            out.append(frames.float().transpose(1, 2) * 2 - 1)
        return torch.cat(out)


def cases(rows: Sequence[Row], count: int, seed: int) -> list[tuple[int, int]]:
    """Pictures, no one twice before all had a turn, with motions in turn."""
    rng = random.Random(seed)
    pictures: list[int] = []
    while len(pictures) < count:
        pictures += rng.sample(range(len(rows)), len(rows))
    motions = [i % len(KINDS) for i in range(count)]
    rng.shuffle(motions)
    return list(zip(pictures[:count], motions, strict=True))


def score(judge: Judge, clips: Tensor, asked: Sequence[tuple[int, int]], names: Tensor) -> dict[str, Any]:
    """How often the judge sees the emoji and the motion that were asked for."""
    pictures, motions = (torch.tensor(some) for some in zip(*asked, strict=True))
    name, motion = verdict(judge, clips)
    right, moved = name == names.cpu()[pictures], motion == motions
    by_motion = {kind: share(moved[motions == i]) for i, kind in enumerate(KINDS) if (motions == i).any()}
    return {"cases": len(asked), "emoji": share(right), "motion": share(moved), "both": share(right & moved),
            "by_motion": by_motion}  # fmt: skip


@torch.no_grad()
def judge_figures(
    judge: Judge, vae: Any, pictures: Tensor, names: Tensor, rows: Sequence[Row], count: int
) -> dict[str, Any]:
    """The judge's own accuracy on real clips that it has not seen, and through the autoencoder."""
    asked = cases(rows, count, 3)
    generator = torch.Generator(pictures.device).manual_seed((1 << 40) + 5)
    real, rebuilt, squares = [], [], []
    for i in range(0, count, 64):
        index, motion = (torch.tensor(some, device=pictures.device) for some in zip(*asked[i : i + 64], strict=True))
        clips = draw(pictures[index], motion, generator)
        real.append(clips.cpu())
        rebuilt.append(rebuild(vae, clips).cpu())
        squares.append((real[-1] - rebuilt[-1]).div(2).square().mean((1, 2, 3, 4)))
    psnr = -10 * torch.cat(squares).clamp_min(1e-10).log10()
    return {
        "real": score(judge, torch.cat(real), asked, names), "rebuilt": score(judge, torch.cat(rebuilt), asked, names),
        "vae_psnr": round(psnr.mean().item(), 2),
    }  # fmt: skip


def free_prompt(row: Row, motion: str, rng: random.Random) -> str:
    """As a user would write: no style, another phrase."""
    return f"{row.name} {rng.choice(MOTIONS[motion])}".strip()


def evaluate(
    sampler: Sampler, judge: Judge, rows: Sequence[Row], names: Tensor, call: dict[str, Any], counts: tuple[int, int],
    deadline: float, metrics: dict[str, Any],
) -> tuple[dict[str, Any], float]:  # fmt: skip
    """Fills `metrics`: guidance and shift chosen on some cases, then figures on others; returns the choice."""

    def prompts(asked: Sequence[tuple[int, int]]) -> list[str]:
        return [caption(rows[picture], KINDS[motion]) for picture, motion in asked]

    asked, best = cases(rows, counts[0], 1), (-1.0, call, 1.0)
    metrics["choice"] = []
    for shift in SHIFTS:
        for guidance in GUIDANCE:
            if metrics["choice"] and time.monotonic() > deadline - 0.6 * (deadline - metrics["began"]):
                break
            wish = {**call, "guidance_scale": guidance}
            found = score(judge, sampler(prompts(asked), wish, shift), asked, names)
            del found["by_motion"]
            metrics["choice"].append({"guidance_scale": guidance, "shift": shift, **found})
            value = found["emoji"] + found["motion"]
            best = max(best, (value, wish, shift), key=lambda entry: entry[0])
    _, call, shift = best
    metrics["defaults"], metrics["shift"] = call, shift
    test = cases(rows, counts[1], 2)
    metrics["test"] = score(judge, sampler(prompts(test), call, shift, 20_000), test, names)
    rng, some = random.Random(5), test[: counts[0]]
    others = {
        "free": ([free_prompt(rows[p], KINDS[m], rng) for p, m in some], call),
        "long_text": (prompts(some), {**call, "max_sequence_length": 512}),
        "steps_50": (prompts(some), {**call, "num_inference_steps": 50}),
        "steps_12": (prompts(some), {**call, "num_inference_steps": 12}),
    }
    for name, (texts, wish) in others.items():
        if time.monotonic() < deadline:
            metrics[name] = score(judge, sampler(texts, wish, shift, 30_000), some, names)
    return call, shift


def write_strips(path: Path, clips: Tensor, texts: Sequence[str], every: int = 4) -> None:
    """Some frames of each clip (N, 3, T, H, W) in -1..1 in a row, with its words above; two clips a line."""
    from PIL import Image, ImageDraw

    pixels = clips[:, :, ::every].add(1).mul(127.5).round().clamp(0, 255).byte().permute(0, 3, 2, 4, 1).cpu()
    strips = pixels.flatten(2, 3).numpy()
    height, width = strips.shape[1:3]
    page = Image.new("RGB", (2 * width + 24, -(-len(strips) // 2) * (height + 20) + 8), (225, 225, 225))
    draw_on = ImageDraw.Draw(page)
    for i, (strip, text) in enumerate(zip(strips, texts, strict=True)):
        x, y = 8 + i % 2 * (width + 8), 8 + i // 2 * (height + 20)
        draw_on.text((x, y - 2), text, fill=(0, 0, 0))
        page.paste(Image.fromarray(strip), (x, y + 12))
    page.save(path, optimize=True)
