"""Trains the model, in one call or several.

    python -m training.train --data data --tokenizers tokenizers --out out/emoji --minutes 9

Every call goes on where the last one stopped, until both stages have had their time. The work is
done in a process of its own: when a fast mode fails there, even by a crash, the next simpler one
continues from the last checkpoint. At the end of a call RUN/weights holds what export needs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from training import captions, checkpoint, loop, models, pictures
from training.flow import FlowStage, pack, tokenize
from training.settings import Settings, override
from training.vae import VaeStage, encode_all, reconstruction_psnr

DIVERGED = 3  # exit status
RESERVE = 20.0  # seconds kept back for the last save
Log = Callable[[str], None]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--stage", choices=("vae", "flow", "all"), default="all")
    add("--data", type=Path, default=Path("data"))
    add("--tokenizers", type=Path, default=Path("tokenizers"))
    add("--out", type=Path, default=Path("out/emoji"), help="the run's folder")
    add("--minutes", type=float, default=9.0, help="wall time of this call")
    add("--vae-minutes", type=float, default=3.0, help="the VAE's training time over all calls")
    add("--flow-minutes", type=float, default=14.0, help="the flow's training time over all calls")
    add("--vae-steps", type=int, help="a budget in steps instead")
    add("--flow-steps", type=int, help="a budget in steps instead")
    add("--init", type=Path, help="start from a weights folder, when the full state is lost")
    add("--mode", choices=loop.MODES, default=loop.MODES[0], help="the first mode to try")
    add("--vae-mode", choices=("compiled", "eager"), default="compiled")
    add("--rate", type=float, default=1.0, help="multiplies all learning rates")
    add("--set", nargs="*", default=[], metavar="flow.batch=256", help="settings to change")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--worker", action="store_true", help="train in this process, in this mode only")
    add("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_log(out: Path) -> Log:
    """Lines to the screen and to RUN/train.log, each with the time of day."""
    out.mkdir(parents=True, exist_ok=True)

    def log(line: str) -> None:
        line = f"[{time.strftime('%H:%M:%S')}] {line}"
        print(line, flush=True)
        with (out / "train.log").open("a") as file:
            file.write(line + "\n")

    return log


# -- the supervisor


def supervise(args: argparse.Namespace, arguments: list[str]) -> int:
    """Run workers, each in a simpler mode than the one that failed, until the time is over."""
    log = make_log(args.out)
    until = time.time() + args.minutes * 60
    mode, vae_mode, rate = args.mode, args.vae_mode, args.rate
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str((args.out.parent / "inductor").resolve()))
    while time.time() < until - RESERVE:
        command = [sys.executable, "-m", "training.train", *arguments, "--worker"]
        command += ["--mode", mode, "--vae-mode", vae_mode, "--rate", str(rate)]
        command += ["--until", str(until)]
        try:
            code = subprocess.run(command, env=environment, timeout=until - time.time()).returncode
        except subprocess.TimeoutExpired:
            log("the worker did not stop in time and was ended; its last checkpoint is kept")
            return 1
        if code == 0:
            return 0
        if code == DIVERGED:
            rate /= 2
            log(f"WARNING: the loss diverged; again from the last checkpoint at rate {rate}")
        elif not (args.out / "latents.safetensors").is_file() and vae_mode == "compiled":
            vae_mode = "eager"
            log(f"WARNING: the worker failed with status {code}; again with the VAE uncompiled")
        elif mode == loop.MODES[-1]:
            log(f"ERROR: the simplest mode failed with status {code}")
            return code
        else:
            mode = loop.MODES[loop.MODES.index(mode) + 1]
            log(f"WARNING: the worker failed with status {code}; again in mode {mode!r}")
    log("no time is left in this call")
    return 1


# -- the worker


@dataclass(frozen=True)
class Run:
    """One worker's job: what to train on, where to keep it, and until when."""

    args: argparse.Namespace
    settings: Settings
    dataset: pictures.Dataset
    deadline: float
    log: Log

    @property
    def out(self) -> Path:
        return Path(self.args.out)

    @property
    def latents(self) -> Path:
        return self.out / "latents.safetensors"

    @property
    def training_rows(self) -> list[int]:
        return captions.training_rows(self.dataset.rows, self.settings.held_out)


def device_pictures(run: Run) -> Tensor:
    return torch.from_numpy(run.dataset.pictures.copy()).to(run.args.device)


def train_vae(run: Run) -> bool:
    """Train the VAE; when its budget is spent, write the latents. True when they are there."""
    data = device_pictures(run)
    seen = data[run.training_rows]
    stage = VaeStage(run.settings, seen, run.args.rate)
    budget = loop.Budget(run.args.vae_minutes * 60, run.args.vae_steps)
    path = run.out / "vae.safetensors"
    progress = loop.run(stage, budget, path, run.settings, run.args.vae_mode, run.deadline, run.log)
    if not progress.done:
        return False
    vae = stage.averaged()
    psnr = reconstruction_psnr(vae, seen[:: max(1, len(seen) // 512)]).mean().item()
    latents = encode_all(vae, data)
    numbers = {"psnr": psnr, "scaling": 1 / latents.std().item(), "shift": latents.mean().item()}
    write_latents(run, vae, latents, numbers)
    return True


def write_latents(run: Run, vae: Any, latents: Tensor, numbers: dict[str, float]) -> None:
    """Latents, VAE weights and the VAE's three numbers, whole or not at all."""
    run.log(f"vae: latents {tuple(latents.shape)}, {numbers}")
    weights = models.named_weights(vae).items()
    tensors = {f"vae.{name}": p.detach().cpu().clone() for name, p in weights}
    scratch = run.latents.with_suffix(".part")
    header = {name: str(number) for name, number in numbers.items()}
    save_file({"latents": latents, **tensors}, scratch, header)
    os.replace(scratch, run.latents)


def encode_with(run: Run, folder: Path) -> None:
    """The latents by the VAE of a weights folder, instead of training one."""
    weights, about = checkpoint.read_weights(folder)
    vae = models.build_vae(run.settings.model)
    models.set_weights(vae, models.part_weights(weights, "vae"))
    latents = encode_all(vae.to(run.args.device).eval(), device_pictures(run))
    numbers = {name: float(str(about[name])) for name in ("psnr", "scaling", "shift")}
    write_latents(run, vae, latents, numbers)


def read_latents(run: Run) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The latents and VAE weights that the VAE stage left, and its three numbers."""
    if not run.latents.is_file():
        raise FileNotFoundError(f"no {run.latents}: train the VAE first, with --stage vae or all")
    with safe_open(run.latents, "pt") as file:
        numbers = {name: float(value) for name, value in file.metadata().items()}
    return load_file(run.latents), numbers


def flow_stage(run: Run) -> FlowStage:
    """The flow stage over the training rows, with its initial weights."""
    settings, chosen = run.settings, run.training_rows
    tensors, numbers = read_latents(run)
    latents = (tensors["latents"][chosen] - numbers["shift"]) * numbers["scaling"]
    clip, t5 = models.load_tokenizers(run.args.tokenizers)
    texts = captions.all_captions([run.dataset.rows[i] for i in chosen], settings.seed)
    tokens = tokenize(texts, clip, t5, settings.model.text_tokens)
    torch.manual_seed(settings.seed)
    weights = models.flow_weights(models.build_flow(settings.model, clip, t5))
    if run.args.init is not None:
        kept, _ = checkpoint.read_weights(run.args.init)
        weights = {name: kept[name] for name in weights}
    packed = pack(latents).to(run.args.device)
    return FlowStage(settings, weights, packed, tokens, t5.pad_token_id, run.args.rate)


def train_flow(run: Run) -> None:
    """Train the flow, and write averaged weights with their description to RUN/weights."""
    stage = flow_stage(run)
    budget = loop.Budget(run.args.flow_minutes * 60, run.args.flow_steps)
    path = run.out / "flow.safetensors"
    progress = loop.run(stage, budget, path, run.settings, run.args.mode, run.deadline, run.log)
    tensors, numbers = read_latents(run)
    about: dict[str, Any] = {
        "settings": run.settings.to_json(), **numbers, "sources": run.dataset.sources,
        "flow_steps": progress.step, "flow_seconds": round(progress.seconds),
        "flow_loss": progress.loss, "batch": run.settings.flow.batch,
        "pictures": len(stage.latents), "device": run.args.device, "mode": run.args.mode,
    }  # fmt: skip
    vae = models.part_weights(tensors, "vae")
    checkpoint.write_weights(run.out / "weights", stage.averaged(), vae, about)
    run.log(f"flow: {'done' if progress.done else 'to be continued'}, weights written")


def work(args: argparse.Namespace) -> None:
    """Train in this process until the call's time or both budgets are spent."""
    log = make_log(args.out)
    until = args.until or time.time() + args.minutes * 60
    deadline = time.monotonic() + until - time.time() - RESERVE
    settings = override(Settings(), args.set)
    if args.device == "cpu" and args.mode != "eager":
        log(f"mode {args.mode!r} needs a GPU: training in mode 'eager'")
        args.mode = args.vae_mode = "eager"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass crashes on Hopper in 2.11
    log(f"torch {torch.__version__} on {args.device}, mode {args.mode!r}, {settings.to_json()}")
    run = Run(args, settings, pictures.load(args.data), deadline, log)
    if args.init is not None and not run.latents.is_file():
        encode_with(run, args.init)
    ready = run.latents.is_file()
    if args.stage in ("vae", "all") and not ready:
        ready = train_vae(run)
    if args.stage == "flow" or (args.stage == "all" and ready):
        train_flow(run)


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    if not args.worker:
        return supervise(args, arguments)
    try:
        work(args)
    except loop.Diverged as error:
        make_log(args.out)(f"ERROR: {error}")
        return DIVERGED
    return 0


if __name__ == "__main__":
    sys.exit(main())
