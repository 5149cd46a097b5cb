"""What do graphs gain, alone and under a cache? Beside eager torch, torch.compile and other caches, in one run.

    python benchmarks/gpu_graphs.py [--parts flux-512 ...] [--contestants eager graphs ...] [--json FILE] [--tiny]

Every contestant gets a model of its own over the same weights, and makes every step, or skips all but the first. From
its two times follows what a run of 28 steps with 10 computed ones takes, and how near that is to what the counts
promise: 10 forwards of the bare graph, and nothing else. The result is written after each part. `--tiny` tries it all
out on a CPU, where a list of operations stands for a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cache
import gpu_models as gpu
import torch

from samovar import Omni
from samovar.graphs import apply_graphs
from samovar.graphs.forms import has_same_bits
from samovar.graphs.recorders import recording_by
from samovar.graphs.simulated import SimulatedRecorder

STEPS, COMPUTED = 28, 10
WALK = 64
"""Different steps that a contestant is called with, in turn."""
_WAN_13B = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_WAN_480P = (16, 21, 60, 104)
"""81 frames of 832 x 480."""

Attach = Callable[[torch.nn.Module], Any]


def part_of(name: str, tiny: bool) -> tuple[str, gpu.Spec]:
    """The model of a part, and its size."""
    model, _, size = name.partition("-")
    base = gpu.spec(model, tiny=tiny)
    if tiny:
        return model, base
    if model == "wan":
        return model, dataclasses.replace(base, title="Wan 1.3B", config=_WAN_13B, latents=_WAN_480P)
    return model, dataclasses.replace(base, side=int(size) // 16)


PARTS = ("flux-512", "flux-256", "flux-1024", "qwen-512", "qwen-1024", "wan-480", "builtin")


# ------------------------------------------------------------------------------------------------ contestants


def compiled(mode: str | None) -> Attach:
    def attach_it(model: Any) -> None:
        if mode is None:
            model.compile_repeated_blocks()
        else:
            model.compile(mode=mode)

    return attach_it


def under(cache: Callable[[torch.nn.Module, bool], None], skips: bool, then: Attach | None = None) -> Attach:
    """A cache that computes every step, or skips all but the first ones, and what makes its forwards faster."""

    def attach_it(model: torch.nn.Module) -> None:
        cache(model, skips)
        if then is not None:
            then(model)

    return attach_it


SIGNAL = gpu_cache.samovar(3).attach
SCHEDULE = gpu_cache.samovar(scheduled=True).attach
OUTPUT_SCHEDULE = gpu_cache.samovar(2, scheduled=True, forecast="linear", forecast_of="output").attach
COMPUTE: dict[str, Attach] = {
    "eager": lambda model: None,
    "graphs": apply_graphs,
    "auto + graphs": under(gpu_cache.auto, False, apply_graphs),
    "signal + graphs": under(SIGNAL, False, apply_graphs),
    "schedule + graphs": under(SCHEDULE, False, apply_graphs),
    "output schedule + graphs": under(OUTPUT_SCHEDULE, False, apply_graphs),
    "signal": under(SIGNAL, False),
    "compile": compiled(None),
    "FirstBlockCache + compile": under(gpu_cache.first_block_cache, False, compiled(None)),
    "DBCache + compile": under(gpu_cache.dbcache, False, compiled(None)),
    "reduce-overhead": compiled("reduce-overhead"),
}
"""By name, what is attached so that every step is computed; slow ones last."""
SKIP: dict[str, Attach] = {
    "signal + graphs": under(SIGNAL, True, apply_graphs),
    "schedule + graphs": under(SCHEDULE, True, apply_graphs),
    "output schedule + graphs": under(OUTPUT_SCHEDULE, True, apply_graphs),
    "signal": under(SIGNAL, True),
    "FirstBlockCache + compile": under(gpu_cache.first_block_cache, True, compiled(None)),
    "DBCache + compile": under(gpu_cache.dbcache, True, compiled(None)),
}
"""The same so that all steps after the first ones are skipped."""


class Walk:
    """A model of its own, called step after step."""

    def __init__(self, model: torch.nn.Module, inputs: list[dict[str, Any]], put: Attach) -> None:
        self.model: Any = gpu.twin(model)
        self._inputs = itertools.cycle(inputs)
        put(self.model)

    def step(self) -> Any:
        with self.model.cache_context("cond"):
            return self.model(**next(self._inputs))

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


# ------------------------------------------------------------------------------------------------ measurements


@torch.no_grad()
def measure_computed(
    model: torch.nn.Module, inputs: list[dict[str, Any]], names: list[str], device: str, repeats: int
) -> dict[str, Any]:
    """Each contestant's first, second and later steps, in a row as a run has them, and whether they have the bits of
    eager torch."""
    expected = [model(**one) for one in inputs[:4]]
    found: dict[str, Any] = {}
    for name in names:
        found[name] = attempt(lambda name=name: _computed(model, inputs, COMPUTE[name], expected, device, repeats))  # type: ignore[misc]
        print(f"  {name}: {found[name]}", flush=True)
        clear(device)
    return found


def _computed(
    model: torch.nn.Module, inputs: list[dict[str, Any]], put: Attach, expected: list[Any], device: str, repeats: int
) -> dict[str, Any]:
    before = reserved(device)
    walk = Walk(model, inputs, put)
    results: list[Any] = []
    first = [round(gpu.once_ms(lambda: results.append(walk.step()), device), 2) for _ in range(4)]
    walk.steps(4)
    rows = [gpu.once_ms(lambda: walk.steps(repeats), device) / repeats for _ in range(3)]
    alone = median(gpu.times_ms(walk.step, device, repeats, warm=0))
    same = [has_same_bits(one, other) for one, other in zip(results, expected, strict=True)]
    taken = gpu.mib(reserved(device) - before)
    return {"first_ms": first, "ms": round(min(rows), 3), "alone_ms": round(alone, 3), "same_bits": all(same),
            "reserved_mib": taken}  # fmt: skip


@torch.no_grad()
def measure_skips(
    model: torch.nn.Module, inputs: list[dict[str, Any]], names: list[str], device: str, repeats: int
) -> dict[str, Any]:
    """What a skipped step takes, in a row and alone."""
    found: dict[str, Any] = {}

    def skipped(put: Attach) -> dict[str, Any]:
        walk = Walk(model, inputs, put)
        walk.steps(8)
        rows = [gpu.once_ms(lambda: walk.steps(repeats), device) / repeats for _ in range(3)]
        return {"ms": round(min(rows), 3), "alone_ms": round(median(gpu.times_ms(walk.step, device, repeats, 0)), 3)}

    for name in names:
        found[name] = attempt(lambda name=name: skipped(SKIP[name]))  # type: ignore[misc]
        print(f"  skipped, {name}: {found[name]}", flush=True)
        clear(device)
    return found


@torch.no_grad()
def bare_graph_ms(model: torch.nn.Module, inputs: dict[str, Any], device: str, repeats: int) -> float:
    """A plain CUDA graph of the bare forward, replayed: what can be had at best."""
    if torch.device(device).type != "cuda":
        return float("nan")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(**inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = model(**inputs)
    rows = [gpu.once_ms(lambda: [graph.replay() for _ in range(repeats)], device) / repeats for _ in range(3)]
    del kept
    return min(rows)


def attempt(measure: Callable[[], Any]) -> Any:
    """A contestant that fails says so, and the others go on."""
    try:
        return measure()
    except (RuntimeError, ImportError, TypeError, AssertionError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"}


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved(device) if torch.device(device).type == "cuda" else 0


def clear(device: str) -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure_model(name: str, device: str, tiny: bool, names: list[str], repeats: int) -> dict[str, Any]:
    model_name, size = part_of(name, tiny)
    known = gpu._TINY if tiny else gpu._FULL
    known[model_name] = size
    model = gpu.build(model_name, device, tiny=tiny)
    inputs = gpu_cache.trajectory(model_name, device, tiny, WALK)
    bare = attempt(lambda: bare_graph_ms(gpu.twin(model), inputs[0], device, repeats))
    print(f"  bare graph: {bare}", flush=True)
    clear(device)
    computed = measure_computed(model, inputs, [n for n in COMPUTE if n in names], device, repeats)
    skipped = measure_skips(model, inputs, [n for n in SKIP if n in names], device, repeats)
    promised = bare if isinstance(bare, float) and bare == bare else computed.get("graphs", {}).get("ms")
    result = {"title": size.title, "bare_graph_ms": bare, "computed": computed, "skipped": skipped}
    if promised:
        result["runs"] = {n: of_promise(computed[n], skipped[n], promised) for n in skipped if n in computed}
    return result


def of_promise(computed: Mapping[str, Any], skipped: Mapping[str, Any], promised: float) -> dict[str, Any]:
    """A run of 28 steps, 10 of them computed, beside what the counts promise."""
    if "failed" in computed or "failed" in skipped:
        return {"failed": True}
    taken = COMPUTED * computed["ms"] + (STEPS - COMPUTED) * skipped["ms"]
    return {"run_ms": round(taken, 1), "of_promise": round(COMPUTED * promised / taken, 4),
            "skip_percent": round(100 * skipped["ms"] / promised, 3),
            "computed_percent": round(100 * (computed["ms"] / promised - 1), 3)}  # fmt: skip


def measure_builtin(device: str, tiny: bool) -> dict[str, Any]:
    """Whole pictures of the built-in model, 28 steps with guidance, through `Omni`."""
    settings: dict[str, dict[str, Any]] = {
        "eager": {}, "graphs": {"compile": "graphs"}, "auto": {"cache": "auto"},
        "auto + graphs": {"cache": "auto", "compile": "graphs"}, "compile": {"compile": True},
    }  # fmt: skip
    if tiny:
        del settings["compile"]
    found: dict[str, Any] = {}
    pictures: dict[str, Any] = {}
    steps = 3 if tiny else STEPS

    def timed(omni: Any, seed: int) -> float:
        start = time.perf_counter()
        pictures[name] = omni.generate("a grinning cat, 3d style", seed=seed, num_inference_steps=steps)[0].images[0]
        return round((time.perf_counter() - start) * 1e3, 1)

    for name, given in settings.items():
        with Omni("emoji", device=device, **given) as omni:
            first = [timed(omni, seed) for seed in ((1,) if tiny else (1, 2))]
            later = [timed(omni, seed) for seed in (*range(3, 3 if tiny else 11), 7)]
        base = name.replace(" + graphs", "").replace("graphs", "eager")
        same = list(pictures[name].getdata()) == list(pictures[base].getdata())
        found[name] = {"first_ms": first, "picture_ms": min(later), "same_bits_as": {base: same}}
        print(f"  {name}: {found[name]}", flush=True)
        clear(device)
    return found


@contextlib.contextmanager
def graphs_on(device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(recording_by(SimulatedRecorder(), torch.device("cpu")))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--contestants", nargs="+", choices=tuple(COMPUTE), default=tuple(COMPUTE))
    parser.add_argument("--repeats", type=int, default=20, help="how many steps are timed in a row")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no part after so long")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    result: dict[str, Any] = gpu.header(device) | {"parts": {}}
    start = time.monotonic()
    with graphs_on(device):
        for name in options.parts:
            if time.monotonic() - start > options.seconds:
                print(f"{name} is left out: {options.seconds:.0f} s have passed.")
                continue
            print(name, flush=True)
            began = time.monotonic()
            if name == "builtin":
                found = attempt(lambda: measure_builtin(device, options.tiny))
            else:
                names, repeats = list(options.contestants), 3 if options.tiny else options.repeats
                found = measure_model(name, device, options.tiny, names, repeats)
            result["parts"][name] = found | {"seconds": round(time.monotonic() - began, 1)}
            print(f"  {found.get('runs', '')}", flush=True)
            clear(device)
            if options.json is not None:
                gpu.write(options.json, result)


if __name__ == "__main__":
    main()
