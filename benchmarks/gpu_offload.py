"""What does offload cost on a GPU? Ours beside diffusers' group offload and accelerate's whole-model swap, in one run.

    python benchmarks/gpu_offload.py --json benchmarks/results/gpu_offload.json
    python benchmarks/gpu_offload.py --parts flux peers pipeline qwen      # what is run by default, in this order
    python benchmarks/gpu_offload.py --tiny                                # the same on a CPU, to see that it runs
    python benchmarks/gpu_offload.py --plot RESULT.json --json CURVE.png   # draw the budget curve of an earlier run

The result is written after each part, so that a run that is cut short is not lost. Times of passes are of several in a
row between two synchronisations, as in a pipeline, where nothing waits at the end of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import torch

from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook, running
from samovar.offload import OffloadConfig, Offloaded, apply_offload

GIB = 2**30
BUDGETS = (2, 3, 4, 6, 8, 10, 12, 13, 14, 15, 15.5, 16, 18, 20, 22)
PASSES = 4
PARTS = ("flux", "peers", "pipeline", "qwen", "qwen-peers")
USUAL = PARTS[:-1]  # The last takes another minute, and twice the model in pinned memory.


class Holder:
    """The least that counts as a pipeline: an object with modules as attributes."""

    def __init__(self, **modules: torch.nn.Module) -> None:
        vars(self).update(modules)


def gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def resident_set_bytes() -> int:
    """What this process holds of the host's memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


class Bench:
    """One device, and how a forward is timed on it."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny = device, tiny
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.is_cuda = device.type == "cuda"

    def sync(self) -> None:
        gpu_models.synchronise(self.device)

    def clear(self) -> None:
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()
            if hasattr(torch._C, "_host_emptyCache"):  # What peers pinned is not given back otherwise.
                torch._C._host_emptyCache()

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.is_cuda else 0

    @torch.no_grad()
    def pass_ms(self, forward: Any, passes: int = PASSES, warm: int = 2) -> tuple[float, float]:
        """Milliseconds of a pass among several, and GiB of its peak."""
        for _ in range(warm):
            forward()
        self.sync()
        self.reset_peak()
        start = time.perf_counter()
        for _ in range(passes):
            forward()
        self.sync()
        return (time.perf_counter() - start) * 1e3 / passes, gib(self.peak())

    def seconds(self, call: Any) -> float:
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - start

    def bus(self) -> dict[str, float]:
        """GiB a second from memory that CUDA allocated, as a yardstick for ours."""
        if not self.is_cuda:
            return {}
        found = {}
        for name, pinned in (("pinned", True), ("pageable", False)):
            source = torch.ones(GIB // 2, dtype=torch.uint8, pin_memory=pinned)
            target = torch.empty_like(source, device=self.device)
            target.copy_(source, non_blocking=True)
            taken = min(self.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True)) for _ in range(5))
            found[f"{name}_gib_s"] = round(0.5 / taken, 2)
        return found


class SkipHook(ModelHook):
    """What a cache does to a block: it answers with what the block returned before."""

    order = HookOrder.CACHE
    is_skipping = False

    def __init__(self) -> None:
        self._output: Any = None

    def bypass(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._output if SkipHook.is_skipping else NOT_BYPASSED

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        self._output = output
        return output


@contextlib.contextmanager
def skipping(blocks: list[torch.nn.Module], forward: Any) -> Iterator[None]:
    """Let every block be skipped, after one pass to remember what it returns."""
    for block in blocks:
        HookRegistry.get_or_create(block).register_hook("skip", SkipHook())
    forward()
    SkipHook.is_skipping = True
    try:
        yield
    finally:
        SkipHook.is_skipping = False
        for block in blocks:
            HookRegistry.get_or_create(block).remove_hook("skip")


# ------------------------------------------------------------------------------------------------ ours


class Ours:
    """One transformer under our offload."""

    def __init__(self, bench: Bench, name: str, model: torch.nn.Module) -> None:
        self.bench, self.model = bench, model
        self.inputs = gpu_models.inputs(name, bench.device, bench.dtype, tiny=bench.tiny)
        self.holder = Holder(transformer=model)
        self.blocks = [b for part in model.children() if isinstance(part, torch.nn.ModuleList) for b in part]

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.model(**self.inputs)[0]
        return out

    def set_up(self, **config: Any) -> tuple[Offloaded, dict[str, Any]]:
        """Everything streamed, with what that cost."""
        self.bench.clear()
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        before = resident_set_bytes()
        offloaded = apply_offload(self.holder, OffloadConfig("layerwise", device=self.bench.device, **config))
        self.bench.sync()
        stats = offloaded.stats()
        return offloaded, {
            "weights_gib": gib(weights),
            "setup_s": round(stats.setup_s, 2),
            "pinned_gib": gib(stats.pinned_bytes),
            "pageable_gib": gib(stats.pageable_bytes),
            "copied_gib": gib(stats.copied_bytes),
            "host_gib_before": gib(before),
            "host_gib_after": gib(resident_set_bytes()),
            "bus_gib_s": gib(offloaded.stage.measure_bus()),
        }

    def learn(self, offloaded: Offloaded) -> dict[str, Any]:
        """Measure blocks and activations, and plan anew with them."""
        with torch.no_grad(), offloaded.measure() as measured, running(self.holder):
            for _ in range(3):
                self.forward()
        offloaded.replan(activations=measured.activations, timing=measured.timing)
        block_ms = sum(measured.timing.block_s.values()) * 1e3
        return {
            "activations_gib": {k: gib(v) for k, v in measured.activations.items()},
            "blocks_ms": round(block_ms, 1),
        }

    def measure(self, offloaded: Offloaded, passes: int = PASSES) -> dict[str, Any]:
        """A pass under the plan there is, beside what the plan expects and what the bus allows."""
        plan = offloaded.plan
        part = plan.component("transformer")
        before = offloaded.stats()
        with running(self.holder):
            ms, peak = self.bench.pass_ms(self.forward, passes)
        after = offloaded.stats()
        bus_ms = part.streamed_bytes / plan.bus_bytes_s * 1e3
        return {
            "ms": round(ms, 2),
            "peak_gib": peak,
            "planned_ms": round((part.forward_s or 0.0) * 1e3, 2),
            "planned_peak_gib": gib(plan.peak_bytes),
            "bus_ms": round(bus_ms, 2),
            "streamed_gib": gib(part.streamed_bytes),
            "streamed_blocks": len(part.streamed),
            "ring_gib": gib(part.ring_bytes),
            "late_blocks": after.late_blocks - before.late_blocks,
        }

    def skip(self, offloaded: Offloaded) -> dict[str, Any]:
        """A step that a cache skips, and the next one that it does not."""
        with torch.no_grad(), running(self.holder), skipping(self.blocks, self.forward):
            for _ in range(3):
                self.forward()
            before = offloaded.stats().sent_bytes
            times = [self.bench.seconds(self.forward) * 1e3 for _ in range(10)]
            moved = offloaded.stats().sent_bytes - before
        return {"skip_ms": round(sorted(times)[5], 2), "skip_moved_bytes": moved}

    def swap(self, offloaded: Offloaded) -> dict[str, Any]:
        """The whole model in and out, as when it takes turns with an encoder."""
        offloaded.replan(gpu_memory=1024 * GIB)
        moving = offloaded._components["transformer"]
        times: dict[str, list[float]] = {"in_s": [], "out_s": []}
        for _ in range(4):
            times["out_s"].append(self.bench.seconds(moving.unload))
            times["in_s"].append(self.bench.seconds(moving.load))
        best = {name: round(min(values[1:]), 4) for name, values in times.items()}
        size = offloaded.plan.component("transformer").num_bytes
        return best | {"in_gib_s": round(gib(size) / best["in_s"], 2), "first_in_s": round(times["in_s"][0], 3)}


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu(), other.cpu())


@torch.no_grad()
def ours(bench: Bench, name: str, model: torch.nn.Module, budgets: tuple[float, ...]) -> dict[str, Any]:
    """Everything about one transformer."""
    subject = Ours(bench, name, model)
    offloaded, found = subject.set_up()
    found |= subject.learn(offloaded)
    offloaded.replan(gpu_memory=1024 * GIB)
    ms, peak = bench.pass_ms(subject.forward)
    found["resident"] = {"ms": round(ms, 2), "peak_gib": peak}
    expected = subject.forward()
    found["swap"] = subject.swap(offloaded)
    bench.clear()
    offloaded.replan(gpu_memory=None, mode="layerwise")
    bench.clear()
    found["least"] = subject.measure(offloaded)
    with running(subject.holder):
        found["least"]["same_bits"] = is_same(subject.forward(), expected)
    found["skip"] = subject.skip(offloaded)
    found["curve"] = []
    whole, least = offloaded.plan.component("transformer").num_bytes, offloaded.plan.peak_bytes
    sizes = [int(b * GIB) for b in budgets] if not bench.tiny else [(whole + least * k) // (k + 1) for k in (8, 2, 1)]
    for budget in sizes:
        offloaded.replan(gpu_memory=budget)
        bench.clear()
        row = {"budget_gib": gib(budget)} | subject.measure(offloaded)
        row["over_limit"] = round(row["ms"] / max(row["bus_ms"], found["resident"]["ms"]) - 1, 4)
        found["curve"].append(row)
        print(json.dumps(row), flush=True)
    with running(subject.holder):
        found["same_bits"] = is_same(subject.forward(), expected)
    offloaded.detach()
    return found


# ------------------------------------------------------------------------------------------------ peers


@torch.no_grad()
def peers(bench: Bench, name: str, model: torch.nn.Module, *, swap: bool) -> dict[str, Any]:
    """diffusers' group offload, one block at a time with a stream, and the plain `.to()` of a whole-model swap."""
    from diffusers import FirstBlockCacheConfig, apply_first_block_cache
    from diffusers.hooks import apply_group_offloading

    found: dict[str, Any] = {}
    bench.clear()
    if swap:
        found["accelerate_in_s"] = round(bench.seconds(lambda: model.to(bench.device)), 2)
        found["accelerate_out_s"] = round(bench.seconds(lambda: model.to("cpu")), 2)
        bench.clear()
    subject = Ours(bench, name, model)
    grouped = {"onload_device": bench.device, "offload_type": "block_level", "num_blocks_per_group": 1}
    streams = {"use_stream": True, "non_blocking": True, "record_stream": True} if bench.is_cuda else {}
    start = time.perf_counter()
    apply_group_offloading(model, offload_device=torch.device("cpu"), **grouped, **streams)
    found["group_setup_s"] = round(time.perf_counter() - start, 2)
    found["group_host_gib"] = gib(resident_set_bytes())
    ms, peak = bench.pass_ms(subject.forward)
    found |= {"group_ms": round(ms, 2), "group_peak_gib": peak}
    apply_first_block_cache(model, FirstBlockCacheConfig(threshold=1e9))
    with model.cache_context("cond"):
        for _ in range(3):
            subject.forward()
        times = [bench.seconds(subject.forward) * 1e3 for _ in range(5)]
    return found | {"group_skip_ms": round(sorted(times)[2], 2)}


# ------------------------------------------------------------------------------------------------ a pipeline


class EncodeAndDenoise:
    """A pipeline reduced to what takes time: an encoder called for two prompts, and a denoiser for two branches."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ()

    def __init__(self, encoder: torch.nn.Module, transformer: torch.nn.Module, inputs: dict[str, Any]) -> None:
        self.text_encoder, self.transformer, self.inputs = encoder, transformer, inputs

    @torch.no_grad()
    def __call__(self, steps: int) -> torch.Tensor:
        device = self.inputs["hidden_states"].device
        length = self.inputs["encoder_hidden_states"].shape[1]
        branches = []
        for seed in (0, 1):
            tokens = torch.randint(0, 1000, (1, length), generator=torch.Generator().manual_seed(seed)).to(device)
            branches.append(self.text_encoder(tokens)[0])
        latents = self.inputs["hidden_states"]
        for _ in range(steps):
            one, other = (
                self.transformer(**{**self.inputs, "hidden_states": latents, "encoder_hidden_states": text})[0]
                for text in branches
            )
            latents = latents - 0.01 * (other + 2.0 * (one - other))
        return latents


def build_pipeline(bench: Bench) -> EncodeAndDenoise:
    """An encoder of about 7 GiB and a denoiser of about 8, as in OmniGen2, with random weights."""
    from diffusers import FluxTransformer2DModel
    from transformers import T5Config, T5EncoderModel

    width = 64 if bench.tiny else 4096
    shape = {"d_ff": 128, "num_layers": 3} if bench.tiny else {"d_ff": 10240, "num_layers": 18, "num_heads": 64}
    config = T5Config(d_model=width, feed_forward_proj="gated-gelu", **shape)
    few = {"num_layers": 2, "num_single_layers": 2, "num_attention_heads": 2, "joint_attention_dim": width,
           "pooled_projection_dim": 32} if bench.tiny else {"num_layers": 8, "num_single_layers": 11}  # fmt: skip
    with torch.device("meta"):
        encoder = T5EncoderModel(config)
        transformer = FluxTransformer2DModel(guidance_embeds=True, **few)
    gpu_models._rebuild_rope(transformer)
    noise = torch.randn(2**22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(bench.dtype)
    modules = []
    for module in (encoder, transformer):
        module = module.to(bench.dtype).to_empty(device="cpu").eval().requires_grad_(False)
        for tensor in {id(t): t for t in (*module.parameters(), *module.buffers())}.values():
            flat = tensor.view(-1)
            for start in range(0, flat.numel(), len(noise)):
                flat[start : start + len(noise)].copy_(noise[: flat.numel() - start])
        modules.append(module)
    inputs = gpu_models.inputs("flux", bench.device, bench.dtype, tiny=bench.tiny)
    return EncodeAndDenoise(modules[0], modules[1], inputs)


@torch.no_grad()
def pipeline(bench: Bench, steps: int = 28) -> dict[str, Any]:
    """Model-level offload of a whole run."""
    steps = 2 if bench.tiny else steps
    pipe = build_pipeline(bench)
    whole = apply_offload(pipe, OffloadConfig("auto", gpu_memory=1024 * GIB, device=bench.device))
    sizes = {part.name: gib(part.num_bytes) for part in whole.plan.components}
    found: dict[str, Any] = {"weights_gib": sizes, "steps": steps}
    expected = pipe(steps)
    found["resident"] = timed_run(bench, pipe, steps)
    whole.detach()
    bench.clear()
    taking_turns = apply_offload(pipe, OffloadConfig("model", device=bench.device))
    found["setup_s"] = round(taking_turns.stats().setup_s, 2)
    same = is_same(pipe(steps), expected)
    found["model"] = timed_run(bench, pipe, steps) | {"same_bits": same}
    found["model"]["planned_weights_gib"] = gib(taking_turns.plan.peak_bytes)
    with taking_turns.measure() as measured:
        pipe(2)
    found["activations_gib"] = {name: gib(need) for name, need in measured.activations.items()}
    taking_turns.detach()
    found["slower"] = round(found["model"]["s"] / found["resident"]["s"] - 1, 4)
    return found


def timed_run(bench: Bench, pipe: EncodeAndDenoise, steps: int) -> dict[str, Any]:
    bench.reset_peak()
    times = [bench.seconds(lambda: pipe(steps)) for _ in range(2)]
    return {"s": round(min(times), 3), "peak_gib": gib(bench.peak())}


# ------------------------------------------------------------------------------------------------ the command


def run_part(bench: Bench, part: str, models: dict[str, torch.nn.Module]) -> dict[str, Any]:
    if part == "pipeline":
        models.clear()
        bench.clear()
        return pipeline(bench)
    name = part.partition("-")[0] if part != "peers" else "flux"
    if name not in models:
        models.clear()
        bench.clear()
        start = time.perf_counter()
        models[name] = gpu_models.build(name, "cpu", bench.dtype, tiny=bench.tiny)
        print(f"built {name} in {time.perf_counter() - start:.1f} s", flush=True)
    model = models[name]
    if part.endswith("peers"):
        del models[name]  # diffusers' hooks stay on it.
        return peers(bench, name, model, swap=name == "flux")
    return ours(bench, name, model, BUDGETS if name == "flux" else (16.0, 30.0))


def plot(result: dict[str, Any], file: Path) -> None:
    """Time of a forward over the budget, beside what bus and computing allow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    flux = result["flux"]
    rows = flux["curve"]
    budgets, resident = [row["budget_gib"] for row in rows], flux["resident"]["ms"]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(budgets, [row["ms"] for row in rows], "o-", label="Samovar")
    axes.plot(budgets, [max(row["bus_ms"], resident) for row in rows], "k:", label="what bus and computing allow")
    axes.axhline(resident, color="grey", linewidth=0.8, label=f"resident, {flux['resident']['peak_gib']:.1f} GiB")
    if "peers" in result:
        group = result["peers"]
        axes.plot([group["group_peak_gib"]], [group["group_ms"]], "rs", label="diffusers group offload")
    axes.set(
        xlabel="GPU memory allowed, GiB", ylabel="one forward, ms", title="FLUX.1 12B within a budget", ylim=(0, None)
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(USUAL))
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--json", type=Path, default=None, help="where the result, or the plot, is written")
    parser.add_argument("--plot", type=Path, default=None, help="draw the curve of a result instead")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        plot(json.loads(arguments.plot.read_text()), arguments.json or Path("gpu_offload.png"))
        return
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    bench = Bench(device, arguments.tiny)
    HookRegistry.get_or_create(torch.nn.Linear(1, 1)).register_hook("first", ModelHook())  # Loads torch's compiler.
    result = gpu_models.header(device, "accelerate")
    result["bus"] = bench.bus()
    models: dict[str, torch.nn.Module] = {}
    for part in arguments.parts:
        start = time.perf_counter()
        result[part] = run_part(bench, part, models)
        result[part]["part_s"] = round(time.perf_counter() - start, 1)
        print(part, json.dumps(result[part], indent=1), flush=True)
        if arguments.json is not None:
            gpu_models.write(arguments.json, result)


if __name__ == "__main__":
    main()
