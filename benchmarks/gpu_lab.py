"""The lab on a model that does not fit: FLUX.1 12B, random weights, within a memory budget.

    PYTHONPATH=src:tests python benchmarks/gpu_lab.py --gpu-memory 8GiB --json FILE
    PYTHONPATH=src:tests python benchmarks/gpu_lab.py --tiny --device cpu --gpu-memory 2GiB --json FILE

Exact images, `auto`, a schedule and plain steps are made with all weights on the GPU and within the budget: the bits
and the counts must be the same, and the peak within the budget. Encoders and VAE are small; the transformer is what
counts.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_models import build, header, spec, write

from pipelines import text
from samovar.core.settings import parse_bytes
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Runner, Task, cached, plain
from samovar.lab.methods import EXACT

TASKS = [Task("a cat", 0), Task("a house", 1)]


def save_flux(folder: Path, tiny: bool) -> None:
    """A FluxPipeline with a transformer of full size."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextModel, T5Config, T5EncoderModel

    which = spec("flux", tiny=tiny)
    pooled = {"hidden_size": which.pooled_width, "projection_dim": which.pooled_width}
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=8,
        block_out_channels=(16, 32, 32, 32), latent_channels=16, shift_factor=0.0, scaling_factor=1.0,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        vae.bfloat16(),
        CLIPTextModel(text.clip_config(**pooled)).bfloat16(),
        text.clip_tokenizer(),
        T5EncoderModel(T5Config(**text.t5_config() | {"d_model": which.text_width})).bfloat16(),
        text.t5_tokenizer(),
        build("flux", "cpu", tiny=tiny),
    ).save_pretrained(folder)


def measure(folder: Path, options: argparse.Namespace, **engine: Any) -> dict[str, Any]:
    """What each method makes, counts and takes, and the peak of GPU memory."""
    side = 64 if options.tiny else 1024
    params = OmniDiffusionSamplingParams(
        num_inference_steps=options.steps, height=side, width=side, max_sequence_length=16
    )
    runner = Runner(str(folder), params, 1, "bfloat16", options.device, **engine)
    steps = options.steps
    mask = "".join("#" if step < 3 or step % 2 else "." for step in range(steps))
    found: dict[str, Any] = {}
    is_cuda = runner.device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    for method in (EXACT, cached("auto", {}), cached("tea_cache", {"schedule": mask}), plain(steps // 2)):
        with runner.under(method) as make:
            made = [make([task]) for task in TASKS]
        found[method.name] = {"images": torch.cat([one.images.cpu() for one in made]),
                              "reports": [dict(one.report) for one in made],
                              "seconds": round(made[-1].seconds, 3)}  # fmt: skip
    found["peak_bytes"] = torch.cuda.max_memory_allocated() if is_cuda else 0
    runner.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpu-memory", default="8GiB")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        save_flux(Path(place), options.tiny)
        whole = measure(Path(place), options)
        gc.collect()
        torch.cuda.empty_cache()
        within = measure(Path(place), options, gpu_memory=options.gpu_memory)
    names = [name for name in whole if name != "peak_bytes"]
    rows = {
        name: {
            "same_bits": torch.equal(whole[name]["images"], within[name]["images"]),
            "same_counts": whole[name]["reports"] == within[name]["reports"],
            "computed": [one.get("computed", 1.0) for one in within[name]["reports"]],
            "seconds": [whole[name]["seconds"], within[name]["seconds"]],
        }
        for name in names
    }
    budget = parse_bytes(options.gpu_memory, "gpu_memory") or 0
    peaks = [whole["peak_bytes"], within["peak_bytes"]]
    about = header(options.device, "diffusers") | {"gpu_memory": options.gpu_memory, "steps": options.steps}
    write(options.json, {**about, "peak_gib": [round(peak / 2**30, 2) for peak in peaks],
                         "is_within": within["peak_bytes"] <= budget, "methods": rows})  # fmt: skip
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
