"""Whose curve is better? Our settings and other caches, on the same prompts, seeds and attention, in one process.

An adaptive method decides for a batch as one, but for each image alone in normal use. So some images are also made one
at a time, and both figures are reported. A fixed rhythm or schedule treats an image the same in any batch, up to
rounding. Curves show counted steps, which are the same on every machine and for any batch; times are in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.errors import SettingError
from .closed_loop import PASSES
from .methods import EXACT, Method, cached, plain
from .peers import PeerGuard, peers
from .schedules import SchedulePlanner, choose_planner, refine
from .session import Row, Session

PLAIN_SHARES = (0.66, 0.5, 0.4, 0.32, 0.24, 0.2)
"""Plain steps, as shares of the exact number."""
SCHEDULE_SHARES = (0.54, 0.4, 0.32, 0.24, 0.2)
"""Computed steps of our schedules, likewise."""
TOLERANCES = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
_LOWEST_LPIPS = 5e-6
"""Lower values are drawn here: a logarithmic axis has no zero."""


def all_methods(
    tuning: Session,
    extra: Sequence[Method] = (),
    refinements: int = 0,
    only: Sequence[str] = (),
    testing: Session | None = None,
) -> list[Method]:
    """Everything that the bench compares, or only methods whose names contain one of some words. Schedules and figures
    of the model are taken from the tuning prompts; `refinements` is the number of changes of each schedule to try, and
    `testing` will measure the methods, for an estimate of the time."""
    runner = tuning.runner
    methods = [
        *(plain(max(1, round(share * runner.steps))) for share in PLAIN_SHARES),
        *(cached("auto", {"tolerance": tolerance}) for tolerance in TOLERANCES),
        *(cached("forecast", {"rel_l1_thresh": threshold}) for threshold in (0.2, 0.4, 0.8)),
        *(cached("tea_cache", {"rel_l1_thresh": threshold}) for threshold in (0.1, 0.2, 0.4)),
        *extra,
        *peers(runner, runner.batches(tuning.tasks)[0]),
    ]
    found: dict[str, Method | int] = {method.name: method for method in methods}
    for count in sorted({max(SchedulePlanner.fewest, round(share * runner.steps)) for share in SCHEDULE_SHARES}):
        found[f"schedule, {count} computed"] = count  # Planned only if it is chosen.
    for word in only:
        if not any(word.lower() in name.lower() for name in found):
            raise SettingError(f"only={word!r} matches no method. Methods: {', '.join(found)}.", param="only")
    chosen: list[Method | int] = [
        m for name, m in found.items() if not only or any(word.lower() in name.lower() for word in only)
    ]
    fitted = (2 * PASSES + refinements + 3) * len(tuning.tasks)  # For two schedules in closed loop.
    planning = fitted * sum(isinstance(method, int) for method in chosen)
    if testing is not None:
        tuning.progress.expect(planning=planning, measuring=testing.work([EXACT] * len(chosen)))
    return [method if isinstance(method, Method) else _planned(tuning, method, refinements) for method in chosen]


def _planned(tuning: Session, count: int, refinements: int) -> Method:
    """The best schedule for a number of computed steps."""
    planner, _ = choose_planner(tuning, lambda row: row.closeness, count)
    mask = refine(planner.plan(count), lambda m: tuning.measure(planner.method(m)).closeness, refinements)
    return cached("tea_cache", planner.settings(mask), f"schedule, {count} computed", "samovar schedule")


def bench(session: Session, methods: Sequence[Method], alone: Session | None = None) -> list[dict[str, Any]]:
    """One row per method, for JSON. If a peer fails, or images are not finite, the row says so; errors of our own are
    raised. `alone` makes some of the images again one at a time, with adaptive methods."""
    session.progress.expect(all=session.work([plain(session.runner.steps), *methods]))
    rows: list[dict[str, Any]] = [session.exact().to_dict()]
    for method in methods:
        with PeerGuard(method) as guard:
            row = session.measure(method)
            single = alone.measure(method) if alone is not None and method.is_adaptive else None
            qualities = [*row.images, *(single.images if single is not None else ())]
            bad = sum(not quality.is_finite for quality in qualities)
        problem = guard.problem or (f"{bad} images are not finite, so they cannot be compared" if bad else None)
        if problem is not None:
            rows.append({"method": method.name, "family": method.family, "problem": problem})
        else:
            rows.append(row.to_dict() | ({} if single is None else {"alone": _beside(single, row)}))
    mark_best(rows)
    return rows


def _beside(alone: Row, together: Row) -> dict[str, Any]:
    """The same images made alone and in a batch."""
    count = len(alone.images)
    same = together.images[:count]
    return {
        "images": count,
        "computed": alone.computed,
        "psnr": round(alone.quality.psnr, 3),
        "lpips": round(alone.quality.lpips, 7),
        "psnr_in_batch": round(sum(quality.psnr for quality in same) / count, 3),
        "lpips_in_batch": round(sum(quality.lpips for quality in same) / count, 7),
    }


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
        raise SettingError(
            "Plots need matplotlib: pip install 'samovar[lab]'. Or plot the JSON file elsewhere: samovar "
            "bench --plot-from FILE."
        ) from error
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
