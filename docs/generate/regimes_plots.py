"""Plots of quality and gaps in every regime, drawn from what benchmarks/regimes.py and regimes_gaps.py write.

python -m docs.generate.regimes_plots REGIMES.json GAPS.json --output FOLDER    # another file's plots, elsewhere
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.regimes_table import (
    AUTO,
    PLAIN,
    TUNED,
    best_of_others,
    curves,
    kept_by,
    lines_of,
    markdown,
    steps_of,
    times_alone,
    verdict,
)
from docs.generate.results import RESULTS, read
from samovar.core.settings import TOLERANCES

_COLOURS = {AUTO: "#e64a19", TUNED: "#5c6bc0", PLAIN: "#78909c"}
_NAMES = {AUTO: "auto, nothing tuned", TUNED: "tuned", PLAIN: "plain steps"}
_OTHERS = "#455a64"
_CELL = re.compile(r"(\d+)-([\d.]+)-(\w+)-(\w+)")
_EASY, _HARD = "#26a69a", "#e64a19"
IMAGES = "../images"
"""Seen from a page of a section."""
_NEARLY_ALL = 0.95
"""A run that computes more is nearly exact, and its PSNR would squeeze all others."""
_UNKNOWN = """
The curves above are of one regime: 50 steps, guidance 2, Euler. **Others have not been measured** on this model, and
nor has the cache `auto`, so nothing is claimed for them. `python benchmarks/regimes.py` measures them all on a GPU;
[`samovar compare`](../guides/quality.md) measures the one that you use.
"""
_HOW_TO_READ = """
Pairs are captions of the kind that the model was taught; free captions are not. Each panel is one regime.

How to choose with it:

- **Find the panel nearest to what you run.** Guidance matters most: it multiplies what an error does.
- **Nothing tuned?** Look at the line of `auto`: you choose how near images stay, not how many steps are computed. It
  takes steps from images that are easy and gives them to hard ones, so compare its worst image before its mean: a fixed
  rhythm may be ahead in the mean, and lose an image.
- **One model and one number of steps for months?** `samovar tune` takes minutes to hours, once, and holds for the
  regime that it was tuned in and no other. Compare its line with that of `auto` at the count that you can afford.
- **Is the line of the others as high?** Then fewer plain steps do, and there is nothing to attach. It is the best of
  all that compute as many steps or fewer; where it is flat, none of them was measured with more.
- **Read the dots before the lines.** The band reaches to the 5th percentile, the dots are the worst image, and the
  dotted line is the worst image of plain steps and peers. A mean of 50 dB with a worst image of 25 dB means that some
  user gets another image.
"""
_STEPS, _GUIDANCE, _KINDS, _SAMPLERS = ("50", "28", "20"), ("2", "4.5"), ("pairs", "free"), ("euler", "unipc")
_GAPS = """
How many steps `auto` goes from one computed step to the next, for the quarter of images that took the fewest steps and
for the quarter that took the most:
"""
_POINTS = 60
"""Places at which the best of the others is looked up."""


def regimes(result: Mapping[str, Any]) -> Figure:
    """PSNR over computed steps, one panel per cell: the line is the mean, the band reaches to the 5th percentile, the
    dots are the worst image."""
    cells = list(result["cells"])
    columns = list(dict.fromkeys(_parts(cell)[2:] for cell in cells))
    lines = list(dict.fromkeys(_parts(cell)[:2] for cell in cells))
    figure = Figure(figsize=(max(5.5, 3.1 * len(columns)), 0.8 + 2.4 * len(lines)), layout="constrained")
    panels = figure.subplots(len(lines), len(columns), squeeze=False, sharex=True, sharey=True)
    for line, column in itertools.product(range(len(lines)), range(len(columns))):
        steps, guidance = lines[line]
        cell = "-".join((*lines[line], *columns[column]))
        axes = panels[line][column]
        axes.set_title(f"{steps} steps, CFG {guidance}, {', '.join(columns[column])}", fontsize=9)
        axes.set_visible(cell in result["cells"])
        _panel(axes, cell, result["cells"].get(cell, []))
        if column == 0:
            axes.set_ylabel("PSNR, dB")
        if line == len(lines) - 1:
            axes.set_xlabel("computed steps, % of all")
    handles = {}
    for axes in figure.axes:
        handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4 if len(columns) > 2 else 2)
    return figure


def _parts(cell: str) -> tuple[str, ...]:
    found = _CELL.fullmatch(cell)
    assert found is not None, f"{cell} is no cell of benchmarks/regimes.py"
    return found.groups()


def _panel(axes: Any, cell: str, rows: Sequence[Mapping[str, Any]]) -> None:
    steps = steps_of(cell)
    found = curves([row for row in rows if row.get("computed", 0) < _NEARLY_ALL * steps])
    for family in (PLAIN, TUNED, AUTO):
        curve = found.get(family, [])
        if not curve:
            continue
        shares = [100 * row["computed"] / steps for row in curve]
        means, lows = ([row[name] for row in curve] for name in ("psnr", "psnr_5th"))
        colour, is_ours = _COLOURS[family], family != PLAIN
        axes.plot(shares, means, "o-" if is_ours else "--", color=colour, markersize=3, label=_NAMES[family])
        if is_ours:
            axes.fill_between(shares, lows, means, color=colour, alpha=0.15, linewidth=0)
            axes.plot(shares, [row["psnr_worst"] for row in curve], ".", color=colour, markersize=4)
    places = [steps * number / _POINTS for number in range(1, _POINTS)]
    bests = {place: best for place in places if (best := best_of_others(found, place)) is not None}
    shares = [100 * place / steps for place in bests]
    axes.plot(
        shares, [best.point.psnr for best in bests.values()], color=_OTHERS, label="best of plain steps and peers"
    )
    axes.plot(shares, [best.point.psnr_worst for best in bests.values()], ":", color=_OTHERS, linewidth=1)


def gaps(result: Mapping[str, Any]) -> Figure:
    """How many steps `auto` goes on before it computes again, along the run; and what each image took."""
    runs = sorted(result["runs"], key=lambda run: run["computed"])
    share = max(1, len(runs) // 4)
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for kind, colour, of in (("easiest", _EASY, runs[:share]), ("hardest", _HARD, runs[-share:])):
        steps = len(of[0]["mask"])
        by_image = [gaps_of(run["mask"]) for run in of]
        means = [fmean(image[step] for image in by_image) for step in range(steps)]
        low, high = ([pick(image[step] for image in by_image) for step in range(steps)] for pick in (min, max))
        left.step(range(steps), means, where="mid", color=colour, label=f"the {len(of)} {kind} images")
        left.fill_between(range(steps), low, high, step="mid", color=colour, alpha=0.15, linewidth=0)
    left.set(xlabel="step", ylabel="steps from one computed to the next", ylim=(0, None))
    left.legend()
    shades = [_EASY if n < share else _HARD if n >= len(runs) - share else "#b0bec5" for n in range(len(runs))]
    right.bar(range(len(runs)), [run["computed"] for run in runs], 0.8, color=shades)
    right.set(xlabel="images, the easiest first", ylabel=f"computed of {len(runs[0]['mask'])} steps", xticks=[])
    return figure


def gaps_of(mask: str) -> list[int]:
    """At each step, the length of the gap that it is in: from the last computed step to the next, or to the end."""
    starts = [step for step, sign in enumerate(mask) if sign == "#"]
    found: list[int] = []
    for start, end in itertools.pairwise([*starts, len(mask)]):
        found += [end - start] * (end - start)
    return found


def section(_: str) -> str:
    """What a page shows of the regimes: how to read them, the plots and the table, where they are measured."""
    if not (RESULTS / "regimes.json").is_file():
        return _UNKNOWN.strip()
    parts = [_HOW_TO_READ, f"![PSNR over computed steps in every regime]({IMAGES}/plot-regimes.svg)"]
    if (RESULTS / "regimes_gaps.json").is_file():
        parts += [_GAPS, f"![The gap over the run, for easy and for hard images]({IMAGES}/plot-gaps.svg)"]
    result = read("regimes")
    parts += [_missing(result["cells"]), markdown(result), kept_by(TOLERANCES["high"], result)]
    if (RESULTS / "regimes_last.json").is_file():
        parts.append(_last(read("regimes_last")))
    if (RESULTS / "regimes_alone.json").is_file():
        parts.append(_alone(read("regimes_alone")))
    return "\n\n".join(part.strip() for part in parts if part)


def _alone(result: Mapping[str, Any]) -> str:
    """What counts are worth in time."""
    device = "a CPU with two cores" if result["device"] == "x86_64" else result["device"]
    return (
        f"**In time**: {result['images']} images made one at a time on {device}, {', '.join(result['cells'])}. What a "
        "speed-up is of what the counts promise, for the settings of each method; times of the same setting differ by "
        f"up to 20 %, so read the medians:\n\n| method | median | range |\n|---|---|---|\n{times_alone(result)}"
    )


def _last(result: Mapping[str, Any]) -> str:
    """What captions say that were kept until everything was chosen."""
    cells = result["cells"]
    return (
        "**The last run** is on captions that nothing was chosen by, kept until the end, with all peers: "
        f"{len(cells)} cells, {result['images']} images in each. {verdict('auto', lines_of(cells))} "
        f"{kept_by(TOLERANCES['high'], result)}"
    )


def _missing(cells: Collection[str]) -> str:
    """Which of all regimes were not measured."""
    every = ["-".join(cell) for cell in itertools.product(_STEPS, _GUIDANCE, _KINDS, _SAMPLERS)]
    missing = [cell for cell in every if cell not in cells]
    if not missing:
        return ""
    kinds = {_parts(cell)[2] for cell in missing}
    is_whole = len(kinds) == 1 and len(missing) == len(every) // len(_KINDS)
    what = f"all with {kinds.pop()} captions" if is_whole else ", ".join(missing)
    return f"**{len(missing)} of {len(every)} regimes have not been measured yet: {what}.**"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("regimes", type=Path)
    parser.add_argument("gaps", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, default=Path(), metavar="FOLDER")
    options = parser.parse_args(arguments)
    from matplotlib import rc_context

    from docs.generate.plots import STYLE

    for file, draw in ((options.regimes, regimes), (options.gaps, gaps)):
        if file is not None:
            with rc_context(STYLE):
                figure = draw(json.loads(file.read_text(encoding="utf-8")))
                figure.savefig(options.output / f"plot-{draw.__name__}.svg", facecolor="white")


if __name__ == "__main__":
    main()
