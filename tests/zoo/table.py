"""The page docs/reference/models.md, made from the cases that the tests run. `make models-table` writes it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from samovar.arch import Anatomy
from samovar.trace import probe_anatomy

from . import ANATOMIES, UNREPLAYED, UNSERVED, Case, Stack, load

HEAD = """# Models

Every transformer class that diffusers 0.42.1 exports can be cached, offloaded and split. No model has code of its
own: stacks of blocks are found by structure and confirmed by one observed forward. The tests build and run each class
and compare what is found with this table, which `make models-table` writes from the same cases.

- A stack is written as `path: blocks -> carried values`, in the order in which stacks run. The block class is that of
  the tiny configuration under test.
- A carried value is named by the block's parameter. Its tokens, as the model's source says, are made from what is
  denoised (*image*, whether image, video, sound or protein), from conditioning alone (*text*), or from both (*joint*);
  `-` is returned but not passed to the next block.
- *Between blocks* are modules that run between the blocks of a stack.
- *Sees time alone* is the share of the weights that is computed ahead of the steps under
  [offload](../guides/offload.md#layers-that-see-time-alone), of the model that the class makes by default; "?" where it
  makes none. A model that is loaded is looked at by itself.
- *Graphs* says whether its forwards can be [replayed](../guides/graphs.md), or why not.
"""
TIME_ONLY = Path(__file__).with_name("time_only.json")
"""Written by `python -m zoo.time_shares`."""

FOREIGN = """## Models of other projects

Originals, as their authors wrote them, tiny and with random weights; nothing is declared for any of them. `make
test-foreign FOREIGN=folder` runs them from a folder of checkouts, 12 steps each, with `tea_cache`:

- *exact*: where nothing is skipped, and at every computed step, the bits are those of the bare model;
- *served*: steps are skipped, and at least 80 % of the weights do not run at a skipped step;
- *still*: where inputs hardly change, a skipped step gives what the model would have given;
- *restored*: after detaching, modules and bits are those of the bare model;
- *offload*: the bits are those of the bare model under layerwise offload and after it;
- *hooks*: a user's hook on the model sees every step once.

A model that is not served is computed at every step, or refused when the cache is attached. A step that cannot be
assigned to a branch, as the first one may be, is computed and not listed in `stats()`.
"""
FOREIGN_ROWS = Path(__file__).parents[1] / "foreign" / "models.md"
"""Written by `python -m foreign.table`."""


def page(cases: Iterable[Case]) -> str:
    """The whole page."""
    groups = [(name, list(group)) for name, group in groupby(cases, key=lambda case: case.model)]
    count = sum(len(group) for _, group in groups)
    lines = [HEAD, f"{len(groups)} classes, {count} cases.", ""]
    head = ["class", "also tested", "stacks", "between blocks", "sees time alone", "graphs", "to know"]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    shares = json.loads(TIME_ONLY.read_text(encoding="utf-8"))
    lines += [_row(name, group, shares.get(name, {}).get("share")) for name, group in groups]
    lines += ["", "## Not served", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(UNSERVED.items())] or ["None."]
    lines += ["", FOREIGN, FOREIGN_ROWS.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


def _row(name: str, cases: list[Case], time_only: float | None) -> str:
    plain = next((case for case in cases if not case.variant), cases[0])
    variants = ", ".join(case.variant for case in cases if case.variant)
    stacks = "<br>".join(map(_stack, plain.stacks))
    side = ", ".join(f"`{path}`" for path in plain.side)
    share = "?" if time_only is None else f"{time_only:.0%}"
    graphs = f"no: {UNREPLAYED[name]}" if name in UNREPLAYED else "yes"
    return f"| {name} | {variants} | {stacks} | {side} | {share} | {graphs} | {plain.notes} |"


def _stack(stack: Stack) -> str:
    streams = zip(stack.carried, stack.kinds, strict=True)
    values = ", ".join(f"{parameter} *{kind}*" if parameter else "-" for parameter, kind in streams)
    return f"`{stack.path}`: {stack.block} -> {values}"


def summary(anatomy: Anatomy) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Of each stack its path, length, class of blocks and what they carry on; and the modules between blocks."""
    found = []
    for stack in anatomy.stacks:
        (block,) = stack.block_classes
        found.append((stack.path, len(stack), block, [stream.parameter for stream in stack.streams]))
    return found, list(anatomy.side)


def write_anatomies() -> None:
    """Find all anatomies anew. A person compares what has changed with the model's source, and fills in kinds ("?")."""
    known = json.loads(ANATOMIES.read_text(encoding="utf-8"))
    lines = []
    for case in load():
        stacks, side = summary(probe_anatomy(case.build(), case.inputs(0), case.inputs(1)))
        kinds = {stack[0]: stack[4] for stack in known.get(case.id, {"stacks": []})["stacks"]}
        entry = {"stacks": [[*stack, kinds.get(stack[0], ["?"] * len(stack[3]))] for stack in stacks]}
        lines.append(f" {json.dumps(case.id)}: {json.dumps(entry | ({'side': side} if side else {}))}")
    ANATOMIES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write_anatomies()
    else:
        print(page(load()), end="")
