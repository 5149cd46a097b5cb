"""The page docs/models.md, made of the cases that the tests run. `make docs` writes it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

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


def page(cases: Iterable[Case]) -> str:
    """The whole page."""
    groups = [(name, list(group)) for name, group in groupby(cases, key=lambda case: case.model)]
    count = sum(len(group) for _, group in groups)
    lines = [HEAD, f"{len(groups)} classes, {count} cases.", ""]
    lines += ["| class | also tested | stacks | between blocks | to know |", "|---|---|---|---|---|"]
    lines += [_row(name, group) for name, group in groups]
    lines += ["", "## Not served", ""]
    lines += [f"- `{name}`: {reason}" for name, reason in sorted(UNSERVED.items())] or ["None."]
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
