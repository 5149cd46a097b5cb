"""What each feature costs or saves on a GPU, alone and with the others: whole runs, time and peak memory.

    python benchmarks/gpu_compose.py --json benchmarks/results/gpu_compose.json
    python benchmarks/gpu_compose.py --parts flux qwen omni      # what is run by default, in this order
    python benchmarks/gpu_compose.py --tiny                      # the same on a CPU, to see that it runs

A pipeline is a text encoder and a denoiser of full size with random weights; a run encodes one prompt and takes twenty
steps. The cache follows a schedule that skips every second step, so that all with a cache skip the same ones, and what
they draw can be compared to the bit. A run that does not count comes first: it compiles, and learns what the cache must
know. `omni` is the example that people try first: a cache and offload together, by their names, in fifty steps.
Several ranks need several GPUs, and are not here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import Bench, gib

from samovar import Omni, attach

PARTS = ("flux", "qwen", "omni")
STEPS = 20
SCHEDULE = "#." * (STEPS // 2)
GOAL = 0.55
"""The most that cache and layerwise offload may take of layerwise offload alone."""

CACHE: dict[str, Any] = {"cache": {"backend": "tea_cache", "schedule": SCHEDULE}}
OFFLOADS: dict[str, dict[str, Any]] = {"model": {"offload": "model"}, "layerwise": {"offload": "layerwise"}}
COMPILE: dict[str, Any] = {"compile": True}
FROM_HOST: dict[str, dict[str, Any]] = {
    "model": OFFLOADS["model"],
    "layerwise": OFFLOADS["layerwise"],
    "cache + model": CACHE | OFFLOADS["model"],
    "cache + layerwise": CACHE | OFFLOADS["layerwise"],
    "cache + layerwise + compile": CACHE | OFFLOADS["layerwise"] | COMPILE,
}
RESIDENT: dict[str, dict[str, Any]] = {
    "nothing": {}, "cache": CACHE, "compile": COMPILE, "cache + compile": CACHE | COMPILE,
}  # fmt: skip

_ENCODERS: dict[str, dict[str, int]] = {
    "flux": {"d_ff": 10240, "num_layers": 24, "num_heads": 64, "d_kv": 64},
    "qwen": {"d_ff": 18944, "num_layers": 28, "num_heads": 28, "d_kv": 128},
}
"""As large as T5-XXL and as the encoder of Qwen-Image."""
_TINY_ENCODER = {"d_ff": 128, "num_layers": 3, "num_heads": 2, "d_kv": 16}


class EncodeAndDenoise:
    """A pipeline reduced to what takes time: its encoder reads a prompt, and its denoiser takes some steps."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ()

    def __init__(self, encoder: torch.nn.Module, transformer: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self.text_encoder, self.transformer, self._inputs = encoder, transformer, inputs
        self._num_timesteps = STEPS

    @torch.no_grad()
    def __call__(self) -> torch.Tensor:
        latents = self._inputs["hidden_states"]
        length = self._inputs["encoder_hidden_states"].shape[1]
        tokens = torch.arange(length, device=latents.device)[None]
        given = self._inputs | {"encoder_hidden_states": self.text_encoder(tokens)[0]}
        for step in range(STEPS):
            given["hidden_states"] = latents
            given["timestep"] = torch.full_like(self._inputs["timestep"], 1 - step / STEPS)
            latents = latents - self.transformer(**given)[0] / STEPS
        return latents

    def to(self, device: torch.device | str) -> None:
        self.text_encoder.to(device)
        self.transformer.to(device)


def build(bench: Bench, name: str) -> EncodeAndDenoise:
    """The pipeline on the host."""
    from transformers import T5Config, T5EncoderModel

    width = gpu_models.spec(name, tiny=bench.tiny).text_width
    shape = _TINY_ENCODER if bench.tiny else _ENCODERS[name]
    with torch.device("meta"):
        encoder = T5EncoderModel(T5Config(d_model=width, feed_forward_proj="gated-gelu", vocab_size=1024, **shape))
    encoder = encoder.to(bench.dtype).to_empty(device="cpu").eval().requires_grad_(False)
    noise = torch.randn(gpu_models.PERIOD, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(bench.dtype)
    position = 0
    with torch.no_grad():
        for tensor in {id(t): t for t in (*encoder.parameters(), *encoder.buffers())}.values():
            position = gpu_models.fill(tensor.view(-1), noise, position)
    transformer = gpu_models.build(name, "cpu", bench.dtype, tiny=bench.tiny)
    return EncodeAndDenoise(encoder, transformer, gpu_models.inputs(name, bench.device, bench.dtype, tiny=bench.tiny))


def settings_on(bench: Bench, settings: dict[str, Any]) -> dict[str, Any]:
    """What `attach` is given: an offload computes on the bench's device, and a CPU keeps the bits when it compiles."""
    offload = {"offload": {"mode": settings["offload"], "device": str(bench.device)}} if "offload" in settings else {}
    return settings | offload | ({"compile": "eager"} if bench.tiny and "compile" in settings else {})


def measure(bench: Bench, pipe: EncodeAndDenoise, settings: dict[str, Any], repeats: int) -> tuple[dict[str, Any], Any]:
    """Seconds and peak of a run with some features on, and what it draws."""
    bench.clear()
    start = time.perf_counter()
    with attach(pipe, **settings_on(bench, settings)) as attached:
        attach_s = time.perf_counter() - start
        first_s = bench.seconds(pipe)
        bench.reset_peak()
        times = [bench.seconds(pipe) for _ in range(repeats)]
        peak, drawn, stats = bench.peak(), pipe().cpu(), attached.stats()
        row = {
            "s": round(statistics.median(times), 4),
            "least_s": round(min(times), 4),
            "most_s": round(max(times), 4),
            "peak_gib": gib(peak),
            "first_s": round(first_s, 3),
            "attach_s": round(attach_s, 3),
        }
        if stats.cache is not None:
            row |= {"computed": stats.cache.computed, "skipped": stats.cache.skipped}
        if stats.offload is not None and attached.offloaded is not None:
            row["sent_gib_in_all"] = gib(stats.offload.sent_bytes)
            row["planned_peak_gib"] = gib(attached.offloaded.plan.peak_bytes)
    return row, drawn


def together(bench: Bench, name: str, repeats: int) -> dict[str, Any]:
    """All contestants on one pipeline."""
    start = time.perf_counter()
    pipe = build(bench, name)
    print(f"built {name} in {time.perf_counter() - start:.1f} s", flush=True)
    found: dict[str, Any] = {"steps": STEPS, "schedule": SCHEDULE, "contestants": {}}
    drawn: dict[str, torch.Tensor] = {}
    for group in (FROM_HOST, RESIDENT):
        if group is RESIDENT:
            pipe.to(bench.device)
        for title, settings in group.items():
            row, drawn[title] = measure(bench, pipe, settings, repeats)
            found["contestants"][title] = row
            print(f"{name}, {title}: {json.dumps(row)}", flush=True)
    rows = found["contestants"]
    found["same_bits"] = {
        title: torch.equal(drawn[title], drawn["cache" if "cache" in title else "nothing"])
        for title in drawn if "compile" not in title
    }  # fmt: skip
    found["cache_layerwise_of_layerwise"] = round(rows["cache + layerwise"]["s"] / rows["layerwise"]["s"], 4)
    found["cache_of_nothing"] = round(rows["cache"]["s"] / rows["nothing"]["s"], 4)
    found["goal"] = GOAL
    found["goal_is_met"] = found["cache_layerwise_of_layerwise"] <= GOAL
    return found


# ------------------------------------------------------------------------------------------------ by name

FIELD: dict[str, Any] = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.2}}
FIELD_STEPS = 50


def save_large_emoji(bench: Bench, folder: Path) -> dict[str, Any]:
    """The built-in model's pipeline with a denoiser of half FLUX.1's depth and its width, in diffusers' format."""
    from diffusers import FluxPipeline, FluxTransformer2DModel

    from samovar.builtin import BUILTIN_MODELS

    pipe = FluxPipeline.from_pretrained(BUILTIN_MODELS["emoji"], torch_dtype=bench.dtype, local_files_only=True)
    wide = {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}
    deep = {"num_layers": 1, "num_single_layers": 2} if bench.tiny else {"num_layers": 10, "num_single_layers": 19}
    config = dict(pipe.transformer.config) | deep | ({} if bench.tiny else wide)
    with torch.device("meta"):
        transformer = FluxTransformer2DModel.from_config(config)
    gpu_models._rebuild_tables(transformer)
    transformer = transformer.to(bench.dtype).to_empty(device="cpu").eval()
    noise = torch.randn(gpu_models.PERIOD, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(bench.dtype)
    position = 0
    with torch.no_grad():
        for path, parameter in transformer.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if path.endswith("weight") else 0.0)
            else:
                position = gpu_models.fill(parameter.view(-1), noise, position)
    pipe.register_modules(transformer=transformer)
    pipe.save_pretrained(folder)
    return {"denoiser_gib": gib(sum(p.numel() * p.element_size() for p in transformer.parameters()))}


def field(bench: Bench, repeats: int) -> dict[str, Any]:
    """`Omni` with a cache, with offload, and with both: the cache must be worth as much with offload as without."""
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, Any] = {"settings": FIELD, "steps": FIELD_STEPS} | save_large_emoji(bench, Path(scratch))
        large = {} if bench.tiny else {"height": 512, "width": 512}
        models: dict[str, tuple[str, dict[str, int]]] = {"emoji": ("emoji", {}), "half FLUX.1": (scratch, large)}
        for title, (model, size) in models.items():
            rows = {
                f"{cached}{placed}": by_name(bench, model, size, repeats, settings | offload)
                for placed, offload in {"resident": {}, "offload": {"enable_cpu_offload": True}}.items()
                for cached, settings in {"": {}, "cache + ": FIELD}.items()
            }
            rows["speed_up"] = {
                placed: round(rows[placed]["s"] / rows[f"cache + {placed}"]["s"], 3)
                for placed in ("resident", "offload")
            }
            found[title] = rows
            print(title, json.dumps(rows), flush=True)
    return found


def by_name(bench: Bench, model: str, size: dict[str, int], repeats: int, settings: dict[str, Any]) -> dict[str, Any]:
    bench.clear()
    steps = 10 if bench.tiny else FIELD_STEPS
    with Omni(model=model, dtype="bfloat16", device=str(bench.device), progress=False, **settings) as omni:

        def run() -> Any:
            return omni.generate("rocket, flat style", num_inference_steps=steps, seed=7, **size)[0]

        run()
        bench.reset_peak()
        times = [run().seconds for _ in range(repeats)]
        row = {"s": round(statistics.median(times), 4), "peak_gib": gib(bench.peak())}
        cache = run().cache
    return row | ({"computed": cache[0].computed, "skipped": cache[0].skipped} if cache else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=Path, default=None, help="where the result is written")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    bench = Bench(device, arguments.tiny)
    result = gpu_models.header(device)
    for part in arguments.parts:
        start = time.perf_counter()
        run_part = field(bench, arguments.repeats) if part == "omni" else together(bench, part, arguments.repeats)
        result[part] = run_part | {"part_s": round(time.perf_counter() - start, 1)}
        bench.clear()
        print(part, json.dumps(result[part], indent=1), flush=True)
        if arguments.json is not None:
            gpu_models.write(arguments.json, result)


if __name__ == "__main__":
    main()
