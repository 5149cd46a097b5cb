"""What does a LoRA adapter cost on a GPU? Loading it, switching to it, and a step with it; resident and streamed.

    python benchmarks/gpu_lora.py --json benchmarks/results/gpu_lora.json
    python benchmarks/gpu_lora.py --tiny                      # the same on a CPU, to see that it runs

FLUX.1 of full size with random weights that are made on the GPU, and two adapters of rank 16 on all projections of
attention and MLP, saved and loaded as files. A switch is what happens between two requests, without the step that
follows it. Each output is compared to the bit with that of a model in which only this adapter was ever loaded. Rows are
printed, and kept in the file, as soon as they are there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import Bench, gib, is_same

from samovar import attach
from samovar.engine.lora import Adapter, Adapters

RANK, SWITCHES = 16, 12
GOAL_MS = 50.0
"""The most that a switch may take, resident."""
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "proj_mlp",
           "ff.net.0.proj", "ff.net.2"]  # fmt: skip
ORDERS: dict[str, tuple[Adapter, ...]] = {"a": (Adapter("a"),), "none": (), "b": (Adapter("b"),)}


def build(bench: Bench) -> Any:
    """A pipeline of a denoiser alone."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    transformer = gpu_models.build("flux", bench.device, bench.dtype, tiny=bench.tiny)
    others = dict.fromkeys(("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer, **others)


def save(pipe: Any, folder: Path, seed: int) -> str:
    from peft import LoraConfig, get_peft_model_state_dict

    torch.manual_seed(seed)
    pipe.transformer.add_adapter(LoraConfig(r=RANK, target_modules=TARGETS, init_lora_weights="gaussian"))
    weights = get_peft_model_state_dict(pipe.transformer)
    for name, tensor in weights.items():
        if "lora_B" in name:  # peft begins with zeros, which would change nothing.
            tensor.normal_(std=0.02)
    pipe.save_lora_weights(folder, {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()})
    pipe.unload_lora_weights()
    return str(folder)


def measure(bench: Bench, pipe: Any, adapters: Adapters, forward: Callable[[], Any], expected: Any) -> dict[str, Any]:
    """Figures of the pipeline as it is now."""
    row: dict[str, Any] = {}
    switches: list[float] = []
    for name, chosen in ORDERS.items():
        adapters.use(chosen)
        row[f"step_ms_{name}"], row[f"peak_gib_{name}"] = bench.pass_ms(forward)
        row[f"same_bits_{name}"] = is_same(forward(), expected[name])
    for number in range(SWITCHES):
        chosen = list(ORDERS.values())[number % len(ORDERS)]
        switches.append(1e3 * bench.seconds(lambda: adapters.use(chosen)))  # noqa: B023 - It is called at once.
        row["step_ms_after_a_switch"] = 1e3 * bench.seconds(forward)
    return row | {"switch_ms": statistics.median(switches), "switch_ms_most": max(switches)}


def run(bench: Bench, folder: Path, note: Callable[[str, dict[str, Any]], None]) -> None:
    pipe = build(bench)
    inputs = gpu_models.inputs("flux", bench.device, bench.dtype, tiny=bench.tiny)

    @torch.no_grad()
    def forward() -> torch.Tensor:
        output: torch.Tensor = pipe.transformer(**inputs)[0]
        return output

    sources = {name: save(pipe, folder / name, seed) for seed, name in enumerate("ab")}
    bare_ms, bare_gib = bench.pass_ms(forward)
    note("bare", {"step_ms": bare_ms, "peak_gib": bare_gib})
    expected = {"none": forward().cpu()}
    for name, source in sources.items():
        pipe.load_lora_weights(source)
        expected[name] = forward().cpu()
        pipe.unload_lora_weights()
    adapters: Adapters | None = None

    def load() -> None:
        nonlocal adapters
        adapters = Adapters(pipe, sources)

    load_s = bench.seconds(load)
    assert adapters is not None
    note("adapters", {"load_s_both": load_s, "gib_each": gib(adapters.bytes["a"])})
    row = measure(bench, pipe, adapters, forward, expected)
    row["added_percent"] = 100 * (row["step_ms_a"] / row["step_ms_none"] - 1)
    note("resident", row)
    bench.clear()
    attached = attach(pipe, offload={"mode": "layerwise", "device": str(bench.device)})
    note("layerwise", measure(bench, pipe, adapters, forward, expected))
    if bench.tiny:  # At full size this would only move all weights back.
        attached.detach()
        adapters.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    bench = Bench(torch.device("cpu" if options.tiny else "cuda"), options.tiny)
    result: dict[str, Any] = {"about": gpu_models.header(bench.device, "peft") | {"rank": RANK, "tiny": options.tiny}}
    started = time.perf_counter()

    def note(name: str, row: dict[str, Any]) -> None:
        result[name] = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(f"{time.perf_counter() - started:.0f} s: {name}: {json.dumps(result[name])}", flush=True)
        if options.json is not None:
            gpu_models.write(options.json, result)

    with tempfile.TemporaryDirectory() as folder:
        run(bench, Path(folder), note)
    parts = (result["resident"], result["layerwise"])
    same = all(value for part in parts for name, value in part.items() if name.startswith("same_bits"))
    is_fast = result["resident"]["switch_ms"] <= GOAL_MS
    print(f"same bits: {same}; a switch takes {result['resident']['switch_ms']:.1f} ms, the goal is {GOAL_MS:g}")
    return 0 if same and (is_fast or options.tiny) else 1


if __name__ == "__main__":
    sys.exit(main())
