"""Time to the built-in model's first image, beside importing diffusers' pipeline alone, in one run.

    python benchmarks/builtin.py [--json FILE] [--rounds 3]

Each round starts fresh processes in turn: one that only imports FluxPipeline, and `samovar generate`. Start-up is all
that is neither loading weights nor denoising; the best of the rounds is kept for each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

STEPS = (28, 50)


def seconds_of(*command: str) -> tuple[float, str]:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout


def one_round(folder: str) -> dict[str, float]:
    """Seconds of each part, in fresh processes."""
    row = {"diffusers_import": seconds_of("-c", "from diffusers import FluxPipeline")[0]}
    for steps in STEPS:
        picture = str(Path(folder) / "cat.png")
        command = ["-m", "samovar", "generate", "a grinning cat, 3d style", "--json", "-o", picture, "--seed", "7"]
        total, output = seconds_of(*command, "--steps", str(steps))
        report = json.loads(output)
        row[f"{steps}_steps"] = report["seconds"]
        row["weights"] = report["load_seconds"]
        row[f"start_up_{steps}"] = total - report["seconds"] - report["load_seconds"]
    return row


def measure(rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        rows = [one_round(folder) for _ in range(rounds)]
    best = {name: round(min(row[name] for row in rows), 2) for name in rows[0]}
    best["start_up"] = min(best.pop(f"start_up_{steps}") for steps in STEPS)
    best["start_up_ratio"] = round(best["start_up"] / best["diffusers_import"], 2)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.rounds)
    for name, value in result.items():
        print(f"{name:18} {value:6.2f}{'' if name.endswith('ratio') else ' s'}")
    if options.json:
        about: dict[str, Any] = {"command": "python benchmarks/builtin.py", "date": date.today().isoformat()}
        about |= {name: version(name) for name in ("torch", "diffusers", "transformers")}
        about |= {"python": platform.python_version(), "cores": os.cpu_count(), "seconds": result}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
