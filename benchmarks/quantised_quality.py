"""Quality of the built-in model with quantised weights: every kind that runs here, beside a cache.

    PYTHONPATH=src:tests python benchmarks/quantised_quality.py --json benchmarks/results/quantised_quality.json

It is `samovar compare`, and GGUF files of the built-in model are made for it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from pipelines.gguf_files import write_gguf
from samovar.arch.quantised import KINDS
from samovar.builtin import BUILTIN_MODELS

COMMAND = "python benchmarks/quantised_quality.py"
GGUF_TYPES = ("Q8_0", "Q5_1", "Q4_1", "Q4_0")


def measure(folder: Path, prompts: int, steps: int) -> dict[str, Any]:
    """The report of `samovar compare`, with files by their names alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = [name for name, kind in KINDS.items() if device in kind.devices]
    model = FluxTransformer2DModel.from_pretrained(BUILTIN_MODELS["emoji"] / "transformer")
    kinds += [str(write_gguf(folder / f"{kind}.gguf", model, kind)) for kind in GGUF_TYPES]
    options = [word for kind in kinds for word in ("--quantization", kind)]
    size = ["--num-prompts", str(prompts), "--steps", str(steps), "-o", str(folder / "compare")]
    # In a process of its own: it sets what torch reads when it is imported.
    command = [sys.executable, "-m", "samovar", "compare", "emoji", *options, "--cache", "auto"]
    subprocess.run([*command, *size, "--dtype", "float32"], check=True)
    text = (folder / "compare" / "compare.json").read_text(encoding="utf-8").replace(f"{folder}/", "")
    report: dict[str, Any] = json.loads(text)
    return {"command": COMMAND, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), options.prompts, options.steps)
    for row in report["rows"]:
        print(f"{row['method']:24} {row['psnr']:7.2f} dB  LPIPS {row['lpips']:.5f}")
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
