"""Trains, judges and packs the video model, in one command of a few minutes.

    python -m training.motion.train --data carry --out result --seconds 480

Autoencoder, judge, latents, transformer, export, evaluation, each with its share of the time. What
is done is written as it is done: metrics.json, train.log, sheet.png and the pipeline folder in
parts, model.tar.0, model.tar.1, ... (`cat model.tar.* | tar x`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from training import loop, pictures
from training.checkpoint import Progress
from training.models import named_weights, set_weights
from training.motion import models, stages
from training.motion.clips import KINDS, all_captions, caption
from training.motion.evaluate import Sampler, cases, evaluate, judge_figures, write_strips
from training.motion.export import defaults, export, pack, write_defaults
from training.motion.judge import train_judge
from training.motion.settings import TINY, MotionConfig

MODES = ("graph-compiled", "graph", "eager")
VAE_STEPS, VAE_SHARE = 2000, (0.14, 0.27)  # so many steps if they fit into so much of the time
JUDGE, BANK = 0.07, 0.035  # shares of the time after that
FLOW, END = 0.88, 0.98  # when they end


class Run:
    """One run of the command: its folder, its clock, its log and its figures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began, self.seconds, self.out, self.mode = time.monotonic(), args.seconds, args.out, args.mode
        self.work = args.work or args.out / "work"
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = TINY if args.tiny else MotionConfig()
        self.counts = (8, 12) if args.tiny else (240, 768)
        dataset = pictures.load(args.data)
        chosen = 2 * args.names if args.names else len(dataset.rows)
        self.rows, self.sources = dataset.rows[:chosen], dataset.sources
        self.pictures = torch.from_numpy(dataset.pictures[:chosen].copy()).to(self.device)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(row.name for row in self.rows))}
        self.names = torch.tensor([numbers[row.name] for row in self.rows], device=self.device)
        from transformers import T5TokenizerFast

        self.tokenizer = T5TokenizerFast.from_pretrained(args.data / "tokenizer")
        self.start: dict[str, dict[str, Tensor]] = {}
        if args.start:
            folders = {part: sorted((args.start / part).glob("*.safetensors")) for part in ("vae", *models.PARTS)}
            self.start = {
                part: {k: v.float() for f in files for k, v in load_file(f).items()} for part, files in folders.items()
            }
        self.share = args.vae_share
        self.metrics: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU", "torch": torch.__version__,
            "settings": json.loads(self.config.to_json()), "names": len(numbers), "pictures": len(self.rows),
        }  # fmt: skip

    def at(self, share: float) -> float:
        """The moment when this share of the time is spent."""
        return self.began + share * self.seconds

    def log(self, text: str) -> None:
        line = f"[{time.monotonic() - self.began:6.1f}] {text}"
        print(line, flush=True)
        with (self.out / "train.log").open("a") as file:
            file.write(line + "\n")

    def save(self, **figures: Any) -> None:
        self.metrics.update(figures)
        (self.out / "metrics.json").write_text(json.dumps(self.metrics, indent=1) + "\n")

    def train(self, stage: Any, deadline: float, budget: loop.Until, path: Path) -> Progress:
        """Until `deadline`, in the fastest mode that works."""
        modes = MODES[MODES.index(self.mode) :] if self.device.type == "cuda" else ("eager",)
        for mode in modes:
            try:
                return loop.run(stage, budget, path, self.config, mode, deadline, self.log)
            except Exception:
                self.log(f"{stage.name}: mode {mode} failed\n{traceback.format_exc()}")
                if mode == modes[-1]:
                    raise
                self.mode = modes[modes.index(mode) + 1]
        raise AssertionError


def flow_stage(run: Run, latents: Tensor) -> stages.ClipFlow:
    """A transformer and text encoder at their start, over these latents."""
    torch.manual_seed(run.config.seed)
    parts = {"transformer": models.build_transformer(run.config),
             "text_encoder": models.build_text_encoder(run.config, run.tokenizer)}  # fmt: skip
    for part in models.PARTS:
        if run.start:
            set_weights(parts[part], run.start[part])
    weights = {f"{p}.{n}": w.detach().clone() for p in models.PARTS for n, w in named_weights(parts[p]).items()}
    sample = latents[:1].float()
    mean, std = sample.mean((0, 1, 2)), sample.flatten(0, 2).std(0)
    texts = stages.token_ids(all_captions(run.rows), run.tokenizer, run.config.text_tokens)
    return stages.ClipFlow(run.config, weights, latents, mean, std, texts)


def warm_up(run: Run) -> None:
    """Fill the compiler's cache on disk: another process does it while the autoencoder trains."""
    shape = (1, len(run.rows) * len(KINDS), 5 * (64 // run.config.spatial) ** 2, run.config.latent_channels)
    loop.check_compiled(flow_stage(run, torch.randn(shape, device=run.device).bfloat16()), print)


def vae_share(run: Run, stage: stages.ClipVae) -> float:
    """When the autoencoder's time should end, as a share of all, by how fast a step is here."""
    for step in range(9):
        if step == 4:  # the first ones choose their kernels
            began = time.monotonic()
        stage.gradient(stage.batch(step), 0.0, stage.optimiser.master)[0].item()
    pace = (time.monotonic() - began) / 5
    wanted = (time.monotonic() - run.began + VAE_STEPS * pace) / run.seconds
    run.log(f"vae: {1000 * pace:.0f} ms a step")
    if run.share is not None:
        return run.share
    return min(max(wanted, VAE_SHARE[0]), VAE_SHARE[1])


def train_all(run: Run) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    vae_stage = stages.ClipVae(run.config, run.pictures, run.start.get("vae"))
    spent = vae_share(run, vae_stage)
    end = run.at(spent)
    progress = loop.run(vae_stage, loop.Until(end), run.work / "vae.safetensors", run.config, "eager", end, run.log)
    vae = vae_stage.averaged()
    vae_weights = {name: value.detach().clone() for name, value in vae_stage.parameters.items()}
    run.save(vae_steps=progress.step, vae_seconds=round(progress.seconds, 1))
    judge, steps = train_judge(run.config, run.pictures, run.names, run.at(spent + JUDGE))
    run.save(judge_steps=steps, judge=judge_figures(judge, vae, run.pictures, run.names, run.rows, 2 * run.counts[0]))
    run.log(f"judge: {steps} steps, {run.metrics['judge']}")
    latents = stages.bank(vae, run.pictures, run.config, run.at(spent + JUDGE + BANK))
    stage = flow_stage(run, latents)
    run.log(f"latents: {tuple(latents.shape)}, mean deviation {stage.std.mean().item():.3f}")
    folder, budget = run.work / "motion", loop.Until(run.at(FLOW))
    for end in ((time.monotonic() - run.began) / run.seconds / 2 + FLOW / 2, FLOW):
        progress = run.train(stage, run.at(end), budget, run.work / "flow.safetensors")
        size = export(
            folder, run.config, vae_weights, stage.averaged(), (stage.mean, stage.std), run.tokenizer, run.sources
        )
        pack(folder, run.out)
        figures = {"flow_steps": progress.step, "flow_seconds": round(progress.seconds, 1), "flow_loss": progress.loss}
        run.save(bytes=size, draws=len(latents), **figures)
        run.log(f"exported: {size / 2**20:.2f} MiB")
    finish(run, judge, folder)


def finish(run: Run, judge: Any, folder: Path) -> None:
    """Judge the exported folder and give it the defaults that did best."""
    torch.backends.cudnn.benchmark = False  # many shapes, each a few times
    sampler = Sampler(folder, run.device, 8 if run.config == TINY else 128)
    call, shift = defaults(run.config), 2.0
    looks = cases(run.rows, 24, 4)
    texts = [caption(run.rows[p], KINDS[m]) for p, m in looks]
    if run.config == TINY:
        call["num_inference_steps"] = 3
    write_strips(run.out / "sheet.png", sampler(texts, call, shift), texts)
    run.log("sheet written")
    run.metrics["began"] = time.monotonic()
    call, shift = evaluate(
        sampler, judge, run.rows, run.names, call, run.counts, run.at(END), run.metrics
    )  # fmt: skip
    del run.metrics["began"]
    run.save()
    write_defaults(folder, call, shift)
    pack(folder, run.out)
    write_strips(run.out / "sheet.png", sampler(texts, call, shift), texts)
    run.log(f"test: {run.metrics['test']}, {call}, shift {shift}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("carry"), help="what training.motion.data wrote")
    add("--out", type=Path, default=Path("out/motion"), help="the folder for the results")
    add("--work", type=Path, help="the folder for checkpoints; default: OUT/work")
    add("--seconds", type=float, default=480.0, help="wall time of the whole command")
    add("--start", type=Path, help="a pipeline folder of an earlier run, to go on from its weights")
    add("--vae-share", type=float, help="when the autoencoder's time ends, as a share of all (by its speed)")
    add("--names", type=int, help="only the first so many emoji")
    add("--mode", choices=MODES, default=MODES[0], help="how the transformer is trained; simpler ones follow")
    add("--tiny", action="store_true", help="tiny networks, for a look at the whole chain")
    add("--warm-up", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    run = Run(args)
    if args.warm_up:
        return warm_up(run)
    helper = None
    if run.device.type == "cuda" and args.mode == "graph-compiled":
        command = [sys.executable, "-m", "training.motion.train", *sys.argv[1:], "--warm-up"]
        helper = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        train_all(run)
    except Exception:
        run.log(traceback.format_exc())
        run.save(failed=True)
        sys.exit(1)
    finally:
        if helper is not None and helper.poll() is None:
            helper.kill()
        run.save(seconds=round(time.monotonic() - run.began, 1))
    return None


if __name__ == "__main__":
    main()
