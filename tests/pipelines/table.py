"""Writes docs/reference/pipelines.md: what works with every pipeline of diffusers that has a transformer.

`python -m pipelines.table` tries them all, which takes minutes; `python -m pipelines.table Wan` those of a name.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .trying import Row

LIMIT_S = 300
"""For one pipeline, on a machine that does other things too."""
ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "pipelines.json", ROOT / "docs" / "reference" / "pipelines.md"

INTRO = """# Pipelines

Every pipeline of diffusers {version} with a transformer, deprecated ones left out, built tiny and with random weights
by a builder that reads which components it wants, and used through `Omni` as a user would:

- *loaded*: from a folder, its kind of output known before the weights are read.
- *runs*: six steps, with the inputs that it needs.
- *saved*: the output as a file (.png, .mp4 or .wav), and read back.
- *offloaded*: layer by layer, with the bits of the resident model.
- *cached*: TeaCache skips steps of it.

{works} of {total} pass everything, among them some of every family but {others}; what stands in the way of each
other one is in its row. Without torchvision and cosmos_guardrail, whose models are downloaded, parts that nothing here
rests on are replaced: what reads videos in Qwen's processors, what prepares images in OmniGen's, and Cosmos's safety
checker. `make pipelines-table` writes this page; `make test-slow` checks it.
"""


def try_all(pattern: str) -> None:
    """Try the pipelines whose names match, and keep what was found."""
    import diffusers
    import torch

    from samovar.engine.models import load_diffusers

    from .builder import Recipe, pipeline_classes
    from .recipes import RECIPES
    from .trying import try_pipeline

    load_diffusers()
    torch.set_num_threads(1)
    known = read() if RESULTS.exists() else {"rows": {}}
    for name, cls in sorted(pipeline_classes().items()):
        if re.search(pattern, name):
            row = _in_time(lambda cls=cls, name=name: try_pipeline(cls, RECIPES.get(name, Recipe())), name)
            family = cls.__module__.split(".")[2]
            known["rows"][name] = {
                "family": family, "makes": row.makes, "works": row.works, "problem": row.problem,
            }  # fmt: skip
            print(name, row.works, row.problem, file=sys.stderr, flush=True)
            known["diffusers"] = diffusers.__version__
            RESULTS.write_text(json.dumps({**known, "rows": dict(sorted(known["rows"].items()))}, indent=1) + "\n")


def _in_time(work: Callable[[], Row], name: str) -> Row:
    """What the work finds, in a process that is ended when it takes too long."""
    forked = multiprocessing.get_context("fork")
    rows = forked.SimpleQueue()
    process = forked.Process(target=lambda: rows.put(work()))
    process.start()
    process.join(LIMIT_S)
    is_late = process.is_alive()
    process.kill()
    process.join()
    if not rows.empty():
        row: Row = rows.get()
        return row
    ended = f"it took more than {LIMIT_S} s" if is_late else f"its process ended with {process.exitcode}"
    return Row(name, problem=f"tried: {ended}")


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def passes(row: dict[str, Any]) -> bool:
    """Whether everything that is checked works."""
    return len(row["works"]) == 5 and all(row["works"].values())


def families_without(rows: dict[str, Any]) -> list[str]:
    """Families of which no pipeline passes everything."""
    working = {row["family"] for row in rows.values() if passes(row)}
    return sorted({row["family"] for row in rows.values()} - working)


def page() -> str:
    """The page, from what was found."""
    found = read()
    rows = found["rows"]
    others = ", ".join(families_without(rows)) or "none"
    works = sum(map(passes, rows.values()))
    text = INTRO.format(version=found["diffusers"], works=works, total=len(rows), others=others)
    checks = ("loaded", "runs", "saved", "offloaded", "cached")
    text += f"\n| pipeline | makes | {' | '.join(checks)} | what stands in the way |\n|---|---|{'---|' * 6}\n"
    for name, row in rows.items():
        marks = " | ".join({True: "yes", False: "no", None: ""}[row["works"].get(check)] for check in checks)
        problem = row["problem"].replace("|", "/").replace("<", "&lt;").replace("`", "'").replace("CannotBuild: ", "")
        text += f"| {name} | {row['makes']} | {marks} | {problem} |\n"
    return text


if __name__ == "__main__":
    try_all(sys.argv[1] if len(sys.argv) > 1 else ".")
    PAGE.write_text(page(), encoding="utf-8")
