"""Offload on a GPU, beside diffusers' group offload and accelerate's whole-model swap, in one run.

    python benchmarks/gpu_offload.py --json benchmarks/results/gpu_offload.json
    python benchmarks/gpu_offload.py --parts flux peers qwen       # some of it; what else the file holds stays
    python benchmarks/gpu_offload.py --tiny                        # the same on a CPU, to see that it runs

The result is written after each part, so that a run that is cut short is not lost. Times of passes are of several in a
row between two synchronisations, as in a pipeline, where nothing waits at the end of a step. "before" is the same with
`precompute=False, compress="none"`: all weights cross the bus, as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_models
import torch
from gpu_bench import GIB, PASSES, Bench, Holder, gib, is_same, resident_set_bytes

from samovar.core.errors import SettingError
from samovar.core.tensor_parts import num_bytes_of
from samovar.hooks import NOT_BYPASSED, HookOrder, HookRegistry, ModelHook, running
from samovar.offload import OffloadConfig, Offloaded, Timing, apply_offload

PARTS = ("flux", "peers", "qwen", "sd35", "hunyuan", "wan", "pipeline", "qwen-peers", "flux2")
BUDGETS = {
    "flux": (1.6, 2, 3, 4, 6, 8, 9, 10, 12, 14, 16.5),
    "qwen": (1.6, 3, 6, 9, 12, 15, 18, 22, 26),
}
QUICK = {"flux": (8, 9), "qwen": (1.6, 15, 18)}
"""What is measured with --quick, which leaves out what there was before."""
BUDGETS_BEFORE = {"flux": (2, 4, 8, 12, 15.5), "qwen": (3, 9, 18, 26)}
MOST_PINNED = 40
"""GiB of weights up to which a model is streamed as it is, too: that pins all of them."""
SPARE = 1.05
"""What counts as the speed of a model that is on the device."""


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
    """One transformer: bare on the device at first, then under our offload."""

    def __init__(self, bench: Bench, name: str, model: torch.nn.Module) -> None:
        self.bench, self.name, self.model = bench, name, model
        self.inputs = self.inputs_for()
        self.holder = Holder(bench.device, transformer=model)
        self.blocks = [b for part in model.children() if isinstance(part, torch.nn.ModuleList) for b in part]
        self.expected: torch.Tensor | None = None

    def inputs_for(self, **changes: Any) -> dict[str, Any]:
        return gpu_models.inputs(self.name, self.bench.device, self.bench.dtype, tiny=self.bench.tiny, **changes)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor = self.model(**self.inputs)[0]
        return out

    @contextlib.contextmanager
    def given(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Inside, the model gets other arguments."""
        before, self.inputs = self.inputs, inputs
        try:
            yield
        finally:
            self.inputs = before

    def resident(self, passes: int) -> dict[str, Any]:
        """The bare model with all its weights on the device, whose bits count."""
        ms, peak = self.bench.pass_ms(self.forward, passes)
        self.expected = self.forward().cpu()
        return {"ms": round(ms, 2), "peak_gib": peak}

    def batch_ms(self) -> dict[str, Any]:
        """A batch of two."""
        with self.given(self.inputs_for(batch=2)):
            ms, peak = self.bench.pass_ms(self.forward)
        return {"ms": round(ms, 2), "peak_gib": peak}

    def set_up(self) -> tuple[Offloaded, dict[str, Any]]:
        """Everything streamed, with what that cost and what the first forwards take, which may plan anew."""
        self.bench.clear()
        weights = num_bytes_of(self.model.parameters())
        before = resident_set_bytes()
        offloaded = apply_offload(self.holder, OffloadConfig("layerwise", device=self.bench.device))
        self.bench.sync()
        setup_s = offloaded.stats().setup_s
        first = self.first(offloaded)
        stats, part = offloaded.stats(), offloaded.plan.component("transformer")
        return offloaded, first | {
            "weights_gib": gib(weights),
            "ahead_gib": gib(part.ahead_bytes),
            "ahead_share": round(part.ahead_bytes / weights, 4),
            "is_coded": part.is_coded,
            "setup_s": round(setup_s, 2),
            "pinned_gib": gib(stats.pinned_bytes),
            "pinned_of_weights": round(stats.pinned_bytes / weights, 3),
            "pageable_gib": gib(stats.pageable_bytes),
            "copied_gib": gib(stats.copied_bytes),
            "host_gib_before": gib(before),
            "host_gib_after": gib(resident_set_bytes()),
            "bus_gib_s": gib(offloaded.stage.measure_bus()),
        }

    def first(self, offloaded: Offloaded) -> dict[str, Any]:
        """The first forwards of a run: of all, and with a prompt that was not seen before. Each computes ahead for all
        steps of the scheduler."""
        found: dict[str, Any] = {}
        inputs = self.inputs_for(timestep=1.0)
        self.bench.reset_peak()
        for name in ("first_s", "new_prompt_s"):
            with running(self.holder), self.given(inputs):
                found[name] = round(self.bench.seconds(self.forward), 3)
            prompt = {key: inputs[key] + 1 for key in ("encoder_hidden_states", "pooled_projections") if key in inputs}
            inputs = inputs | prompt
        layers = offloaded.time_layers.get("transformer")
        return found | {
            "first_peak_gib": gib(self.bench.peak()),
            "computed_steps": layers.stats.computed_steps if layers else 0,
        }

    def learn(self, offloaded: Offloaded) -> dict[str, Any]:
        """Measure blocks and activations, and plan anew with them."""
        timing = self.time(offloaded)
        return {
            "activations_gib": {name: gib(need) for name, need in offloaded.history.needs.items()},
            "blocks_ms": round(sum(timing.block_s.values()) * 1e3, 1),
            "rest_ms": round(sum(timing.rest_s.values()) * 1e3, 1),
        }

    def time(self, offloaded: Offloaded) -> Timing:
        """Measure within the plan there is, and plan anew."""
        with offloaded.measure(), running(self.holder):
            for _ in range(3):
                self.forward()
        offloaded.replan()
        assert offloaded.history.timing is not None
        return offloaded.history.timing

    def measure(self, offloaded: Offloaded, passes: int = PASSES) -> dict[str, Any]:
        """A pass under the plan there is, beside what the plan expects and what the bus allows."""
        plan = offloaded.plan
        part = plan.component("transformer")
        self.bench.clear()
        with running(self.holder):
            is_right = is_same(self.forward(), self.expected)
            before = offloaded.stats()
            ms, peak = self.bench.pass_ms(self.forward, passes, warm=2)
            after = offloaded.stats()
            is_right = is_right and is_same(self.forward(), self.expected)
        wire = (after.sent_bytes - before.sent_bytes) / (passes + 2)
        return {
            "ms": round(ms, 2),
            "peak_gib": peak,
            "planned_ms": round((part.forward_s or 0.0) * 1e3, 2),
            "planned_peak_gib": gib(plan.peak_bytes),
            "bus_ms": round(wire / plan.bus_bytes_s * 1e3, 2),
            "wire_gib": gib(wire),
            "is_coded": part.is_coded,
            "ahead_gib": gib(part.ahead_bytes),
            "streamed_blocks": len(part.streamed),
            "blocks": part.num_blocks,
            "ring_gib": gib(part.ring_bytes),
            "late_blocks": after.late_blocks - before.late_blocks,
            "same_bits": is_right,
        }

    def within(self, offloaded: Offloaded, budget: int) -> dict[str, Any]:
        """A pass within a budget, planned with times that were taken within it: a busy bus makes blocks slower."""
        found: dict[str, Any] = {"budget_gib": gib(budget)}
        try:
            offloaded.replan(mode="auto", gpu_memory=budget)
        except SettingError as error:
            return found | {"refused": str(error)}
        block_s = sum(self.time(offloaded).block_s.values())
        return found | self.measure(offloaded) | {"blocks_ms": round(block_s * 1e3, 1)}

    def curve(self, offloaded: Offloaded, budgets: tuple[float, ...], resident_ms: float) -> list[dict[str, Any]]:
        whole, least = offloaded.plan.component("transformer").num_bytes, offloaded.plan.peak_bytes
        sizes = [int(budget * GIB) for budget in budgets]
        if self.bench.tiny:
            sizes = [least // 2, *((whole + least * k) // (k + 1) for k in (8, 2, 1))]
        rows = []
        for size in sizes:
            row = self.within(offloaded, size)
            if "ms" in row:
                row["over_limit"] = round(row["ms"] / max(row["bus_ms"], resident_ms) - 1, 4)
            print(self.name, json.dumps(row), flush=True)
            rows.append(row)
        return rows

    def skip(self, offloaded: Offloaded) -> dict[str, Any]:
        """A step that a cache skips."""
        with running(self.holder), skipping(self.blocks, self.forward):
            for _ in range(3):
                self.forward()
            before = offloaded.stats().sent_bytes
            times = [self.bench.seconds(self.forward) * 1e3 for _ in range(10)]
            moved = offloaded.stats().sent_bytes - before
        return {"skip_ms": round(sorted(times)[5], 2), "skip_moved_bytes": moved}


def begin(bench: Bench, name: str, model: torch.nn.Module, passes: int) -> tuple[Ours, Offloaded, dict[str, Any]]:
    """What is measured of every model. It is on the device, and on the host afterwards."""
    subject = Ours(bench, name, model)
    found: dict[str, Any] = {"title": gpu_models.spec(name, tiny=bench.tiny).title}
    found["resident"] = subject.resident(passes)
    batch = subject.batch_ms() if name in BUDGETS else None
    start = time.perf_counter()
    gpu_models.to_host(model)
    print(f"{name} to the host in {time.perf_counter() - start:.1f} s", flush=True)
    offloaded, about = subject.set_up()
    found |= about
    found["least"] = subject.measure(offloaded)
    if batch is not None:
        with running(subject.holder):
            streamed = subject.batch_ms()
        found["batch_of_2"] = {
            "resident": batch,
            "least": streamed,
            "throughput": round(batch["ms"] / streamed["ms"], 4),
        }
    return subject, offloaded, found


def before(subject: Ours, offloaded: Offloaded, found: dict[str, Any]) -> dict[str, Any]:
    """The same with all weights crossing the bus as they are."""
    if found["weights_gib"] > MOST_PINNED:
        return {}
    offloaded.replan(mode="layerwise", gpu_memory=None, precompute=False, compress="none")
    least = subject.measure(offloaded)
    pinned = offloaded.stats().pinned_bytes / GIB / found["weights_gib"]
    return {"before": {"least": least, "pinned_of_weights": round(pinned, 3)}}


@torch.no_grad()
def in_short(bench: Bench, name: str, model: torch.nn.Module, quick: bool) -> dict[str, Any]:
    """One row about a transformer."""
    subject, offloaded, found = begin(bench, name, model, PASSES)
    found |= {} if quick else before(subject, offloaded, found)
    offloaded.detach()
    return found


@torch.no_grad()
def in_full(bench: Bench, name: str, model: torch.nn.Module, quick: bool) -> dict[str, Any]:
    """Everything about a transformer."""
    subject, offloaded, found = begin(bench, name, model, 2 * PASSES)
    resident_ms = found["resident"]["ms"]
    found["skip"] = subject.skip(offloaded)
    found |= subject.learn(offloaded)
    found["least_measured"] = subject.measure(offloaded)
    found["curve"] = subject.curve(offloaded, (QUICK if quick else BUDGETS)[name], resident_ms)
    whole = offloaded.plan.component("transformer").num_bytes + offloaded.history.needs["transformer"]
    # One byte less than everything needs: it stays, but for the layers that are computed ahead.
    found["ahead"] = subject.within(offloaded, whole - 1)
    found["ahead"]["slower"] = round(found["ahead"].get("ms", 0.0) / resident_ms - 1, 4)
    enough = [row for row in found["curve"] if row.get("ms", float("inf")) <= SPARE * resident_ms]
    found["at_resident_speed"] = enough[0] if enough else None
    rows = [found["least"], found["least_measured"], found["ahead"], *found["curve"]]
    if not quick:
        found |= before(subject, offloaded, found)
        found["before"]["curve"] = subject.curve(offloaded, BUDGETS_BEFORE[name], resident_ms)
        rows += found["before"]["curve"]
    found["same_bits"] = all(row.get("same_bits", True) for row in rows)
    offloaded.detach()
    return found


# ------------------------------------------------------------------------------------------------ the command


def run_part(bench: Bench, part: str, models: dict[str, torch.nn.Module], quick: bool) -> dict[str, Any]:
    import gpu_offload_peers

    name = {"peers": "flux"}.get(part, part.partition("-")[0])
    if name not in models:
        models.clear()
        bench.clear()
    if part == "pipeline":
        return gpu_offload_peers.pipeline(bench)
    if part.endswith("peers"):
        model = models.pop(name, None)  # diffusers' hooks stay on it.
        if model is None:
            model = gpu_models.build(name, bench.device, bench.dtype, tiny=bench.tiny)
            gpu_models.to_host(model)
        return gpu_offload_peers.peers(bench, name, model, swap=name == "flux")
    start = time.perf_counter()
    models[name] = gpu_models.build(name, bench.device, bench.dtype, tiny=bench.tiny)
    print(f"built {name} in {time.perf_counter() - start:.1f} s", flush=True)
    return (in_full if name in BUDGETS else in_short)(bench, name, models[name], quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", default=None)
    parser.add_argument("--tiny", action="store_true", help="small models, for a CPU")
    parser.add_argument("--quick", action="store_true", help="few budgets, and not what there was before")
    parser.add_argument("--json", type=Path, default=None, help="where the result is written")
    arguments = parser.parse_args()
    device = torch.device(arguments.device or ("cpu" if arguments.tiny else "cuda"))
    bench = Bench(device, arguments.tiny)
    HookRegistry.get_or_create(torch.nn.Linear(1, 1)).register_hook("first", ModelHook())  # Loads torch's compiler.
    result: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists() and len(arguments.parts) < len(PARTS):
        result = {part: found for part, found in json.loads(arguments.json.read_text()).items() if part in PARTS}
    result = gpu_models.header(device, "accelerate") | {"bus": bench.bus()} | result
    models: dict[str, torch.nn.Module] = {}
    for part in arguments.parts:
        start = time.perf_counter()
        result[part] = run_part(bench, part, models, arguments.quick)
        result[part]["part_s"] = round(time.perf_counter() - start, 1)
        print(part, json.dumps(result[part], indent=1), flush=True)
        if arguments.json is not None:
            gpu_models.write(arguments.json, result)


if __name__ == "__main__":
    main()
