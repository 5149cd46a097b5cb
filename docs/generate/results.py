"""Reads the benchmark results, `benchmarks/results/*.json`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TITLES = {"flux": "FLUX.1 12B", "qwen": "Qwen-Image 20B"}


@functools.cache
def read(name: str) -> dict[str, Any]:
    """A result by its file's name without `.json`."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def about(name: str) -> str:
    """One line on where the figures of a result come from."""
    result = read(name)
    facts = {**result, **result.get("about", {})}
    machine = facts.get("device") or facts.get("processor") or facts.get("machine") or f"{facts.get('cores')} CPU cores"
    versions = ", ".join(f"{package} {facts[package]}" for package in ("torch", "diffusers") if package in facts)
    return (
        f"*Measured on {facts['date']}: {machine}; {versions}. Made by `{facts['command']}`; all figures are in "
        f"`benchmarks/results/{name}.json`.*"
    )


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def time_and_peak(row: dict[str, Any]) -> str:
    """What a forward took."""
    return f"{row['ms']:.0f} ms, {row['peak_gib']:.2f} GiB"
