"""The page docs/models.md, made of the cases that the tests run. `make docs` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from . import UNSERVED, Case, Stack, load

HEAD = """# Models

Every transformer class that diffusers 0.42.1 exports, as Samovar sees it. The tests build each of them, run it
and compare what is found with this table; the table itself is written by `make docs` from the same cases.
No model has code of its own here: stacks are found by structure and confirmed by a probing forward.

- A stack is written as `path: blocks -> carried values`, in the order in which stacks run. The block class
  is that of the tiny configuration under test; the number of blocks depends on the model.
- A carried value is named by the block's parameter. Its tokens are made of what is denoised (*image*, whether
  picture, video, sound or protein), of conditioning alone (*text*), or of both (*joint*); `-` is returned but
  not handed to the next block.
- *Between blocks* are modules that run between the blocks of a stack.
"""

FOREIGN = """## Models of other projects

Originals, as their authors wrote them, tiny and with random weights. `make test-foreign FOREIGN=folder` runs them out
of a folder of checkouts. Nothing is declared for any of them. Each is run for 12 steps, with `tea_cache` and with
`forecast`:

- *exact*: where nothing is skipped, and at every computed step, the bits are those of the bare model;
- *served*: steps are skipped, and at least 80 % of the weights do not run at a skipped step;
- *still*: where inputs hardly change, a skipped step gives what the model would have given;
- *restored*: after detaching, modules and bits are those of the bare model;
- *offload*: the bits are those of the bare model under layerwise offload and after it;
- *hooks*: a hook of the user on the model sees every step once.

A model that is not served is computed at every step, or is refused when the cache is attached. A step that cannot be
assigned to a branch, as the first one may be, is computed and is not in `stats()`.
"""
FOREIGN_ROWS = Path(__file__).parents[1] / "foreign" / "models.md"
"""Written by `python -m foreign.table`."""


def page(cases: Iterable[Case]) -> str:
    """The whole page."""
    groups = [(name, list(group)) for name, group in groupby(cases, key=lambda case: case.model)]
    count = sum(len(group) for _, group in groups)
    lines = [HEAD, f"{len(groups)} classes, {count} cases.", ""]
    lines += ["| class | also tested | stacks | between blocks | to know |", "|---|---|---|---|---|"]
    lines += [_row(name, group) for name, group in groups]
    lines += ["", "## Not served", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(UNSERVED.items())] or ["None."]
    lines += ["", FOREIGN, FOREIGN_ROWS.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


def _row(name: str, cases: list[Case]) -> str:
    plain = next((case for case in cases if not case.variant), cases[0])
    variants = ", ".join(case.variant for case in cases if case.variant)
    stacks = "<br>".join(map(_stack, plain.stacks))
    side = ", ".join(f"`{path}`" for path in plain.side)
    return f"| {name} | {variants} | {stacks} | {side} | {plain.notes} |"


def _stack(stack: Stack) -> str:
    streams = zip(stack.carried, stack.kinds, strict=True)
    values = ", ".join(f"{parameter} *{kind}*" if parameter else "-" for parameter, kind in streams)
    return f"`{stack.path}`: {stack.block} -> {values}"


if __name__ == "__main__":
    print(page(load()), end="")
