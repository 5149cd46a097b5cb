"""What do the curves look like? PSNR and LPIPS over how much less is computed, drawn from a result that was saved.

Steps are counted, so that the curves are the same on every machine and in every batch; times stand in the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingError

LEAST_LPIPS = 5e-6
"""What is less is drawn here: a logarithmic axis has no place for zero, nor for what was rounded to it."""


def draw(rows: Sequence[Mapping[str, Any]], file: Path, title: str) -> None:
    """Write a picture of rows as `Row.to_dict` gives them. Of each family one curve; a row with a problem has none."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingError(
            "Curves are drawn by matplotlib, which is not installed: pip install 'samovar[lab]'. The figures are in "
            "the JSON file, from which they can be drawn elsewhere: samovar bench --plot-from FILE."
        ) from error
    drawn = [row for row in rows if "problem" not in row and row["family"] != "exact"]
    if not drawn:
        raise SettingError("There is nothing to draw: no row has figures.")
    figure = Figure(figsize=(12, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = max(row["computed"] for row in rows if "problem" not in row)  # Those of the exact pictures.
    families = list(dict.fromkeys(row["family"] for row in drawn))
    for number, family in enumerate(families):
        points = sorted((row for row in drawn if row["family"] == family), key=lambda row: -float(row["computed"]))
        savings = [steps / row["computed"] for row in points]
        is_ours = family.startswith("samovar")
        style: dict[str, Any] = {
            "color": f"C{number % 10}", "marker": "o" if is_ours else "s" if family == "plain steps" else "^",
            "linewidth": 2.2 if is_ours else 1.2, "linestyle": "-" if is_ours else "--", "markersize": 5,
        }  # fmt: skip
        left.plot(savings, [row["psnr"] for row in points], label=family, **style)
        right.plot(savings, [max(row["lpips"], LEAST_LPIPS) for row in points], **style)
    left.set_ylabel("PSNR, dB (higher is nearer)")
    right.set_ylabel("LPIPS (lower is nearer)")
    right.set_yscale("log")
    for axes in (left, right):
        axes.set_xlabel("times fewer computed steps")
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    figure.savefig(file, dpi=130)
