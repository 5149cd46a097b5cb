"""The figures that the documentation shows of quantised weights, as planned and as measured."""

from __future__ import annotations

import functools
from typing import Any

from docs.generate.results import TITLES, about, markdown_table, read, time_and_peak


@functools.cache
def choices(_: str) -> str:
    """What each kind takes of FLUX within some budgets, as the planner says."""
    from samovar.arch.quantised import KINDS
    from samovar.offload import OffloadConfig, format_bytes, read_parts
    from samovar.offload.quantization_choice import EXACT, Ladder
    from samovar.trace.activations import read_activations
    from samovar.trace.dry_run import RequestSize

    source = "FluxTransformer2DModel"
    parts = read_parts(source)
    seen = read_activations(source, parts, RequestSize(1024, 1024))
    budgets = ("24GiB", "12GiB", "6GiB", "3GiB")
    ladders = [Ladder(parts, seen, OffloadConfig(gpu_memory=budget)) for budget in budgets]
    rows = []
    for name in (EXACT, *KINDS):
        rungs = [ladder.rung(name) for ladder in ladders]
        cells = [format_bytes(rung.bus_bytes) for rung in rungs]
        rows.append([name, format_bytes(rungs[0].weight_bytes), *cells])
    return markdown_table(["weights", "size", *(f"within {budget}" for budget in budgets)], rows)


def quality(_: str) -> str:
    """What quantised weights do to the images of the built-in model, beside a cache and fewer steps."""
    result = read("quantised_quality")
    rows = [
        [
            row["method"],
            f"{row['computed']:g} of {row['steps']}",
            f"{row['psnr']:.1f}",
            f"{min(row['each']['psnr']):.0f}",
            f"{row['lpips']:.5f}",
        ]
        for row in result["rows"]
        if row["family"] != "exact"
    ]
    table = markdown_table(["", "steps computed", "PSNR, dB", "worst image, dB", "LPIPS"], rows)
    return f"{table}\n\n{about('quantised_quality')}"


def gpu(model: str) -> str:
    """Quantised weights of a model on a GPU: resident, in the least memory, and by diffusers' group offload."""
    rows = [
        [
            kind,
            time_and_peak(row["resident"]),
            time_and_peak(row["least_measured"]),
            time_and_peak(row["within"][0]),
            _peer(row["group_offload"]),
            "yes" if row["same_bits"] else "**no**",
        ]
        for kind, row in read("gpu_quantised")[model].items()
    ]
    head = [TITLES[model], "all on the GPU", "least memory", "within 2 GiB", "diffusers group offload", "same bits"]
    return f"{markdown_table(head, rows)}\n\n{about('gpu_quantised')}"


def _peer(group: dict[str, Any]) -> str:
    return time_and_peak(group) if "ms" in group else f"fails: {group['failed'][:60]}"


def bounds(model: str) -> str:
    """What bounds each kind, how far above it streaming is, and what it takes to set up."""
    rows = []
    for kind, row in read("gpu_quantised")[model].items():
        least, group, within = row["least_measured"], row["group_offload"], row["within"][0]
        rows.append(
            [
                kind,
                f"{row['resident']['ms']:.0f} ms",
                f"{least['wire_gib']:.1f} GiB, {least['bus_ms']:.0f} ms",
                f"{row['least']['over_limit']:+.1%}",
                f"{least['over_limit']:+.1%}",
                f"{within['over_resident']:+.1%}",
                f"{row['setup_s']:.1f} s" + (f" ({group['setup_s']:.1f} s)" if "ms" in group else ""),
                f"{host_memory(row):.2f}" + (f" ({_grown(row, group['host_gib']):.2f})" if "ms" in group else ""),
            ]
        )
    head = ["", "compute", "bus", "first steps", "blocks timed", "within 2 GiB", "set-up", "host memory, of weights"]
    return markdown_table(head, rows)


def host_memory(row: dict[str, Any]) -> float:
    """Host memory that streaming takes, as a multiple of the weights: they are there already, and what it adds."""
    return _grown(row, row["host_gib_after"] - row["host_gib_before"])


def _grown(row: dict[str, Any], added: float) -> float:
    return float((row["weights_gib"] + added) / row["weights_gib"])
