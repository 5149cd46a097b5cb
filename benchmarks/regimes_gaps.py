"""The gaps of `auto` at each step, for easy and for hard images, as its own stats say.

    python benchmarks/regimes_gaps.py --captions reporting --device cuda --json FILE

Every image is made alone. An image is easy or hard by what its run needed: the number of computed steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from regimes import CAPTIONS, FIRST_SEED, sampled

from samovar import attach
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Runner, Task, make_tasks, read_prompts
from samovar.lab.methods import EXACT


def run_of(runner: Runner, task: Task, tolerance: float | str) -> dict[str, Any]:
    """What `auto` did for one image: which steps it computed, and the error that it saw at each."""
    with attach(runner.pipeline, cache={"backend": "auto", "tolerance": tolerance}) as attached:
        with runner.under(EXACT) as make:  # Nothing but what is attached here.
            make([task])
        (denoiser,) = attached.stats().cache.denoisers.values()
    branch = next(iter(denoiser.branches.values()))
    errors = [None if record.distance is None else round(record.distance, 6) for record in branch.steps]
    return {**task._asdict(), "computed": branch.computed, "mask": branch.mask, "errors": errors}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--captions", choices=("choosing", "reporting", "last"), default="choosing")
    parser.add_argument("--images", type=int, default=24, help="of each kind of captions")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--guidance", type=float, default=4.5)
    parser.add_argument("--sampler", choices=("euler", "unipc"), default="euler")
    parser.add_argument("--tolerance", default="high", help="exact, high, fast, or a number")
    parser.add_argument("--device", help="cuda or cpu (a GPU if there is one)")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    options = parser.parse_args(arguments)
    params = OmniDiffusionSamplingParams(num_inference_steps=options.steps, true_cfg_scale=options.guidance)
    runner = Runner("emoji", params, 1, "float32", options.device)
    sampled(runner.pipeline, options.sampler)
    named = options.tolerance
    tolerance = float(named) if named.replace(".", "", 1).isdigit() else named
    runs: list[dict[str, Any]] = []
    for kind in ("pairs", "free"):
        prompts = read_prompts(CAPTIONS / f"{options.captions}_{kind}.txt")[: options.images]
        runs += [{"kind": kind, **run_of(runner, task, tolerance)} for task in make_tasks(prompts, 1, FIRST_SEED)]
    about = {**runner.about(), "date": date.today().isoformat(), "sampler": options.sampler, "tolerance": tolerance,
             "captions": options.captions}  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    command = "python benchmarks/regimes_gaps.py"
    options.json.write_text(json.dumps({"command": command, "about": about, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
