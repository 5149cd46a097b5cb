"""Where to compute a few steps: at even distances, or many of them at the beginning. Captions do not agree.

    python benchmarks/regimes_placement.py --json FILE

Schedules of as many computed steps, with lines through the outputs for the others, so that nothing but the place of the
steps differs. On the captions that constants are chosen by.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu_models
import torch
from regimes import Cell, sampled, tasks_of

from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Runner, Session, cached
from samovar.lab.planner import even_mask

BATCH = 24


def measure(cell: Cell, placements: dict[str, str], images: int, device: str) -> list[dict[str, Any]]:
    """How near images stay with each placement."""
    params = OmniDiffusionSamplingParams(num_inference_steps=cell.steps, true_cfg_scale=cell.guidance)
    runner = Runner("emoji", params, BATCH, "float32", device)
    sampled(runner.pipeline, cell.sampler)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        session = Session(runner, tasks_of("choosing", cell.kind, images), Journal(Path(folder), cell._asdict()))
        for name, mask in placements.items():
            settings = {"schedule": mask, "forecast": "linear", "forecast_of": "output"}
            found = [image.psnr for image in session.measure(cached("tea_cache", settings, name)).images]
            rows.append({"cell": cell.name, "placement": name, "mask": mask, "computed": mask.count("#"),
                         "psnr": round(fmean(found), 2), "psnr_worst": round(min(found), 2)})  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--computed", type=int, default=12)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--sampler", choices=("euler", "unipc"), default="euler")
    parser.add_argument("--images", type=int, default=24, help="of each kind of captions")
    parser.add_argument("--device", help="cuda or cpu (a GPU if there is one)")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    options = parser.parse_args(arguments)
    placements = {
        "even": even_mask(options.steps, options.computed),
        "dense at the beginning": even_mask(options.steps, options.computed, first=max(4, options.computed // 2)),
    }
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    about, rows = {**gpu_models.header(device), "images": options.images}, []
    for kind in ("pairs", "free"):
        cell = Cell(options.steps, options.guidance, kind, options.sampler)
        rows += measure(cell, placements, options.images, device)
    gpu_models.write(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
