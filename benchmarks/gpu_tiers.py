"""The cost of each tier of host memory: one model, saved to disk and loaded again, at several budgets.

    python benchmarks/gpu_tiers.py [--blocks 8] [--folder /scratch] [--json FILE]

Each budget must give the bits of the resident model; the time of a forward stands beside the planned reading time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel

from samovar.hooks import running
from samovar.offload import OffloadConfig, apply_offload, format_bytes

GIB = 2**30


class Holder:
    """The least that counts as a pipeline."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer


def build(folder: str, blocks: int) -> Any:
    """A FLUX with few blocks and random weights, mapped from its files."""
    with torch.device("cuda"):
        model = FluxTransformer2DModel(num_layers=blocks, num_single_layers=2 * blocks, guidance_embeds=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02)
    model.to(torch.bfloat16).save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()


def inputs() -> dict[str, Any]:
    made = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device="cuda", dtype=torch.bfloat16)

    return {
        "hidden_states": normal(1, 4096, 64),
        "encoder_hidden_states": normal(1, 512, 4096),
        "pooled_projections": normal(1, 768),
        "timestep": torch.tensor([0.5], device="cuda", dtype=torch.bfloat16),
        "guidance": torch.tensor([3.5], device="cuda"),
        "img_ids": torch.zeros(4096, 3, device="cuda"),
        "txt_ids": torch.zeros(512, 3, device="cuda"),
        "return_dict": False,
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model, call = build(folder, options.blocks), inputs()
        whole = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        model.cuda()
        expected = model(**call)[0].clone()
        model = FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16).eval()
        holder = Holder(model)
        for share in (None, 0.5, 0.1):
            for compress in ("none", "lossless"):
                budget = None if share is None else int(whole * share)
                config = OffloadConfig("layerwise", host_memory=budget, compress=compress)
                with apply_offload(holder, config) as offloaded, running(holder):
                    is_same = [torch.equal(model(**call)[0], expected) for _ in range(2)]
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    for _ in range(5):
                        model(**call)
                    torch.cuda.synchronize()
                    seconds = (time.perf_counter() - start) / 5
                    tiers, stats = offloaded.tiers, offloaded.stats()
                rows.append(
                    {
                        "host_memory": budget,
                        "compress": compress,
                        "same_bits": all(is_same),
                        "forward_s": seconds,
                        "planned_read_s": tiers.read_seconds("forward"),
                        "disk_bytes": tiers.bytes_in("disk", "forward"),
                        "pinned_bytes": stats.pinned_bytes,
                        "setup_s": stats.setup_s,
                    }
                )
                print(format_bytes(budget or whole), rows[-1], flush=True)
                print(tiers, flush=True)
    if options.json:
        options.json.write_text(json.dumps({"weights": whole, "rows": rows}, indent=2))
    assert all(row["same_bits"] for row in rows)


if __name__ == "__main__":
    main()
