"""What do graphs gain, alone and under a cache? Beside eager torch, torch.compile and other caches, in one run.

    python benchmarks/gpu_graphs.py [--parts flux-512 ...] [--contestants eager graphs ...] [--json FILE] [--tiny]

Every contestant gets a model of its own over the same weights. It makes every step, or skips all but the first; caches
also make whole runs of 28 steps, of which about 10 are computed, beside what the counts promise: as many forwards of
the bare graph, and nothing else. A part takes under a minute on an H200 without the contestants that compile; those run
if they are named. The result is written after each contestant, and a call with the same --json goes on where an earlier
one ended. `--tiny` tries it all out on a CPU, where a list of operations stands for a graph.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import gpu_cache
import gpu_models as gpu
import torch

from samovar import attach
from samovar.builtin import BUILTIN_MODELS
from samovar.cache import AutoConfig, TeaCacheConfig, apply_teacache_hook
from samovar.cache.config import CacheConfig
from samovar.engine.models import load_pipeline
from samovar.graphs import apply_graphs
from samovar.graphs.forms import has_same_bits
from samovar.graphs.recorders import recording_by
from samovar.graphs.simulated import SimulatedRecorder

STEPS, COMPUTED = 28, 10
SECONDS_A_ROW = 1.0
"""How long steps are made in a row, at least four and at most `--repeats` of them."""
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
SLOW = tuple(name for name in COMPUTE if "compile" in name or name == "reduce-overhead")
"""They take minutes."""


def spread(count: int) -> list[bool]:
    """A schedule of a run: so many computed steps, the first ones and then evenly."""
    last = [step * (count - 1) // STEPS for step in range(-1, STEPS)]
    return [step < 2 or last[step] != last[step + 1] for step in range(STEPS)]


def threshold_for(count: int, distances: list[float]) -> float:
    """Of the signal's changes from step to step, the threshold at which so many steps are computed."""

    def computed(threshold: float) -> int:
        summed, found = 0.0, STEPS - len(distances)
        for distance in distances:
            summed += distance
            if summed >= threshold:
                summed, found = 0.0, found + 1
        return found

    thresholds = sorted(distance * factor for distance in distances for factor in (0.5, 1.5, 2.5, 3.5, 4.5))
    return min(thresholds, key=lambda threshold: abs(computed(threshold) - count))


def signal_for_runs(model: torch.nn.Module, inputs: list[dict[str, Any]]) -> TeaCacheConfig:
    """A threshold by which about 10 steps of a run are computed."""
    plain: dict[str, Any] = {"coefficients": (0, 0, 0, 1, 0), "last_steps": 0, "max_skips": None, "min_steps": 0}
    walk = Walk(model, inputs, lambda model: None)
    hook = apply_teacache_hook(walk.model, TeaCacheConfig(rel_l1_thresh=1e-30, first_steps=2, **plain))
    walk.run(hook)
    steps = hook.stats().branches["cond"].steps
    hook.detach()
    distances = [step.distance for step in steps if step.distance is not None]
    return TeaCacheConfig(rel_l1_thresh=threshold_for(COMPUTED, distances), first_steps=2, **plain)


RUNS: dict[str, Callable[..., CacheConfig]] = {
    "schedule + graphs": lambda *_: TeaCacheConfig(schedule=spread(COMPUTED)),
    "output schedule + graphs": lambda *_: TeaCacheConfig(
        schedule=spread(COMPUTED), forecast="linear", forecast_of="output"
    ),
    "signal + graphs": signal_for_runs,
    "auto + graphs": lambda *_: AutoConfig("fast"),
}
"""Caches that make whole runs."""


class Walk:
    """A model of its own, called step after step."""

    def __init__(self, model: torch.nn.Module, inputs: list[dict[str, Any]], put: Attach) -> None:
        self.model: Any = gpu.twin(model)
        self._all, self._inputs = inputs, itertools.cycle(inputs)
        put(self.model)

    def step(self) -> Any:
        with self.model.cache_context("cond"):
            return self.model(**next(self._inputs))

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @torch.no_grad()
    def run(self, hook: Any) -> None:
        """A run of a cache, from its first step on."""
        hook.refresh(self.model, STEPS)
        self._inputs = itertools.cycle(self._all)
        self.steps(STEPS)


# ------------------------------------------------------------------------------------------------ measurements


@dataclasses.dataclass(frozen=True)
class Course:
    """A model and its inputs, on which all contestants run."""

    model: torch.nn.Module
    inputs: list[dict[str, Any]]
    device: str
    repeats: int

    def row(self, walk: Walk, most: int = 1000) -> int:
        """How many steps of a contestant fit in a row."""
        return max(4, min(self.repeats, most, int(SECONDS_A_ROW * 1e3 / gpu.once_ms(walk.step, self.device))))

    @torch.no_grad()
    def computed(self, put: Attach) -> dict[str, Any]:
        """A contestant's first four and its later steps, in a row as a run has them, and whether they have the bits of
        eager torch."""
        before = reserved(self.device)
        walk = Walk(self.model, self.inputs, put)
        results: list[Any] = []
        first = [round(gpu.once_ms(lambda: results.append(walk.step()), self.device), 2) for _ in range(4)]
        walk.steps(2)
        count = self.row(walk)
        rows = [gpu.once_ms(lambda: walk.steps(count), self.device) / count for _ in range(2)]
        alone = median(gpu.times_ms(walk.step, self.device, 4, warm=0))
        same = [has_same_bits(one, self.model(**given)) for one, given in zip(results, self.inputs, strict=False)]
        taken = gpu.mib(reserved(self.device) - before)
        return {"first_ms": first, "ms": round(min(rows), 3), "alone_ms": round(alone, 3), "same_bits": all(same),
                "reserved_mib": taken}  # fmt: skip

    @torch.no_grad()
    def skipped(self, put: Attach) -> dict[str, Any]:
        """What a skipped step takes, in a row and alone."""
        walk = Walk(self.model, self.inputs, put)
        walk.steps(8)
        rows = [gpu.once_ms(lambda: walk.steps(self.repeats), self.device) / self.repeats for _ in range(3)]
        alone = median(gpu.times_ms(walk.step, self.device, self.repeats, 0))
        return {"ms": round(min(rows), 3), "alone_ms": round(alone, 3)}

    @torch.no_grad()
    def whole_run(self, configured: Callable[..., CacheConfig], promised: float) -> dict[str, Any]:
        """A run of 28 steps beside what the counts promise; `promised`: a forward of the bare graph."""
        walk = Walk(self.model, self.inputs, apply_graphs)
        hook = apply_teacache_hook(walk.model, configured(self.model, self.inputs))
        walk.run(hook)
        walk.run(hook)
        taken = min(gpu.once_ms(lambda: walk.run(hook), self.device) for _ in range(2))
        mask = hook.stats().branches["cond"].mask
        hook.detach()
        count = mask.count("#")
        over = taken - count * promised
        return {"run_ms": round(taken, 1), "steps": mask, "of_promise": round(count * promised / taken, 4),
                "over_percent_a_skip": round(100 * over / max(1, STEPS - count) / promised, 3)}  # fmt: skip


@torch.no_grad()
def bare_graph_ms(model: torch.nn.Module, inputs: dict[str, Any], device: str, repeats: int) -> float:
    """A plain CUDA graph of the bare forward, replayed: what can be had at best."""
    if torch.device(device).type != "cuda":
        raise RuntimeError(f"there are no graphs on {device}")
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


def measure_model(
    name: str, device: str, tiny: bool, names: list[str], repeats: int, found: dict[str, Any], save: Callable[[], None]
) -> None:
    """Add to what was found earlier."""
    model_name, size = part_of(name, tiny)
    known = gpu._TINY if tiny else gpu._FULL
    known[model_name] = size
    model = gpu.build(model_name, device, tiny=tiny)
    inputs = gpu_cache.trajectory(model_name, device, tiny, WALK)
    course = Course(model, inputs, device, repeats)
    found["title"] = size.title

    def measured(kind: str, contestant: str, measure: Callable[[], Any]) -> None:
        of_kind = found.setdefault(kind, {})
        if contestant not in of_kind:
            of_kind[contestant] = attempt(measure)
            print(f"  {kind} {contestant}: {of_kind[contestant]}", flush=True)
            save()
            clear(device)

    measured("bare_graph", "ms", lambda: bare_graph_ms(gpu.twin(model), inputs[0], device, 5))
    for contestant in (one for one in COMPUTE if one in names):
        measured("computed", contestant, functools.partial(course.computed, COMPUTE[contestant]))
    for contestant in (one for one in SKIP if one in names):
        measured("skipped", contestant, functools.partial(course.skipped, SKIP[contestant]))
    bare = found["bare_graph"]["ms"]
    promised = bare if isinstance(bare, float) else found["computed"].get("graphs", {}).get("ms")
    for contestant in (one for one in RUNS if one in names and promised):
        measured("runs", contestant, functools.partial(course.whole_run, RUNS[contestant], promised))


def measure_builtin(device: str, tiny: bool, names: list[str], found: dict[str, Any], save: Callable[[], None]) -> None:
    """Whole pictures of the built-in model, 28 steps with guidance, in this process."""
    settings: dict[str, dict[str, Any]] = {
        "eager": {}, "graphs": {"compile": "graphs"}, "auto": {"cache": "auto"},
        "auto + graphs": {"cache": "auto", "compile": "graphs"}, "compile": {"compile": True},
    }  # fmt: skip
    dtype = torch.float32 if tiny else torch.bfloat16
    pipe = load_pipeline(BUILTIN_MODELS["emoji"], dtype).to(device)
    pipe.set_progress_bar_config(disable=True)
    steps = 3 if tiny else STEPS
    pictures: dict[str, Any] = {}

    def timed(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        given = {"num_inference_steps": steps, "generator": generator, "output_type": "np"}
        return round(gpu.once_ms(lambda: pictures.update({name: pipe("a grinning cat", **given).images}), device), 1)

    def measure() -> dict[str, Any]:
        with attach(pipe, **settings[name]):
            first = [timed(seed) for seed in ((1,) if tiny else (1, 2))]
            later = [timed(seed) for seed in ((7,) if tiny else (3, 4, 7))]
        base = name.replace(" + graphs", "").replace("graphs", "eager")
        same = {base: bool((pictures[name] == pictures[base]).all())} if base in pictures and base != name else {}
        return {"first_ms": first, "picture_ms": min(later), "same_bits_as": same}

    for name in settings:
        if name not in found and (name != "compile" or "compile" in names):
            found[name] = attempt(measure)
            print(f"  {name}: {found[name]}", flush=True)
            save()
            clear(device)


@contextlib.contextmanager
def graphs_on(device: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(recording_by(SimulatedRecorder(), torch.device("cpu")))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    fast = tuple(name for name in COMPUTE if name not in SLOW)
    parser.add_argument("--contestants", nargs="+", choices=tuple(COMPUTE), default=fast)
    parser.add_argument("--repeats", type=int, default=20, help="how many steps are timed in a row")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no part after so long")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    result: dict[str, Any] = gpu.header(device) | {"parts": {}}
    if options.json is not None and options.json.exists():
        result["parts"] = json.loads(options.json.read_text())["parts"]
    start = time.monotonic()

    def save() -> None:
        if options.json is not None:
            gpu.write(options.json, result)

    with graphs_on(device):
        for name in options.parts:
            if time.monotonic() - start > options.seconds:
                print(f"{name} is left out: {options.seconds:.0f} s have passed.")
                continue
            print(name, flush=True)
            found, names = result["parts"].setdefault(name, {}), list(options.contestants)
            if name == "builtin":
                measure_builtin(device, options.tiny, names, found, save)
            else:
                repeats = 3 if options.tiny else options.repeats
                measure_model(name, device, options.tiny, names, repeats, found, save)
            print(f"  {time.monotonic() - start:.0f} s have passed", flush=True)
            clear(device)


if __name__ == "__main__":
    main()
