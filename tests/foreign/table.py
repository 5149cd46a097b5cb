"""The table of those that are served. `python -m foreign.table FOLDER` (with `PYTHONPATH=tests`) tries all of them.

The table, in Markdown, goes to the standard output, and all that was found to the standard error. Names after the
folder choose cases that contain one of them. The table of all cases is `tests/foreign/models.md`, which is a section of
docs/reference/models.md: `PYTHONPATH=tests python -m foreign.table FOLDER > tests/foreign/models.md`, then
`make models-table`.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from samovar.core.errors import SamovarError

from . import VARIABLE, Case, Missing, load
from .checks import BACKENDS, CHECKS, CaseError, NotServed, SideEffect, Wrong


@dataclass
class Row:
    """What came of one case."""

    case: Case
    status: str = "served"
    share: float | None = None
    findings: dict[str, list[str]] = field(default_factory=dict)
    """What was found, with the checks and backends that found it."""

    def note(self, status: str, finding: str, label: str) -> None:
        """The worst status stays."""
        order = ("served", "not served", "WRONG", "CRASH", "no case", "skipped")
        self.status = max(self.status, status, key=order.index)
        self.findings.setdefault(finding, []).append(label)

    def __str__(self) -> str:
        """A row of the table, with the first sentence of what was found first."""
        name = f"{self.case.model} ({self.case.variant})" if self.case.variant else self.case.model
        served = {"served": "yes", "not served": "no"}.get(self.status, self.status)
        share = "" if self.share is None else f"{self.share:.0%}".replace("%", " %")
        notes = "; ".join(filter(None, [*map(_short, list(self.findings)[:1]), self.case.notes]))
        return f"| {name} | {self.case.repository} | {served} | {share} | {notes} |"

    @property
    def details(self) -> str:
        """What was found, in full, with the checks that found it."""
        said = (f"{_which(labels)}: {' '.join(finding.split())}" for finding, labels in self.findings.items())
        return f"{self.status} {'; '.join(said)}".strip()


def _short(finding: str) -> str:
    """The first sentence of a finding, without what stands in brackets at its end."""
    text = re.split(r"(?<=[^.])\.(?:\s|$)", " ".join(finding.split()).removeprefix("refused: "))[0]
    return re.sub(r" \([^()]*(\(\)[^()]*)*\)$", "", text).replace("|", "/")


def _which(labels: list[str]) -> str:
    """The checks that found something; their backends are named where not all found it."""
    checks: dict[str, list[str]] = {}
    for label in labels:
        name, _, backend = label.partition(" ")
        checks.setdefault(name, []).append(backend)
    whole = (list(BACKENDS), [""])
    return ", ".join(
        name if backends in whole else f"{name} with {' and '.join(backends)}" for name, backends in checks.items()
    )


def judge(case: Case) -> Row:
    """All checks of a case, whatever comes of the ones before."""
    row = Row(case)
    for name, (check, by_backend) in CHECKS.items():
        for backend in BACKENDS if by_backend else ("",):
            label, share = f"{name} {backend}".strip(), None
            try:
                with case.inside():
                    share = check(case, *([backend] if backend else []))
            except Missing as missing:
                row.note("skipped", str(missing), label)
            except (ImportError, CaseError) as error:
                row.note("no case", f"{type(error).__name__}: {error}", label)
            except SideEffect as error:
                row.note(row.status, str(error), label)
                share = error.share
            except Wrong as error:
                row.note("WRONG", str(error), label)
            except NotServed as error:
                row.note("not served", str(error), label)
            except SamovarError as error:
                row.note("not served", f"refused: {error}", label)
            except Exception as error:
                if os.environ.get("VERBOSE"):
                    traceback.print_exc()
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:160]}"
                row.note("no case" if name == "bare" else "CRASH", where, label)
            if share is not None:
                row.share = min(share, row.share or 1.0)
            if row.status in ("no case", "skipped"):
                return row
    return row


def main(arguments: list[str]) -> None:
    """The table and, below it, how many are of which status."""
    if not arguments:
        raise SystemExit("python -m foreign.table FOLDER [NAME...]: a folder of checkouts, each named owner+name.")
    os.environ[VARIABLE], *names = arguments
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for case in load():
        if not names or any(name.lower() in case.id.lower() for name in names):
            rows.append(judge(case))
            print(f"{case.id}: {rows[-1].details}", file=sys.stderr, flush=True)
    print("| model | repository | served | weights skipped | notes |", "|---|---|---|---|---|", sep="\n")
    print(*rows, sep="\n")
    counts = Counter(row.status for row in rows)
    print(f"\n{len(rows)} models: " + ", ".join(f"{count} {status}" for status, count in counts.most_common()) + ".")


if __name__ == "__main__":
    main(sys.argv[1:])
