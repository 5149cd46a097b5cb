"""A model that is larger than the host's memory, run from its own files.

    python benchmarks/disk.py --folder /scratch [--host-memory 16GiB] [--layers 60] [--json FILE]

A Qwen-Image with random weights is written shard by shard, so that it is never in memory as a whole, and loaded as a
mapping of its files. The bare model runs once, for its bits; then it streams within the budget. The input is small:
what is measured is the disk. Everything runs on the CPU, where "the device" is host memory that is not counted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import gpu_models
import torch
from diffusers import QwenImageTransformer2DModel
from safetensors.torch import save_file

from samovar.core.settings import parse_bytes
from samovar.hooks import running
from samovar.offload import OffloadConfig, apply_offload, format_bytes

SHARD = 2 * 2**30


class Holder:
    """The least that counts as a pipeline."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer


def write(folder: Path, layers: int) -> int:
    """A model folder, written a shard at a time; its bytes."""
    with torch.device("meta"):
        model = QwenImageTransformer2DModel(num_layers=layers).to(torch.bfloat16)
    stream = (torch.randn(2**24 + 43, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    model.save_config(folder)
    shard: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    whole = held = number = 0

    def close() -> None:
        nonlocal shard, held, number
        name = f"diffusion_pytorch_model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard, held, number = {}, 0, number + 1

    for at, (path, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim == 1:
            tensor = torch.full(parameter.shape, float(path.endswith("weight")), dtype=torch.bfloat16)
        else:
            repeats = -(-parameter.numel() // stream.numel())
            tensor = stream.roll(at * 7919).repeat(repeats)[: parameter.numel()].view(parameter.shape).clone()
        shard[path] = tensor
        held += tensor.numel() * 2
        whole += tensor.numel() * 2
        if held >= SHARD:
            close()
    if shard:
        close()
    text = json.dumps({"metadata": {"total_size": whole}, "weight_map": index})
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(text)
    return whole


def inputs() -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=made).to(torch.bfloat16)  # noqa: E731
    return {
        "hidden_states": normal(1, 16, 64),
        "encoder_hidden_states": normal(1, 8, 3584),
        "encoder_hidden_states_mask": None,
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_shapes": [(1, 4, 4)],
        "return_dict": False,
    }


def anonymous_bytes() -> int:
    """What this process holds of memory that is in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder with room for the model")
    parser.add_argument("--host-memory", default="16GiB")
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    whole = write(options.folder, options.layers)
    print("written:", format_bytes(whole), flush=True)
    model = QwenImageTransformer2DModel.from_pretrained(options.folder, torch_dtype=torch.bfloat16).eval()
    call = inputs()
    started = time.perf_counter()
    expected = model(**call)[0].clone()
    bare_s = time.perf_counter() - started
    print(f"bare: {bare_s:.1f} s", flush=True)
    holder = Holder(model)
    config = OffloadConfig("layerwise", device="cpu", host_memory=options.host_memory)
    with apply_offload(holder, config) as offloaded:
        print(offloaded.tiers, flush=True)
        times, is_same, most = [], [], 0
        with running(holder):
            for _ in range(3):
                started = time.perf_counter()
                is_same.append(torch.equal(model(**call)[0], expected))
                times.append(round(time.perf_counter() - started, 2))
                most = max(most, anonymous_bytes())
                print(times[-1], is_same[-1], format_bytes(most), flush=True)
        tiers, stats = offloaded.tiers, offloaded.stats()
        result = {
            "weights_bytes": whole,
            "host_memory": parse_bytes(options.host_memory, "host_memory"),
            "same_bits": all(is_same),
            "bare_s": round(bare_s, 2),
            "forward_s": times,
            "planned_read_s": round(tiers.read_seconds("forward"), 2),
            "disk_bytes_a_forward": tiers.bytes_in("disk", "forward"),
            "pinned_bytes": stats.pinned_bytes,
            "memory_in_no_file_bytes": most,
            "device_bytes": stats.peak_held_bytes,
            "setup_s": round(stats.setup_s, 2),
        }
    print(json.dumps(result, indent=1))
    if options.json:
        gpu_models.write(options.json, gpu_models.header(torch.device("cpu")) | result)


if __name__ == "__main__":
    main()
