"""Our settings, fewer plain steps and other caches, on the same prompts, seeds and attention.

    python benchmarks/caches.py emoji --steps 50 --device cuda --dtype float32 --batch 64 --json out/caches.json
    python benchmarks/caches.py ./flux --prompts mine.txt --test-prompts others.txt --json flux.json --plot flux.png

Schedules are planned on the first list of prompts, everything is measured on the other. Caches of diffusers and
cache-dit take part if they are installed, with the settings that their authors recommend, and weaker and stronger ones
around them. What is done is kept beside the result until the end, so that an interrupted run goes on.

A method that decides by the image makes each image alone, as in normal use. Curves show counted steps, which are the
same on every machine.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import io
import json
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from samovar.arch import find_anatomy, find_denoisers
from samovar.arch.modules import unwrapped
from samovar.core.errors import ModelError, SamovarError, SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Method, Runner, Session, Task, cached, make_tasks, plain, read_prompts
from samovar.lab.methods import EXACT, PLAIN, Report
from samovar.lab.planner import FEWEST, Planner
from samovar.lab.progress import Progress
from samovar.lab.tasks import check_disjoint

PeerSettings = dict[str, Any]


class PeerGuard(AbstractContextManager["PeerGuard"]):
    """Keeps an error of a peer, which may raise anything on a model that it does not know, and lets ours pass."""

    def __init__(self, method: Method) -> None:
        self._is_peer = method.family not in (EXACT.family, PLAIN) and not method.family.startswith("samovar")
        self.problem: str | None = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not (self._is_peer and isinstance(error, Exception)):
            return False
        self.problem = textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        return True


def peers(runner: Runner, tasks: Sequence[Task]) -> list[Method]:
    """All that are installed. MagCache needs figures of the model, which it measures on these tasks when it is used."""
    import diffusers

    dtype = functools.partial(getattr, next(next(iter(runner.denoisers.values())).parameters()), "dtype")
    ratios = functools.cache(lambda: _mag_ratios(runner, tasks))
    found: list[Method] = []
    settings: PeerSettings

    def add(
        family: str, config: str, name: str, settings: PeerSettings, is_adaptive: bool = False, **more: Any
    ) -> None:
        if config in dir(diffusers):
            found.append(_of_diffusers(f"diffusers {family}", config, name, settings, is_adaptive, **more))

    for threshold in (0.03, 0.05, 0.08, 0.12, 0.2):
        add("FirstBlockCache", "FirstBlockCacheConfig", f"{threshold}", {"threshold": threshold}, True)
    for interval in (2, 3, 4, 5, 6):
        settings = {"cache_interval": interval, "disable_cache_before_step": 4, "max_order": 1, "use_lite_mode": True}
        # Factors in the model's own dtype can only help it.
        add("TaylorSeer lite", "TaylorSeerCacheConfig", f"every {interval}", settings, taylor_factors_dtype=dtype)
    for threshold, most in ((0.06, 3), (0.12, 3), (0.24, 4), (0.5, 5)):
        settings = {"threshold": threshold, "max_skip_steps": most, "num_inference_steps": runner.steps}
        add("MagCache", "MagCacheConfig", f"{threshold}, at most {most}", settings, mag_ratios=ratios)
    # With its defaults. It needs pipelines that pass it step and noise level; with others it computes everything.
    add("SeaCache", "SeaCacheConfig", "default", {}, True)
    if find_spec("cache_dit") is not None:
        found += [_of_cache_dit(threshold, order) for order in (0, 1) for threshold in (0.05, 0.08, 0.12, 0.2)]
    return found


def _of_diffusers(
    family: str, config: str, name: str, settings: PeerSettings, is_adaptive: bool, **more: Callable[[], Any]
) -> Method:
    """`more` are arguments that are computed when the cache is attached."""

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Report]:
        import diffusers

        values = {key: value() for key, value in more.items()}
        with contextlib.ExitStack() as undo:
            for denoiser in find_denoisers(pipeline).values():
                undo.callback(_disable, denoiser)
                denoiser.enable_cache(getattr(diffusers, config)(**settings, **values))  # type: ignore[operator]
            yield undo.enter_context(counted(pipeline))

    return Method(f"{family} {name}", family, settings, attached, is_adaptive=is_adaptive)


@contextlib.contextmanager
def counted(pipeline: Any) -> Iterator[Report]:
    """The share of forwards that another library's cache computes: those that run the last layer of the second block,
    as some caches always run the first."""
    calls, computed = 0, 0

    def call(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def compute(*_: Any) -> None:
        nonlocal computed
        computed += 1

    def report() -> dict[str, Any]:
        nonlocal calls, computed
        share, calls, computed = computed / max(1, calls), 0, 0
        return {"computed": share}

    with contextlib.ExitStack() as undo:
        for denoiser in map(unwrapped, find_denoisers(pipeline).values()):
            stacks = [stack for stack in find_anatomy(denoiser).stacks if len(stack) > 1]
            block = stacks[0].modules(denoiser)[1] if stacks else torch.nn.Identity()
            layers = [module for module in block.modules() if isinstance(module, torch.nn.Linear)]
            if not layers:
                raise ModelError(f"{type(denoiser).__name__} has no blocks with linear layers to count steps by.")
            undo.callback(denoiser.register_forward_pre_hook(call).remove)
            undo.callback(layers[-1].register_forward_pre_hook(compute).remove)
        yield report


def _disable(denoiser: Any) -> None:
    if getattr(denoiser, "is_cache_enabled", False):  # After refused settings it is off.
        denoiser.disable_cache()


def _mag_ratios(runner: Runner, tasks: Sequence[Task]) -> list[float]:
    """The ratios of the first branch, which MagCache prints when it calibrates."""
    settings = {"calibrate": True, "num_inference_steps": runner.steps}
    method = _of_diffusers("diffusers MagCache", "MagCacheConfig", "calibration", settings, False)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), runner.under(method) as make:
        make(tasks)
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("[") and line.endswith("]")]
    if not lines:
        raise ModelError(f"MagCache printed no ratios for {len(tasks)} images of {runner.steps} steps.")
    ratios: list[float] = ast.literal_eval(lines[0])
    return ratios


def _of_cache_dit(threshold: float, order: int) -> Method:
    family = f"cache-dit DBCache{' + Taylor' if order else ''}"
    settings = {
        "Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 4, "residual_diff_threshold": threshold,
        "enable_separate_cfg": True,
    }  # fmt: skip

    @contextlib.contextmanager
    def attached(pipeline: Any) -> Iterator[Report]:
        import cache_dit  # type: ignore[import-not-found, import-untyped, unused-ignore]

        for logger in [name for name in logging.root.manager.loggerDict if name.startswith("cache_dit")]:
            logging.getLogger(logger).setLevel(logging.ERROR)
        calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order) if order else None
        try:
            # It may have changed the pipeline before it fails.
            cache_dit.enable_cache(
                pipeline, cache_config=cache_dit.DBCacheConfig(**settings), calibrator_config=calibrator
            )
            with counted(pipeline) as report:
                yield report
        finally:
            cache_dit.disable_cache(pipeline)

    about = {**settings, "taylorseer_order": order}
    return Method(f"{family} {threshold}", family, about, attached, is_adaptive=True)


PLAIN_SHARES = (0.66, 0.5, 0.4, 0.32, 0.24, 0.2)
"""Plain steps, as shares of the exact number."""
SCHEDULE_SHARES = (0.54, 0.4, 0.32, 0.24, 0.2)
"""Computed steps of our schedules, likewise."""
TOLERANCES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
_LOWEST_LPIPS = 5e-6
"""Lower values are drawn here: a logarithmic axis has no zero."""


def all_methods(tuning: Session, extra: Sequence[Method] = (), only: Sequence[str] = ()) -> list[Method]:
    """Everything that the bench compares, or only methods whose names contain one of some words. Schedules and figures
    of the model are taken from the tuning prompts."""
    runner, planner = tuning.runner, Planner(tuning)
    methods = [
        *(plain(max(1, round(share * runner.steps))) for share in PLAIN_SHARES),
        *(cached("auto", {"tolerance": tolerance}) for tolerance in TOLERANCES),
        *(cached("tea_cache", {"rel_l1_thresh": threshold}) for threshold in (0.1, 0.2, 0.4)),
        *extra,
        *peers(runner, tuning.tasks[: runner.batch]),
    ]
    found: dict[str, Method | int] = {method.name: method for method in methods}
    for count in sorted({max(FEWEST, round(share * runner.steps)) for share in SCHEDULE_SHARES}):
        found[f"schedule, {count} computed"] = count  # Planned only if it is chosen.
    for word in only:
        if not any(word.lower() in name.lower() for name in found):
            raise SettingError(f"only={word!r} matches no method. Methods: {', '.join(found)}.", param="only")
    chosen = {n: m for n, m in found.items() if not only or any(word.lower() in n.lower() for word in only)}
    return [m if isinstance(m, Method) else dataclasses.replace(planner.method(m), name=n) for n, m in chosen.items()]


def bench(session: Session, methods: Sequence[Method]) -> list[dict[str, Any]]:
    """One row per method, for JSON. If a peer fails, or images are not finite, the row says so; errors of our own are
    raised."""
    session.progress.expect(session.work([EXACT, *methods]))
    rows: list[dict[str, Any]] = [session.exact().to_dict()]
    for method in methods:
        with PeerGuard(method) as guard:
            row = session.measure(method)
            bad = sum(not quality.is_finite for quality in row.images)
        problem = guard.problem or (f"{bad} images are not finite, so they cannot be compared" if bad else None)
        if problem is not None:
            rows.append({"method": method.name, "family": method.family, "problem": problem})
        else:
            rows.append(row.to_dict())
    mark_best(rows)
    return rows


def mark_best(rows: list[dict[str, Any]]) -> None:
    """Mark the rows that no other row beats with as few computed steps, by PSNR and by LPIPS."""
    measured = [row for row in rows if "problem" not in row and row["family"] != "exact"]
    for row in measured:
        rivals = [other for other in measured if other is not row and other["computed"] <= row["computed"]]
        row["is_best_by_psnr"] = not any(other["psnr"] > row["psnr"] for other in rivals)
        row["is_best_by_lpips"] = not any(other["lpips"] < row["lpips"] for other in rivals)


def draw(rows: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Plot PSNR and LPIPS over saved steps, from rows that `bench` returned; one curve per family."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError("Plots need matplotlib: pip install '.[lab]'.") from error
    drawn = [row for row in rows if "problem" not in row and row["family"] != "exact"]
    if not drawn:
        raise SettingError("There is nothing to plot: no row has figures.")
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = max(row["computed"] for row in rows if "problem" not in row)  # Those of the exact images.
    for number, family in enumerate(dict.fromkeys(row["family"] for row in drawn)):
        points = sorted((row for row in drawn if row["family"] == family), key=lambda row: -float(row["computed"]))
        savings = [steps / row["computed"] for row in points]
        is_ours = family.startswith("samovar")
        style: dict[str, Any] = {
            "color": f"C{number % 10}", "marker": "o" if is_ours else "s" if family == "plain steps" else "^",
            "linewidth": 2.2 if is_ours else 1.2, "linestyle": "-" if is_ours else "--", "markersize": 5,
        }  # fmt: skip
        left.plot(savings, [row["psnr"] for row in points], label=family, **style)
        right.plot(savings, [max(row["lpips"], _LOWEST_LPIPS) for row in points], **style)
    left.set_ylabel("PSNR, dB (higher is closer)")
    right.set(ylabel="LPIPS (lower is closer)", yscale="log")
    for axes in (left, right):
        axes.set_xlabel("times fewer computed steps")
        axes.grid(alpha=0.3)
    for text in left.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
    figure.suptitle(title, fontsize=11, parse_math=False)  # A name may have dollar signs, and is no formula.
    figure.savefig(file, dpi=130)


# ------------------------------------------------------------------------------------------------ command


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="emoji", help="a built-in model or a folder (emoji)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the result goes")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves here")
    parser.add_argument("--only", metavar="WORDS", action="append", default=[], help="methods whose name contains this")
    parser.add_argument("--steps", type=int, help="(the model's)")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--prompts", default="tuning", metavar="FILE", help="to plan schedules on, one per line")
    parser.add_argument("--test-prompts", default="testing", metavar="FILE", help="to measure on")
    parser.add_argument("--num-prompts", type=int, default=48, metavar="N", help="(48)")
    parser.add_argument("--num-test-prompts", type=int, default=64, metavar="N", help="(64)")
    parser.add_argument("--test-seeds", type=int, default=4, metavar="N", help="images of each prompt (4)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="images per call (1)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device")
    parser.add_argument("--gpu-memory", metavar="SIZE")
    return parser


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The result, as it is written."""
    sizes = {"num_inference_steps": options.steps, "height": options.height, "width": options.width}
    params = OmniDiffusionSamplingParams(**{name: value for name, value in sizes.items() if value is not None})
    budget = {} if options.gpu_memory is None else {"gpu_memory": options.gpu_memory}
    runner = Runner(options.model, params, options.batch, options.dtype, options.device, **budget)
    planning = make_tasks(read_prompts(options.prompts)[: options.num_prompts], 1, 0)
    testing = make_tasks(read_prompts(options.test_prompts)[: options.num_test_prompts], options.test_seeds, 100_000)
    check_disjoint(planning, testing)
    about = {**runner.about(), "planning": planning, "testing": testing}
    journal = Journal(options.json.with_suffix(".state"), about)

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    methods = all_methods(Session(runner, planning, journal, "tuning", Progress(report)), only=options.only)
    rows = bench(Session(runner, testing, journal, "testing", Progress(report)), methods)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"about": about, "rows": rows}) + "\n", encoding="utf-8")
    journal.delete()
    return {"about": runner.about(), "rows": rows}


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    try:
        result = measure(options)
        if options.plot is not None:
            about = result["about"]
            draw(result["rows"], options.plot, f"{about['model']}, {about['dtype']}, {about['device']}")
    except SamovarError as error:
        print(error, file=sys.stderr)
        return 2
    for row in result["rows"]:
        figures = row.get("problem") or f"{row['computed']:6.2f} {row['psnr']:6.2f} dB {row['lpips']:.5f}"
        print(f"{row['method'][:70]:70} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
