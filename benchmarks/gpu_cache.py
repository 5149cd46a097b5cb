"""The cost of a skipped step and of a computed one: TeaCache beside its peers, in one run, at full size.

    python benchmarks/gpu_cache.py [--models flux qwen] [--repeats 40] [--json FILE] [--profile FILE] [--tiny]
    python benchmarks/gpu_cache.py --runs --json FILE    # whole runs only; the rest of the file stays as it is

Every contestant gets a model of its own over the same weights, so that all of them and the bare one can run in turn.
The latent moves a little from step to step, and the timestep goes down. That a step was skipped or computed is not
taken from what the contestant says, but counted at a layer of the last block. `--tiny` tries it all out on a CPU.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import itertools
import json
import pstats
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import gpu_models as gpu
import torch
from diffusers import FirstBlockCacheConfig

from samovar.cache import AutoConfig, TeaCacheConfig, apply_teacache_hook
from samovar.cache.config import EVERY_BRANCH
from samovar.lab.planner import even_mask

TARGETS = {"skip_percent": {"flux": 1.0, "qwen": 0.8}, "computed_percent": 0.3, "promise_percent": 3.0}
THRESHOLDS = (0.2, 0.4)
STEPS, BARE_STEPS, RUNS = 50, 10, 2
TUNED_SHARE = 0.4
"""Of the steps, computed by the tuned setting of a run."""
DRIFT = 0.02
"""How far a latent of unit variance moves in a step."""
LONG = 10_000
"""More steps than any line of calls here has."""
PROFILED_STEPS = 50
SKIPS_A_REPEAT = 5
"""Skipped steps are short: this number of them is timed for each computed one."""

Inputs = list[dict[str, Any]]
Attach = Callable[[torch.nn.Module, bool], None]


def trajectory(name: str, device: str, tiny: bool, steps: int) -> Inputs:
    """The arguments of each forward of a run: a latent that changes a little, and a timestep from 1 down to 0."""
    first = gpu.inputs(name, device, tiny=tiny)
    latents, dtype = first["hidden_states"].float(), first["hidden_states"].dtype
    generator = torch.Generator().manual_seed(2)
    found = []
    for step in range(steps):
        # In float32: in bfloat16 the times of a long run are equal at times, and a call at the same time is no step.
        timestep = torch.full_like(first["timestep"], 1 - step / steps, dtype=torch.float32)
        found.append(first | {"hidden_states": latents.to(dtype), "timestep": timestep})
        latents = latents + DRIFT * torch.randn(latents.shape, generator=generator).to(device)
    return found


class Line:
    """One model called step after step, and how often its last block really ran."""

    def __init__(self, model: torch.nn.Module, run: Inputs) -> None:
        self.model: Any = gpu.twin(model)
        self.blocks_ran = 0
        self._run = run
        self.rewind()
        stacks: list[Any] = [child for name, child in self.model.named_children() if name.endswith("blocks")]
        last: torch.nn.Module = stacks[-1][-1]
        layer = next(module for module in last.modules() if isinstance(module, torch.nn.Linear))
        layer.register_forward_pre_hook(self._count)

    def _count(self, module: torch.nn.Module, args: Any) -> None:
        self.blocks_ran += 1

    def rewind(self) -> None:
        """Begin at the first step again."""
        self._inputs: Iterator[dict[str, Any]] = itertools.cycle(self._run)

    def step(self) -> Any:
        """One forward, called as diffusers' pipelines do."""
        inputs = next(self._inputs)
        with self.model.cache_context("cond"):
            return self.model(**inputs)

    @torch.no_grad()
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def empty(self) -> None:
        """Take all blocks out: what is left of a forward is the least that a step costs which passes through it."""
        for name in [name for name, _ in self.model.named_children()]:
            if name.endswith("blocks"):
                setattr(self.model, name, torch.nn.ModuleList())

    def must(self, act: Callable[[], Any], *, compute: bool, steps: int) -> Any:
        """Do something that takes this number of steps, and see that all of them were computed, or all skipped."""
        before = self.blocks_ran
        result = act()
        ran = self.blocks_ran - before
        if ran != (steps if compute else 0):
            raise RuntimeError(f"Of {steps} steps {ran} were computed, where {'all' if compute else 'none'} should be.")
        return result


# ------------------------------------------------------------------------------------------------ contestants


@dataclass(frozen=True)
class Contestant:
    """A way to skip steps: attached so that all steps after the first ones are skipped, or none."""

    attach: Attach
    first_steps: int = 1
    """Computed before anything is skipped."""


def samovar(first_steps: int = 1, scheduled: bool = False, **settings: Any) -> Contestant:
    """TeaCache without guards. A saved schedule aside, the signal is measured at each step and decides."""

    def attach(model: torch.nn.Module, skips: bool) -> None:
        apply_teacache_hook(
            model,
            TeaCacheConfig(
                rel_l1_thresh=1e30 if skips else 1e-30,
                coefficients=(0, 0, 0, 1, 0),
                schedule=[True] * first_steps + [not skips] * LONG + [False] if scheduled else None,
                first_steps=first_steps,
                last_steps=0,
                max_skips=None,
                min_steps=0,
                **settings,
            ),
        )

    return Contestant(attach, first_steps)


def auto(model: torch.nn.Module, skips: bool) -> None:
    """Every step is computed and judged; how many it skips where all may be is in the runs."""
    apply_teacache_hook(model, AutoConfig(1e6 if skips else 1e-30))


def first_block_cache(model: Any, skips: bool) -> None:
    model.enable_cache(FirstBlockCacheConfig(threshold=1e30 if skips else -1.0))


def dbcache(model: torch.nn.Module, skips: bool) -> None:
    import cache_dit  # type: ignore[import-not-found]

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=1,
        residual_diff_threshold=1e30 if skips else -1.0,
        num_inference_steps=LONG,
        enable_separate_cfg=False,
    )
    cache_dit.enable_cache(model, cache_config=config)


OURS = {
    "samovar reuse": samovar(),
    "samovar reuse, schedule": samovar(scheduled=True),
    "samovar linear of output, schedule": samovar(2, scheduled=True, forecast="linear", forecast_of="output"),
}
PEERS = {"diffusers FirstBlockCache": Contestant(first_block_cache)}
if find_spec("cache_dit"):
    PEERS["cache-dit DBCache F1B0"] = Contestant(dbcache)
ALL = OURS | PEERS
MAIN = "samovar reuse"
CONTROL = "bare again"
COMPUTED: dict[str, Attach] = {CONTROL: lambda model, skips: None}
COMPUTED["samovar auto"] = auto
COMPUTED |= {name: ALL[name].attach for name in (MAIN, *PEERS)}
PROFILED = (MAIN, "samovar reuse, schedule", "samovar linear of output, schedule")


# ------------------------------------------------------------------------------------------------ measurements


@dataclass(frozen=True)
class Course:
    """A model and its inputs, on which all contestants run."""

    device: str
    model: torch.nn.Module
    run: Inputs
    walk: Inputs
    """Like a run, but as long as any contestant walks."""
    repeats: int

    def line(self) -> Line:
        return Line(self.model, self.walk)

    def peak_mib(self, line: Line, kept: int, *, compute: bool) -> float:
        """The most memory that a step needs besides the weights, what is kept between steps included."""
        before = gpu.allocated_bytes(self.device)
        peak = line.must(lambda: gpu.peak_bytes(line.step, self.device), compute=compute, steps=1)
        return gpu.mib(kept + peak - before)


@torch.no_grad()
def measure_skips(course: Course) -> dict[str, dict[str, Any]]:
    """Time of a skipped step, alone and in a row, and what is kept in memory for it.

    All contestants take turns, so that a host that is slow for a while is slow for all of them.
    """
    device, repeats = course.device, SKIPS_A_REPEAT * course.repeats
    lines: dict[str, Line] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, contestant in ALL.items():
        line, first = course.line(), contestant.first_steps
        before = gpu.allocated_bytes(device)
        attach_ms = gpu.once_ms(lambda c=contestant, line=line: c.attach(line.model, True), device)  # type: ignore[misc]
        first_ms = [gpu.once_ms(line.step, device) for _ in range(first)]
        kept = gpu.allocated_bytes(device) - before
        line.steps(3)  # What is made or checked once, at the first skips, is not their cost.
        if line.blocks_ran != first:
            raise RuntimeError(f"{name} computed {line.blocks_ran} of the first {first + 3} steps, and not {first}.")
        lines[name] = line
        found[name] = {
            "attach_ms": round(attach_ms, 1),
            "first_step_ms": round(first_ms[0], 1),
            "kept_mib": gpu.mib(kept),
            "peak_mib": course.peak_mib(line, kept, compute=False),
        }
    alone: dict[str, list[float]] = {name: [] for name in lines}
    for _ in range(repeats):
        for name, line in lines.items():
            alone[name].append(line.must(lambda line=line: gpu.once_ms(line.step, device), compute=False, steps=1))  # type: ignore[misc]
    for name, line in lines.items():
        row = line.must(
            lambda line=line: gpu.once_ms(lambda: line.steps(repeats), device), compute=False, steps=repeats
        )  # type: ignore[misc]
        found[name] = {"ms": gpu.summary(alone[name]), "in_a_row_ms": round(row / repeats, 3), **found[name]}
    return found


@torch.no_grad()
def measure_computed(course: Course) -> dict[str, Any]:
    """What computed steps take more than bare ones, in pairs; a second bare model shows what is noise."""
    lines: dict[str, Line] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, attach in COMPUTED.items():
        line, before = course.line(), gpu.allocated_bytes(course.device)
        attach(line.model, False)
        line.must(lambda line=line: line.steps(3), compute=True, steps=3)  # type: ignore[misc]
        kept = gpu.allocated_bytes(course.device) - before
        lines[name], found[name] = line, {"peak_mib": course.peak_mib(line, kept, compute=True)}
        line.blocks_ran = 0
    calls = {name: line.step for name, line in lines.items()}
    pairs = gpu.paired_ms(course.line().step, calls, course.device, course.repeats, warm=0)
    for name, line in lines.items():
        if line.blocks_ran != course.repeats:
            raise RuntimeError(f"{name} computed {line.blocks_ran} steps of {course.repeats}, where all should be.")
        found[name]["over_bare_percent"] = gpu.overhead_percent(pairs[name])
    return found


def tuned() -> TeaCacheConfig:
    """What `samovar tune` writes: a schedule, and weights of computed outputs for each skipped one. Which weights does
    not matter to the time."""
    mask = even_mask(STEPS, round(TUNED_SHARE * STEPS))
    known = {step: [old for old in range(step) if mask[old] == "#"][-3:] for step in range(STEPS) if mask[step] == "."}
    rows = {str(step): {str(old): 1 / len(of) for old in of} for step, of in known.items()}
    return TeaCacheConfig(schedule=mask, forecast="fitted", forecast_of="output", forecast_weights={EVERY_BRANCH: rows})


@torch.no_grad()
def measure_runs(course: Course, skip_cost: float) -> Iterator[dict[str, Any]]:
    """Whole runs with the settings of a user, beside what the count of their steps promises. GPUs slow
    down as they get warm, and hosts have other work, so each run is made twice, between rows of bare steps."""
    device = course.device
    bare = Line(course.model, course.run)
    bare.steps(BARE_STEPS)
    by_signal = (TeaCacheConfig(rel_l1_thresh=threshold) for threshold in THRESHOLDS)
    for config in (AutoConfig(1e6), tuned(), *by_signal):
        line = Line(course.model, course.run)
        hook = apply_teacache_hook(line.model, config)
        hook.refresh(line.model, STEPS)
        line.steps(STEPS // 5)  # What is found out about the model once is not the cost of a run.
        bare_ms, ms = [gpu.once_ms(lambda: bare.steps(BARE_STEPS), device)], []
        for _ in range(RUNS):
            hook.refresh(line.model, STEPS)
            line.rewind()
            line.blocks_ran = 0
            ms.append(gpu.once_ms(lambda line=line: line.steps(STEPS), device))  # type: ignore[misc]
            bare_ms.append(gpu.once_ms(lambda: bare.steps(BARE_STEPS), device))
        stats = hook.stats()
        mask = stats.branches["cond"].mask[-STEPS:]
        computed, skipped = mask.count("#"), mask.count(".")
        if (computed, skipped) != (line.blocks_ran, STEPS - line.blocks_ran):
            raise RuntimeError(f"{line.blocks_ran} of {STEPS} steps were computed, but the statistics say:\n{stats}")
        row = {"setting": config.summary(), "computed": computed, "skipped": skipped, "mask": mask}
        row |= {"ms": fmean(ms), "ms_each": [round(one, 1) for one in ms]}
        yield promise(row, fmean(bare_ms) * STEPS / BARE_STEPS, skip_cost)


def promise(row: dict[str, Any], bare_ms: float, skip_cost: float) -> dict[str, Any]:
    """A run beside what its counts promise: with skipped steps for nothing, and at their measured cost."""
    by_count = STEPS / row["computed"]
    with_cost = STEPS / (row["computed"] + skip_cost * row["skipped"])
    measured = bare_ms / row["ms"]
    return row | {
        "ms": round(row["ms"], 1),
        "bare_ms": round(bare_ms, 1),
        "speedup": round(measured, 3),
        "promised_by_counts": round(by_count, 3),
        "promised_with_skip_cost": round(with_cost, 3),
        "off_by_percent": round((measured / with_cost - 1) * 100, 2),
        "off_counts_percent": round((measured / by_count - 1) * 100, 2),
    }


@torch.no_grad()
def profile(course: Course, title: str) -> str:
    """Where the host spends its time on skipped steps."""
    parts = []
    for name in PROFILED:
        line = course.line()
        ALL[name].attach(line.model, True)
        line.steps(ALL[name].first_steps + 3)
        profiler = cProfile.Profile()
        profiler.runcall(line.steps, PROFILED_STEPS)
        for order in ("cumulative", "tottime"):
            text = io.StringIO()
            pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(25)
            parts.append(f"{title}, {name}: {PROFILED_STEPS} skipped steps\n{text.getvalue()}")
    return "\n".join(parts)


# ------------------------------------------------------------------------------------------------ the whole


def prepare(name: str, device: str, tiny: bool, repeats: int) -> tuple[str, Course]:
    """A model's title, and its course."""
    title = gpu.spec(name, tiny=tiny).title
    start = time.perf_counter()
    model = gpu.build(name, device, tiny=tiny)
    gpu.synchronise(device)
    print(f"\n{title}: built in {time.perf_counter() - start:.1f} s")
    walk = trajectory(name, device, tiny, 3 * SKIPS_A_REPEAT * repeats + 2 * PROFILED_STEPS)
    return title, Course(device, model, trajectory(name, device, tiny, STEPS), walk, repeats)


def measure(name: str, device: str, tiny: bool, repeats: int) -> tuple[dict[str, Any], str]:
    """All figures of one model, and its profile."""
    title, course = prepare(name, device, tiny, repeats)
    bare = course.line()
    if not torch.isfinite(torch.no_grad()(bare.step)()[0]).all():
        raise RuntimeError(f"{title} with these random weights gives no finite numbers: its times mean nothing.")
    emptied = course.line()
    emptied.empty()
    without_blocks = gpu.times_ms(emptied.step, device, SKIPS_A_REPEAT * repeats)
    bare_at_start = gpu.times_ms(bare.step, device, max(repeats // 2, 1))
    bare_peak_mib = course.peak_mib(bare, 0, compute=True)
    skipped = measure_skips(course)
    computed = measure_computed(course)
    runs = list(measure_runs(course, skipped[MAIN]["ms"]["median"] / median(bare_at_start)))
    text = profile(course, title)
    bare_at_end = gpu.times_ms(bare.step, device, max(repeats // 2, 1))
    bare_ms = median(bare_at_start + bare_at_end)
    for row in skipped.values():
        row["percent_of_bare"] = round(row["ms"]["median"] / bare_ms * 100, 3)
    result = {
        "title": title,
        "weights_mib": gpu.mib(sum(p.numel() * p.element_size() for p in course.model.parameters())),
        "bare": {"start_ms": gpu.summary(bare_at_start), "end_ms": gpu.summary(bare_at_end), "peak_mib": bare_peak_mib},
        "without_blocks": {
            "ms": gpu.summary(without_blocks),
            "percent_of_bare": round(median(without_blocks) / bare_ms * 100, 3),
        },
        "skipped": skipped,
        "computed": computed,
        "runs": runs,
        "holds": {} if tiny else verdict(name, skipped, computed, runs),
    }
    return result, text


def verdict(name: str, skipped: Mapping[str, Any], computed: Mapping[str, Any], runs: list[Any]) -> dict[str, bool]:
    """Which targets hold, for every way of ours that was measured."""
    most = TARGETS["skip_percent"][name]  # type: ignore[index]
    found = {f"{key}: skipped": skipped[key]["percent_of_bare"] <= most for key in OURS}
    for key in OURS:
        if key in computed:
            found[f"{key}: computed"] = computed[key]["over_bare_percent"]["median"] <= TARGETS["computed_percent"]
    for row in runs:
        found[f"run at {row['setting']}"] = abs(row["off_by_percent"]) <= TARGETS["promise_percent"]
    return found


def show(result: Mapping[str, Any]) -> None:
    bare = result["bare"]
    print(
        f"bare forward {bare['start_ms']['median']:.2f} ms at the start, {bare['end_ms']['median']:.2f} ms at the end"
    )
    floor = result["without_blocks"]
    print(f"the same without any block {floor['ms']['median']:.2f} ms = {floor['percent_of_bare']:.2f} %")
    print(f"{'':36}{'skipped':>22}{'in a row':>12}{'kept':>12}{'computed: over bare':>34}")
    for name in (*result["skipped"], CONTROL):
        line = f"{name:36}"
        skip, computed = result["skipped"].get(name), result["computed"].get(name)
        line += f"{skip['ms']['median']:9.2f} ms ={skip['percent_of_bare']:6.2f} %" if skip else " " * 22
        line += f"{skip['in_a_row_ms']:9.2f} ms{skip['kept_mib']:8.1f} MiB" if skip else " " * 24
        if computed:
            over = computed["over_bare_percent"]
            line += f"{over['median']:+12.2f} % ({over['quarter']:+.2f} to {over['three_quarters']:+.2f})"
        print(line)
    show_runs(result["runs"])
    if result["holds"]:
        missed = [key for key, holds in result["holds"].items() if not holds]
        print(f"targets missed: {'; '.join(missed)}" if missed else "all targets hold")


def show_runs(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(f"{STEPS} steps at {row['setting']}: {row['computed']} computed, {row['skipped']} skipped, "
              f"{row['speedup']:.3f}x; promised {row['promised_with_skip_cost']:.3f}x "
              f"({row['off_by_percent']:+.1f} %), by counts alone {row['promised_by_counts']:.3f}x "
              f"({row['off_counts_percent']:+.1f} %)", flush=True)  # fmt: skip


def measure_only_runs(options: argparse.Namespace, device: str, header: dict[str, Any]) -> None:
    """Whole runs, in place of those in the file. A skipped step costs what the file says."""
    file: Path | None = options.json
    result = json.loads(file.read_text(encoding="utf-8")) if file is not None and file.is_file() else {"models": {}}
    for name in options.models:
        title, course = prepare(name, device, options.tiny, options.repeats)
        known = result["models"].setdefault(name, {"title": title})
        percent = known["skipped"][MAIN]["percent_of_bare"] if "skipped" in known else 0.0
        known["runs"], known["runs_made"] = [], header
        for row in measure_runs(course, percent / 100):
            known["runs"].append(row)
            show_runs([row])
            if file is not None:
                gpu.write(file, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=gpu.NAMES, default=gpu.NAMES)
    parser.add_argument("--repeats", type=int, default=40, help="how often each step is timed")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that it runs, not how fast")
    parser.add_argument("--runs", action="store_true", help="only whole runs")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--profile", type=Path, help="write where the host spends its time on skipped steps here")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    packages = ["cache_dit"] if find_spec("cache_dit") else []
    if options.runs:
        measure_only_runs(options, device, gpu.header(device, *packages))
        return
    result = gpu.header(device, *packages) | {"targets": TARGETS, "models": {}}
    profiles = ""
    for name in options.models:
        result["models"][name], text = measure(name, device, options.tiny, options.repeats)
        show(result["models"][name])
        profiles += text
        if options.json:  # After each model: a run that breaks off leaves what it has.
            gpu.write(options.json, result)
        if options.profile:
            options.profile.parent.mkdir(parents=True, exist_ok=True)
            options.profile.write_text(profiles)


if __name__ == "__main__":
    main()
