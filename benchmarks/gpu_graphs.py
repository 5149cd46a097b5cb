"""What graphs gain, alone and under a cache, beside eager torch, torch.compile and other caches, in one run.

    python benchmarks/gpu_graphs.py --json FILE [--seconds 300] [--parts flux-512 ...] [--contestants ...] [--tiny]

Every contestant gets a model of its own over the same weights. It makes every step, or skips all but a few; caches also
make whole runs of 28 steps, of which about 10 are computed, beside what the counts promise: as many forwards of the
bare graph, and nothing else. GPUs slow down as they get warm, so the bare graph is replayed in turn with all of them.

Figures that have goals come first, then what they are compared with. After each of them the result is written, and a
call with the same --json goes on where an earlier one ended, or measures once more what is there (`--again`); what
failed is tried again. Nothing is begun that would probably not end within --seconds. At the end there is a table with
the goals (`graphs_goals.py FILE` prints it too). `--tiny` tries it all out on a CPU, where a list of operations stands
for a graph.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import gpu_cache
import gpu_models as gpu
import graphs_contestants as who
import torch
from graphs_goals import summary

from samovar import attach
from samovar.builtin import BUILTIN_MODELS
from samovar.cache import apply_teacache_hook
from samovar.engine.models import load_pipeline
from samovar.graphs import apply_graphs
from samovar.graphs.static_inputs import has_same_bits
from simulated import SimulatedRecorder, recording_by

ROWS, SECONDS_A_ROW = 3, 0.7
"""How often, and for how long, steps are made in a row: at least four and at most `--repeats` of them."""
BLOCK, SECONDS = 4, 4.0
"""Computed steps that are made in a row, in turn with the bare graph, and for how long: at least four blocks."""
WALK = 300
"""Different steps that a contestant is called with: more than any takes without beginning a new run."""
USUAL_S = {"computed": 10.0, "skipped": 5.0, "runs": 15.0, "pictures": 10.0, "model": 30.0, "compiles": 120.0}
"""How long a figure takes, as far as is known beforehand; and a model, until it is there."""
_WAN_13B = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_WAN_480P = (16, 21, 60, 104)
"""81 frames of 832 x 480."""
PARTS = ("flux-1024", "qwen-1024", "flux-256", "flux-512", "qwen-512", "wan-480", "builtin")
PICTURES: dict[str, dict[str, Any]] = {
    "eager": {}, "graphs": {"compile": "graphs"}, "auto": {"cache": "auto"},
    "auto + graphs": {"cache": "auto", "compile": "graphs"}, "compile": {"compile": True},
}  # fmt: skip
"""Settings for the built-in model."""
FIGURES = {
    "computed": "over_bare_percent",
    "skipped": "in_a_row_percent",
    "runs": "of_promise",
    "pictures": "picture_ms",
}
"""What has been measured if a result has this."""


class Measure(NamedTuple):
    """A figure that is to be found."""

    part: str
    kind: str
    contestant: str

    @property
    def is_slow(self) -> bool:
        return self.contestant in who.SLOW


def planned(parts: Collection[str], contestants: Collection[str]) -> list[Measure]:
    """All measures, the most important ones first."""
    large, caches = ("flux-1024", "qwen-1024"), ("schedule + graphs", "signal + graphs", "auto + graphs")
    skips, fast = (*who.IN_TURN, *who.SKIP), [name for name in who.COMPUTE if name not in who.SLOW]
    # With goals: of one part together, since another takes a while to begin.
    found = list[Measure]()
    for part in large:
        found += [Measure(part, "skipped", name) for name in ("output schedule + graphs", *caches[:2])]
        found += [Measure(part, "computed", name) for name in ("graphs", *caches)]
    for part in ("flux-512", "qwen-512"):
        found += [Measure(part, "runs", name) for name in caches]
        found += [Measure(part, "computed", "graphs")]
    found += [Measure(part, "computed", "graphs") for part in ("wan-480", "flux-256")]
    found += [Measure("builtin", "pictures", name) for name in ("graphs", "auto + graphs")]
    # Beside others, where people look first.
    found += [Measure(part, "computed", name) for part in PARTS for name in ("eager", *caches) if part != "builtin"]
    for part in ("flux-512", "flux-1024"):
        found += [Measure(part, "skipped", name) for name in who.IN_TURN]
        found += [Measure(part, "runs", name) for name in who.RUNS]
    found += [Measure(part, "computed", name) for part in ("flux-512", "flux-1024") for name in who.SLOW]
    for part in PARTS[:-1]:
        found += [Measure(part, "runs", name) for name in who.RUNS]
        found += [Measure(part, "skipped", name) for name in skips if name not in who.SLOW]
        found += [Measure(part, "computed", name) for name in fast]
    found += [Measure("builtin", "pictures", name) for name in PICTURES]
    found += [Measure(part, "computed", name) for part in PARTS[:-1] for name in who.SLOW]
    found += [Measure(part, "skipped", name) for part in PARTS[:-1] for name in skips]
    return [one for one in dict.fromkeys(found) if one.part in parts and one.contestant in contestants]


# ------------------------------------------------------------------------------------------------ a part


def spec_of(part: str, tiny: bool) -> tuple[str, gpu.Spec]:
    """The model of a part, and its size."""
    model, _, size = part.partition("-")
    base = gpu.spec(model, tiny=tiny)
    if tiny:
        return model, base
    if model == "wan":
        return model, dataclasses.replace(base, title="Wan 1.3B", config=_WAN_13B, latents=_WAN_480P)
    return model, dataclasses.replace(base, side=int(size) // 16)


@functools.cache
def built(model: str, device: str, tiny: bool) -> torch.nn.Module:
    """A model, which all parts with it share."""
    return gpu.build(model, device, tiny=tiny)


class Bare:
    """A plain CUDA graph of the bare forward: what can be had at best. On a CPU, the forward itself."""

    @torch.no_grad()
    def __init__(self, model: torch.nn.Module, inputs: dict[str, Any], device: str) -> None:
        self._model, self._inputs, self.device = gpu.twin(model), inputs, device
        self._graph: Any = None
        if torch.device(device).type != "cuda":
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._model(**inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._kept = self._model(**inputs)

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            if self._graph is None:
                self._model(**self._inputs)
            else:
                self._graph.replay()

    def ms(self, count: int) -> float:
        """Milliseconds of a forward, in a row."""
        return gpu.once_ms(lambda: self.steps(count), self.device) / count


class Course:
    """A model and its inputs, on which all contestants run."""

    def __init__(self, part: str, device: str, tiny: bool, repeats: int) -> None:
        name, size = spec_of(part, tiny)
        (gpu._TINY if tiny else gpu._FULL)[name] = size
        self.title, self.device, self.repeats, self._tiny = size.title, device, repeats, tiny
        self.model = built(name, device, tiny)
        self.inputs = gpu_cache.trajectory(name, device, tiny, WALK)
        self.bare = Bare(self.model, self.inputs[0], device)
        self.bare.ms(2)

    def measure(self, kind: str, contestant: str) -> dict[str, Any]:
        if kind == "computed":
            return self.computed(who.COMPUTE[contestant])
        if kind == "runs":
            return self.whole_run(contestant)
        if contestant in who.IN_TURN:
            return self.skipped_in_turn(who.IN_TURN[contestant])
        return self.skipped(who.SKIP[contestant])

    def row(self, ms: float) -> int:
        """How many steps fit in a row."""
        return max(4, min(self.repeats, int(SECONDS_A_ROW * 1e3 / ms)))

    @torch.no_grad()
    def computed(self, put: who.Attach) -> dict[str, Any]:
        """A contestant's first four and its later steps, beside the bare graph; and whether they have the bits of eager
        torch."""
        before = reserved(self.device)
        walk = who.Walk(self.model, self.inputs, put)
        results: list[Any] = []
        first = [round(gpu.once_ms(lambda: results.append(walk.step()), self.device), 2) for _ in range(4)]
        walk.steps(4)
        blocks = max(4, min(self.repeats, int(SECONDS * 1e3 / (2 * BLOCK * self.bare.ms(2)))))
        bare, *pairs = self.in_turn(walk.step, blocks)
        rows, bares = [pair[0] for pair in pairs], [bare, *(pair[1] for pair in pairs)]
        over = [100 * (row / ((a + b) / 2) - 1) for row, a, b in zip(rows, bares, bares[1:], strict=False)]
        same = [has_same_bits(one, self.model(**given)) for one, given in zip(results, self.inputs, strict=False)]
        return {"first_ms": first, "ms": round(median(rows), 3), "bare_ms": round(median(bares), 3),
                "over_bare_percent": round(median(over), 3), "over_bare_each": [round(one, 2) for one in over],
                "same_bits": all(same), "reserved_mib": gpu.mib(reserved(self.device) - before)}  # fmt: skip

    def in_turn(self, step: Callable[[], Any], blocks: int) -> list[Any]:
        """Milliseconds of a step of the bare graph, and then for each block of steps those of one, and of one of the
        bare graph behind it. Nothing waits between them, and the first step of each block does not count."""
        marks = [mark(self.device)]
        for block in range(2 * blocks + 1):
            for _ in range(BLOCK):
                self.bare.steps(1) if block % 2 == 0 else step()
                marks.append(mark(self.device))
        gpu.synchronise(self.device)
        taken = [between_ms(one, other) for one, other in itertools.pairwise(marks)]
        each = [fmean(taken[start + 1 : start + BLOCK]) for start in range(0, len(taken), BLOCK)]
        return [each[0], *zip(each[1::2], each[2::2], strict=True)]

    def percent(self, ms: float, bare: float) -> float:
        return round(100 * ms / bare, 4)

    @torch.no_grad()
    def skipped(self, put: who.Attach) -> dict[str, Any]:
        """What a skipped step takes, in a row."""
        walk = who.Walk(self.model, self.inputs, put)
        walk.steps(8)
        rows = [gpu.once_ms(lambda: walk.steps(who.SKIPS), self.device) / who.SKIPS for _ in range(5)]
        walk.must_have_taken("." * 5 * who.SKIPS)
        bare = self.bare.ms(self.row(self.bare.ms(1)))
        return {"in_a_row_ms": round(median(rows), 4), "bare_ms": round(bare, 3),
                "in_a_row_percent": self.percent(median(rows), bare)}  # fmt: skip

    @torch.no_grad()
    def skipped_in_turn(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The same by schedule; and behind a computed step, where the host is ahead of the device, as in a run."""
        walk = who.Walk(self.model, self.inputs, who.in_turn(settings, rounds=12))
        walk.steps(who.FIRST + 2 * (1 + who.SKIPS))
        alone, rows, together = [], [], []
        for _ in range(5):
            alone.append(gpu.once_ms(walk.step, self.device))
            rows.append(gpu.once_ms(lambda: walk.steps(who.SKIPS), self.device) / who.SKIPS)
            together.append(gpu.once_ms(lambda: walk.steps(1 + who.SKIPS), self.device))
        walk.must_have_taken(("#" + "." * who.SKIPS) * 10)
        behind = median((both - one) / who.SKIPS for both, one in zip(together, alone, strict=True))
        bare = self.bare.ms(self.row(self.bare.ms(1)))
        return {"in_a_row_ms": round(median(rows), 4), "behind_ms": round(behind, 4), "bare_ms": round(bare, 3),
                "in_a_row_percent": self.percent(median(rows), bare),
                "behind_a_computed_one_percent": self.percent(behind, bare)}  # fmt: skip

    @torch.no_grad()
    def whole_run(self, contestant: str) -> dict[str, Any]:
        """A run of 28 steps beside what the counts promise, with the bare graph as often as a step is computed."""
        walk = who.Walk(self.model, self.inputs, apply_graphs)
        hook = apply_teacache_hook(walk.model, who.RUNS[contestant](self.model, self.inputs))
        first = [round(gpu.once_ms(lambda: walk.run(hook), self.device), 1) for _ in range(2)]
        shares, taken = [], []
        for _ in range(ROWS):
            mask = hook.stats().branches["cond"].mask
            promised = self.bare.ms(mask.count("#")) * mask.count("#")
            taken.append(gpu.once_ms(lambda: walk.run(hook), self.device))
            shares.append(promised / taken[-1])
        hook.detach()
        return {"first_runs_ms": first, "run_ms": round(min(taken), 1), "steps": mask,
                "of_promise": round(median(shares), 4)}  # fmt: skip


# ------------------------------------------------------------------------------------------------ the built-in model


class Pictures:
    """Whole pictures of the built-in model, 28 steps with guidance, in this process."""

    title = "the built-in model"

    def __init__(self, device: str, tiny: bool) -> None:
        dtype = torch.float32 if tiny else torch.bfloat16
        self._pipe = load_pipeline(BUILTIN_MODELS["emoji"], dtype).to(device)
        self._pipe.set_progress_bar_config(disable=True)
        self._device, self._tiny, self._made = device, tiny, dict[str, Any]()

    def measure(self, kind: str, contestant: str) -> dict[str, Any]:
        base = contestant.replace(" + graphs", "").replace("graphs", "eager")
        with attach(self._pipe, **PICTURES[contestant]):
            first = [self._timed(contestant, seed) for seed in ((1,) if self._tiny else (1, 2))]
            later = [self._timed(contestant, seed) for seed in ((7,) if self._tiny else (3, 4, 5, 7))]
        if base != contestant and base not in self._made:  # An earlier call has measured it.
            with attach(self._pipe, **PICTURES[base]):
                self._timed(base, 7)
        same = bool((self._made[contestant] == self._made[base]).all())
        return {"first_ms": first, "picture_ms": min(later), f"same_bits_as_{base}": same}

    def _timed(self, name: str, seed: int) -> float:
        given = {"num_inference_steps": 3 if self._tiny else who.STEPS, "output_type": "np"}

        def make() -> None:
            generator = torch.Generator().manual_seed(seed)
            self._made[name] = self._pipe("a grinning cat", generator=generator, **given).images

        return round(gpu.once_ms(make, self._device), 1)


# ------------------------------------------------------------------------------------------------ the whole


def attempt(measure: Callable[[], Any]) -> Any:
    """A contestant that fails says so, and the others go on."""
    try:
        return measure()
    except (RuntimeError, ImportError, TypeError, ValueError, AssertionError) as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"}


def mark(device: str) -> Any:
    """A point in what a device does; on a CPU, the time."""
    if torch.device(device).type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(one: Any, other: Any) -> float:
    return (other - one) * 1e3 if isinstance(one, float) else float(one.elapsed_time(other))


def reserved(device: str) -> int:
    return torch.cuda.memory_reserved(device) if torch.device(device).type == "cuda" else 0


def clear(device: str) -> None:
    gc.collect()
    torch.compiler.reset()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Clock:
    """What is left of the time, and how long things take."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._longest: dict[tuple[str, str], float] = {}

    def has_time_for(self, one: Measure, on: str) -> bool:
        """`on`: the part that is there."""
        wanted = [("compiles" if one.is_slow else one.kind, one.part)]
        wanted += [] if on == one.part else [("model", one.part.partition("-")[0])]
        expected = sum(self._longest.get(key, USUAL_S[key[0]]) for key in wanted)
        return time.monotonic() + 1.2 * expected <= self._end

    @contextlib.contextmanager
    def timing(self, kind: str, what: str) -> Iterator[None]:
        start, key = time.monotonic(), (kind, what)
        yield
        # A model is made once.
        self._longest[key] = time.monotonic() - start if kind != "model" or key not in self._longest else 5.0


def course_of(part: str, device: str, options: argparse.Namespace) -> Course | Pictures:
    if part == "builtin":
        return Pictures(device, options.tiny)
    return Course(part, device, options.tiny, 3 if options.tiny else options.repeats)


def measure_all(options: argparse.Namespace, device: str, result: dict[str, Any], save: Callable[[], None]) -> None:
    """Add to what was found earlier."""
    clock, on, left = Clock(options.seconds), "", list[Measure]()
    course: Course | Pictures | None = None
    for one in planned(options.parts, options.contestants):
        found = result["parts"].setdefault(one.part, {})
        is_known = FIGURES[one.kind] in found.get(one.kind, {}).get(one.contestant, {})
        if one.kind not in options.kinds or (is_known and not options.again):
            continue
        if not clock.has_time_for(one, on):
            left.append(one)
            continue
        if on != one.part:
            course = None
            clear(device)
            with clock.timing("model", one.part.partition("-")[0]):
                course, on = course_of(one.part, device, options), one.part
        assert course is not None
        with clock.timing("compiles" if one.is_slow else one.kind, one.part):
            found["title"] = course.title
            figures = attempt(functools.partial(course.measure, one.kind, one.contestant))
            found.setdefault(one.kind, {})[one.contestant] = figures
            print(f"{one.part}, {one.kind}, {one.contestant}: {figures}", flush=True)
            save()
            clear(device)
    if left:
        first = ", ".join(left[0])
        print(f"{len(left)} figures are left for another call, for want of time; the first of them is {first}.")


def graphs_on(device: str) -> contextlib.AbstractContextManager[None]:
    return recording_by(SimulatedRecorder(), torch.device("cpu")) if device == "cpu" else contextlib.nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = tuple(dict.fromkeys((*who.COMPUTE, *who.IN_TURN, *who.SKIP, *who.RUNS, *PICTURES)))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--contestants", nargs="+", choices=names, default=names)
    parser.add_argument("--kinds", nargs="+", choices=tuple(FIGURES), default=tuple(FIGURES), help="of figures (all)")
    parser.add_argument("--repeats", type=int, default=20, help="most steps that are timed in a row")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing that would not end within these")
    parser.add_argument("--again", action="store_true", help="measure also what is in the result already")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that it runs, not how fast")
    parser.add_argument("--json", type=Path, help="write the result here, and go on from what is there")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    result: dict[str, Any] = gpu.header(device) | {"parts": {}}
    if options.json is not None and options.json.exists():
        known = json.loads(options.json.read_text())
        result["parts"] = known.pop("parts")
        result["earlier"] = [*known.pop("earlier", []), known]

    def save() -> None:
        if options.json is not None:  # Whole at any time: a call may be ended while it writes.
            unfinished = options.json.with_suffix(".part")
            gpu.write(unfinished, result)
            unfinished.replace(options.json)

    with graphs_on(device):
        measure_all(options, device, result, save)
    print("\nOf tiny models on a CPU, so these figures mean nothing:" if options.tiny else "")
    print(summary(result["parts"]))


if __name__ == "__main__":
    main()
