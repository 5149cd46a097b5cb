"""Evaluates an exported model.

    python -m training.evaluate --model out/model --data data --out out/evaluation

Recall: for training captions and seeds that training never saw, is the nearest training picture
(by mean colours on a 16 by 16 grid) of the prompted emoji? Style: for emoji-style pairs held out
of training, does a judge of palette and texture (`style.py`) name the style that was asked for?
The nearest pictures' styles are given too, but they follow the layout. Real held-out pictures,
measured the same way, show what each measure is worth.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training import captions
from training.pictures import Dataset, load
from training.sheet import write_sheet
from training.style import StyleJudge, train_judge
from training.vae import reconstruct, reconstruction_psnr

FIRST_SEED = 10_000
SCALES = (1.0, 2.0, 3.0, 4.5)


@dataclass(frozen=True)
class Recall:
    """How often the nearest training picture, or one of the nearest five, is the right emoji."""

    steps: int
    cfg: float
    cases: int
    top1: float
    top5: float
    exact: float
    """The nearest is the very picture: emoji and style."""


@dataclass(frozen=True)
class Obedience:
    """On held-out pairs, whether the style word is obeyed, and whether it is the emoji."""

    cases: int
    style: float
    """The judge of palette and texture names the prompted style."""
    style_real: float
    """The same for the real held-out pictures, which the judge has not seen: its accuracy."""
    style_rebuilt: float
    """The same for the real held-out pictures through the autoencoder."""
    by_style: dict[str, float]
    """`style` for each prompted style alone."""
    style_of_own: float
    """The nearest of the prompted emoji's own pictures in all styles, the held-out one among them."""
    style_of_own_real: float
    style_of_nearest: float
    """The nearest of all training pictures: mostly the emoji in another style."""
    style_of_nearest_real: float
    emoji: float
    """The nearest of all training pictures is of the prompted emoji."""
    emoji_real: float


class Sampler:
    """An exported pipeline, asked for many pictures at a time."""

    def __init__(self, folder: Path, device: str, batch: int) -> None:
        from diffusers import FluxPipeline

        self.defaults: dict[str, Any] = json.loads((folder / "samovar.json").read_text())
        self.pipe: Any = FluxPipeline.from_pretrained(folder).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.batch = batch

    def __call__(self, prompts: Sequence[str], steps: int | None = None, cfg: float | None = None) -> Tensor:
        """Pictures (N, 3, H, W) in 0..1, the i-th from seed FIRST_SEED + i."""
        call = {**self.defaults, "output_type": "pt"}
        call["num_inference_steps"] = steps or call["num_inference_steps"]
        call["true_cfg_scale"] = call["true_cfg_scale"] if cfg is None else cfg
        negative = call.pop("negative_prompt")
        out = []
        for i in range(0, len(prompts), self.batch):
            some = list(prompts[i : i + self.batch])
            seeds = range(FIRST_SEED + i, FIRST_SEED + i + len(some))
            generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
            images = self.pipe(some, negative_prompt=[negative] * len(some), generator=generators, **call).images
            out.append(images.float().cpu())
        return torch.cat(out)


def features(images: Tensor) -> Tensor:
    """Mean colours on a grid of 16 by 16."""
    return F.avg_pool2d(images, max(1, images.shape[-1] // 16)).flatten(1)


def unit_pictures(dataset: Dataset, rows: Sequence[int]) -> Tensor:
    """Real pictures (N, 3, H, W) in 0..1."""
    return torch.from_numpy(dataset.pictures[list(rows)]).permute(0, 3, 1, 2).float() / 255


class Judge:
    """Compares pictures with the real ones."""

    def __init__(self, dataset: Dataset, held_out: Sequence[int]) -> None:
        self.rows, self.held_out = dataset.rows, list(held_out)
        self.bank = torch.cat(
            [
                features(unit_pictures(dataset, range(i, min(i + 256, len(self.rows)))))
                for i in range(0, len(self.rows), 256)
            ]
        )
        hidden = set(held_out)
        self.seen = [i for i in range(len(self.rows)) if i not in hidden]
        self.styles_of: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            self.styles_of.setdefault(row.hexcode, []).append(index)

    def nearest(self, images: Tensor, count: int) -> list[list[int]]:
        """The nearest training pictures of each image, by row."""
        distances = torch.cdist(features(images), self.bank[self.seen])
        best = distances.topk(min(count, len(self.seen)), largest=False).indices
        return [[self.seen[j] for j in line] for line in best.tolist()]

    def recall(self, images: Tensor, asked: Sequence[int], steps: int, cfg: float) -> Recall:
        near = self.nearest(images, 5)
        name = [self.rows[i].name for i in asked]
        top1 = [self.rows[n[0]].name == w for n, w in zip(near, name, strict=True)]
        top5 = [w in {self.rows[j].name for j in n} for n, w in zip(near, name, strict=True)]
        exact = [n[0] == i for n, i in zip(near, asked, strict=True)]
        return Recall(steps, cfg, len(asked), share(top1), share(top5), share(exact))

    def own_style(self, images: Tensor, asked: Sequence[int]) -> list[str]:
        """The style of the nearest among the prompted emoji's own pictures in all styles."""
        found = []
        for feature, index in zip(features(images), asked, strict=True):
            own = self.styles_of[self.rows[index].hexcode]
            distances = torch.cdist(feature[None], self.bank[own])[0]
            found.append(self.rows[own[int(distances.argmin())]].style)
        return found

    def obedience(self, images: Tensor, real: Tensor, rebuilt: Tensor, judge: StyleJudge) -> Obedience:
        """`images` asked for the held-out pairs; `real` are their true pictures, `rebuilt` those through the VAE."""
        asked = self.held_out
        style = [self.rows[i].style for i in asked]
        named = judge.name(images)

        def same(found: Sequence[str]) -> float:
            return share([a == b for a, b in zip(found, style, strict=True)])

        def alone(word: str) -> float:
            return share([a == b for a, b in zip(named, style, strict=True) if b == word])

        near, near_real = ([self.rows[n[0]] for n in self.nearest(some, 1)] for some in (images, real))
        names = [self.rows[i].name for i in asked]
        return Obedience(
            len(asked), same(named), same(judge.name(real)), same(judge.name(rebuilt)),
            {word: alone(word) for word in judge.styles if word in style},
            same(self.own_style(images, asked)), same(self.own_style(real, asked)),
            same([row.style for row in near]), same([row.style for row in near_real]),
            share([row.name == name for row, name in zip(near, names, strict=True)]),
            share([row.name == name for row, name in zip(near_real, names, strict=True)]),
        )  # fmt: skip


def share(hits: Sequence[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 4)


def psnr_of(sampler: Sampler, dataset: Dataset, rows: Sequence[int]) -> float:
    """Mean reconstruction quality of some real pictures, in dB."""
    vae = sampler.pipe.vae
    pictures = torch.from_numpy(dataset.pictures[list(rows)]).to(vae.device)
    return round(reconstruction_psnr(vae, pictures).mean().item(), 2)


def held_out_figures(vae: Any, dataset: Dataset, judge: Judge, images: Tensor) -> Obedience:
    """What the pictures made for the held-out pairs are like, by a judge trained here and now."""
    real = torch.from_numpy(dataset.pictures[judge.held_out])
    rebuilt = reconstruct(vae, real.to(vae.device)).cpu()
    style_judge = train_judge(dataset, judge.seen, vae)
    return judge.obedience(images, unit_pictures(dataset, judge.held_out), rebuilt, style_judge)


def evaluate(
    sampler: Sampler, dataset: Dataset, cases: int, settings: Sequence[tuple[int, float]],
    out: Path, held_out: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    """Everything the model card's table says; sheets and tables go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    judge = Judge(dataset, held_out)
    asked = random.Random(11).sample(judge.seen, min(cases, len(judge.seen)))
    prompts = [captions.caption(dataset.rows[i]) for i in asked]
    result: dict[str, Any] = {"defaults": sampler.defaults, "recall": []}
    result["psnr_training"] = psnr_of(sampler, dataset, asked)
    result["psnr_held_out"] = psnr_of(sampler, dataset, judge.held_out or asked)
    for steps, cfg in settings:
        images = sampler(prompts, steps, cfg)
        result["recall"].append(asdict(judge.recall(images, asked, steps, cfg)))
        print(result["recall"][-1], f"{time.monotonic() - started:.0f} s", flush=True)
        if (steps, cfg) == settings[0]:
            write_sheet(out / "sheet_training.png", images[:64], prompts[:64])
    if judge.held_out:
        pairs = [captions.caption(dataset.rows[i]) for i in judge.held_out]
        images = sampler(pairs)
        result["held_out"] = asdict(held_out_figures(sampler.pipe.vae, dataset, judge, images))
        write_sheet(out / "sheet_held_out.png", images[:64], pairs[:64])
    new = captions.new_combinations(dataset.rows)[: max(1, min(64, cases))]
    write_sheet(out / "sheet_new.png", sampler(new), new)
    one = time.monotonic()
    sampler(prompts[:1])
    result["seconds_one_picture"] = round(time.monotonic() - one, 2)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "evaluation.md").write_text(table(result))
    return result


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| steps | CFG | cases | nearest is the emoji | within five | nearest is that picture |",
        "|---|---|---|---|---|---|",
    ]
    for r in result["recall"]:
        hits = " | ".join(percent(r[key]) for key in ("top1", "top5", "exact"))
        lines.append(f"| {r['steps']} | {r['cfg']} | {r['cases']} | {hits} |")
    lines += ["", "| measure | value | real pictures |", "|---|---|---|"]
    if "held_out" in result:
        h = result["held_out"]
        by_style = ", ".join(f"{word} {percent(value)}" for word, value in h["by_style"].items())
        rebuilt = f"{percent(h['style_real'])}; through the VAE {percent(h['style_rebuilt'])}"
        lines += [
            f"| held-out pairs: style obeyed, by the judge of palette and texture ({h['cases']} cases) | "
            f"{percent(h['style'])} | {rebuilt} |",
            f"| the same by style | {by_style} | |",
            "| held-out pairs: style of the nearest of the emoji's own pictures, the true one among them | "
            f"{percent(h['style_of_own'])} | {percent(h['style_of_own_real'])} |",
            "| held-out pairs: style of the nearest training picture | "
            f"{percent(h['style_of_nearest'])} | {percent(h['style_of_nearest_real'])} |",
            "| held-out pairs: nearest training picture is the emoji | "
            f"{percent(h['emoji'])} | {percent(h['emoji_real'])} |",
        ]
    lines += [
        f"| VAE reconstruction, training pictures | {result['psnr_training']} dB | |",
        f"| VAE reconstruction, held-out pictures | {result['psnr_held_out']} dB | |",
        f"| one picture as shipped | {result['seconds_one_picture']} s | |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, default=Path("out/model"), help="an exported pipeline folder")
    add("--data", type=Path, default=Path("data"))
    add("--out", type=Path, default=Path("out/evaluation"))
    add("--cases", type=int, default=384)
    add("--batch", type=int, default=128)
    add("--quick", action="store_true", help="only as shipped, no other steps and CFG scales")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    sampler = Sampler(args.model, args.device, args.batch)
    dataset = load(args.data)
    steps, cfg = sampler.defaults["num_inference_steps"], sampler.defaults["true_cfg_scale"]
    grid = [(steps, cfg)]
    if not args.quick:
        grid += [(steps, scale) for scale in SCALES if scale != cfg] + [(50, cfg)]
    held_out = captions.held_out(dataset.rows)
    evaluate(sampler, dataset, args.cases, grid, args.out, held_out)
    print((args.out / "evaluation.md").read_text())


if __name__ == "__main__":
    main()
