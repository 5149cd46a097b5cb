"""Every plot of the site, and the one at the top of the README.

python -m docs.generate.plots    # writes docs/images/headline.svg, which the README shows
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from docs.generate import regimes_plots, tables
from docs.generate.results import RESULTS, read

IMAGES = Path(__file__).parents[1] / "images"
OURS, OURS_TOO, PEERS = "#e64a19", "#ffab91", ("#455a64", "#78909c", "#5c6bc0", "#8d6e63", "#26a69a", "#9e9d24")
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.hashsalt": "samovar",
}


_REGIME = "built-in model at 50 steps, guidance 2"
_LEAST_LPIPS = 5e-6
"""Lower ones are drawn here, as the axis is logarithmic."""


def headline() -> Figure:
    """Memory against time, and quality against computed steps."""
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        _budget(left)
        _psnr(
            right,
            peers=("diffusers TaylorSeer lite", "diffusers FirstBlockCache", "cache-dit DBCache", "plain steps"),
            ours=("samovar schedule",),
        )
        left.set_title("FLUX.1 12B within a memory budget (H200)")
        right.set_title(f"Image quality, {_REGIME}")
        return figure


def budget() -> Figure:
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        _budget(left)
        _budget(right, "qwen", "qwen-peers")
        left.set_title("FLUX.1 12B")
        right.set_title("Qwen-Image 20B")
        return figure


def quality() -> Figure:
    families = list(dict.fromkeys(row["family"] for row in read("quality")["rows"]))
    ours = [family for family in families if family.startswith("samovar")]
    peers = [family for family in families if family not in (*ours, "exact", "diffusers SeaCache")]
    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 5.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _psnr(left, peers=peers, ours=ours)
        _psnr(right, peers=peers, ours=ours, metric="lpips")
        left.set_title(f"PSNR, {_REGIME}")
        right.set_title(f"LPIPS, {_LEAST_LPIPS:g} and less drawn alike")
        left.get_legend().remove()
        right.get_legend().remove()
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return figure


def skipped() -> Figure:
    """What a skipped step costs."""
    models = read("gpu_cache")["models"]
    names = list(models["flux"]["skipped"])
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 3.8), layout="constrained")
        axes = figure.subplots()
        for number, model in enumerate(models.values()):
            values = [model["skipped"][name]["percent_of_bare"] for name in names]
            places = [row + 0.38 * number for row in range(len(names))]
            shades = [(OURS, OURS_TOO) if name.startswith("samovar") else PEERS[:2] for name in names]
            bars = axes.barh(places, values, 0.36, color=[shade[number] for shade in shades])
            axes.bar_label(bars, [f"{value:.1f} %  {model['title']}" for value in values], padding=3, fontsize=8)
        axes.set_yticks([row + 0.19 for row in range(len(names))], names)
        axes.invert_yaxis()
        axes.set_xlim(0, 4.6)
        axes.set_xlabel("cost of a skipped step, % of a full forward (lower is better)")
        axes.grid(visible=False, axis="y")
        return figure


def combined() -> Figure:
    """Time and peak of combinations."""
    found = read("gpu_compose")["flux"]["contestants"]
    with rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        for name, row in found.items():
            is_cached = name.startswith("cache")
            axes.scatter(row["peak_gib"], row["s"], s=55, color=OURS if is_cached else PEERS[0], zorder=3)
            shift = -10 if name.endswith("+ compile") else 3  # Beside the same without compile.
            axes.annotate(
                tables.titled(name), (row["peak_gib"], row["s"]), (7, shift), textcoords="offset points", fontsize=8
            )
        axes.set_xlim(0, 40)
        axes.set_ylim(0)
        axes.set_xlabel("peak GPU memory, GiB")
        axes.set_ylabel("seconds for one prompt, 20 steps")
        return figure


def _budget(axes: Any, model: str = "flux", peers: str = "peers") -> None:
    result = read("gpu_offload")
    found, resident = result[model], result[model]["resident"]
    before = [found["before"]["least"], *tables.allowed(found["before"]["curve"]), resident]
    now = [found["least"], *tables.allowed(found["curve"]), found["ahead"]]
    for points, style, label in (
        (now, {"color": OURS, "linewidth": 2}, "Samovar, any budget"),
        (before, {"color": OURS_TOO, "linewidth": 1.5}, "without computing ahead and compression"),
    ):
        points = sorted(points, key=lambda point: point["peak_gib"])
        axes.plot([p["peak_gib"] for p in points], [p["ms"] for p in points], "o-", markersize=4, label=label, **style)
    if peers in result:
        axes.plot(
            result[peers]["group_peak_gib"],
            result[peers]["group_ms"],
            "^",
            color=PEERS[0],
            markersize=8,
            linestyle="none",
            label="diffusers group offload",
        )
    axes.axhline(resident["ms"], color="#999999", linestyle=":", linewidth=1)
    axes.annotate(
        "all weights on the GPU",
        (resident["peak_gib"], resident["ms"]),
        (0, -12),
        textcoords="offset points",
        fontsize=8,
        ha="right",
        color="#666666",
    )
    axes.set_xlim(0)
    axes.set_ylim(0)
    axes.set_xlabel("peak GPU memory, GiB")
    axes.set_ylabel("one step, ms")
    axes.legend(loc="lower left")


def _psnr(axes: Any, *, peers: Any, ours: Any, metric: str = "psnr") -> None:
    rows = [row for row in read("quality")["rows"] if "problem" not in row]
    shades = dict(zip(ours, (OURS, "#ff7043", "#ffb74d"), strict=False)) | dict(zip(peers, PEERS, strict=False))
    for family in (*ours, *peers):
        points = sorted(
            (row for row in rows if row["family"] == family and row["computed"] < 50), key=lambda row: -row["computed"]
        )
        values = [max(row[metric], _LEAST_LPIPS) for row in points]
        is_ours = family in ours
        axes.plot(
            [50 / row["computed"] for row in points],
            values,
            "o-" if is_ours else "^--",
            color=shades[family],
            linewidth=2 if is_ours else 1.2,
            markersize=4,
            label=family,
        )
    axes.set_xlabel("times fewer computed steps")
    axes.set_ylabel("PSNR to the exact image, dB" if metric == "psnr" else "LPIPS (lower is closer)")
    if metric == "lpips":
        axes.set_yscale("log")
    axes.legend()


PLOTS: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "headline": (headline, ("gpu_offload", "quality")),
    "plot-budget": (budget, ("gpu_offload",)),
    "plot-quality": (quality, ("quality",)),
    "plot-skipped": (skipped, ("gpu_cache",)),
    "plot-combined": (combined, ("gpu_compose",)),
}
"""Each plot by the name of its file, with the results that it shows."""
_LATER = {"plot-regimes": (regimes_plots.regimes, "regimes"), "plot-gaps": (regimes_plots.gaps, "regimes_gaps")}
for _plot, (_draw, _name) in _LATER.items():
    if (RESULTS / f"{_name}.json").is_file():  # They are measured apart from the others.
        PLOTS[_plot] = (lambda draw=_draw, name=_name: draw(read(name))), (_name,)


def origin(names: Sequence[str]) -> str:
    """What a plot's file says about the results that it was drawn from."""
    digest = hashlib.sha256(b"".join((RESULTS / f"{name}.json").read_bytes() for name in names))
    return f"{', '.join(names)}: {digest.hexdigest()[:16]}"


def to_svg(name: str) -> str:
    """The plot on white, so that it is readable on a dark page too."""
    draw, names = PLOTS[name]
    text = io.StringIO()
    with rc_context(STYLE):
        draw().savefig(text, format="svg", facecolor="white", metadata={"Date": None, "Source": origin(names)})
    return text.getvalue()


if __name__ == "__main__":
    for plot in PLOTS:
        (IMAGES / f"{plot}.svg").write_text(to_svg(plot), encoding="utf-8")
