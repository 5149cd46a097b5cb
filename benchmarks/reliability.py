"""The 26 tests of reliability with their figures, as a table.

    python benchmarks/reliability.py [--only 1,5,20] [--soak-minutes 120] [--write docs/benchmarks/reliability.md]
    python benchmarks/reliability.py --device cuda [--write docs/benchmarks/reliability.md]  # those that a GPU changes
    python benchmarks/reliability.py --take RESULT.json --write docs/benchmarks/reliability.md  # another machine

Real servers in their own processes, tiny models, real signals and sockets. What is measured here is measured from
outside, by HTTP; what is a matter of right or wrong is left to the tests that are named. Run it on a quiet machine:
the figures are strict. Rows are kept in `--json` as soon as they are there; the page is made of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import reliability_checks as checks
import reliability_memory as memory
from reliability_bench import ROOT, Bench, Outcome

RESULT = ROOT / "benchmarks" / "results" / "reliability.json"
ON_GPU = (1, 6, 7, 18, 26)
"""What a GPU changes."""


def by_tests(*names: str) -> Callable[[Bench], Outcome]:
    """What is right or wrong, and has no figure: tests, by their names."""

    def run(bench: Bench) -> Outcome:
        if bench.device != "cpu":
            return Outcome(None, "no GPU takes part; see the CPU's table")
        files = sorted({name.partition("::")[0] for name in names})
        wanted = " or ".join(name.partition("::")[2] for name in names)
        command = [sys.executable, "-m", "pytest", *files, "-q", "--no-header", "-m", "not gpu", "-k", wanted]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        last = (result.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        # Tests that were renamed, or that skip themselves here, have shown nothing.
        is_seen = re.search(r"\b[1-9]\d* passed", last) is not None and "skipped" not in last
        return Outcome(result.returncode == 0 and is_seen, f"{last} ({', '.join(files)})")

    return run


def fuzz(bench: Bench) -> Outcome:
    """25: `make test-fuzz`, with its counts."""
    if bench.device != "cpu" or not bench.fuzz_minutes:
        return Outcome(None, "no GPU takes part; see the CPU's table" if bench.fuzz_minutes else "left out")
    command = [sys.executable, "-m", "pytest", "tests/fuzz", "-q", "--no-header", "-m", "fuzz", "-p", "no:xdist"]
    environment = {**os.environ, "FUZZ_SECONDS": str(60 * bench.fuzz_minutes)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = result.stdout.strip().splitlines() or ["no output"]
    counts = [line.removeprefix("fuzz ") for line in lines if re.match(r"fuzz \w+: \d+ cases", line)]
    figures = f"{bench.fuzz_minutes:g} min; {'; '.join(counts)}; {lines[-1].strip('= ')}"
    return Outcome(result.returncode == 0 and len(counts) > 0, figures)


TESTS: dict[int, tuple[str, Callable[[Bench], Outcome]]] = {
    1: ("`kill -9` the worker mid-step, four requests in flight", checks.kill_worker),
    2: ("10 kills in a row under load; the circuit opens after 5 in 60 s", by_tests(
        "tests/engine/test_supervisor.py::test_kills_under_load",
        "tests/engine/test_supervisor.py::test_the_circuit_opens")),
    3: ("SIGSTOP the worker", checks.hang_worker),
    4: ("`kill -9` the server", checks.kill_server),
    5: ("the client disconnects mid-request", checks.disconnect),
    6: ("500 clients disconnect at random steps", memory.disconnects),
    7: ("out of GPU memory, then enough again", memory.out_of_memory),
    8: ("200 requests at once on a queue of 16", checks.flood),
    9: ("a deadline of 5 s behind a slow request", checks.deadline),
    10: ("schemathesis, good and bad requests, 200 per operation", by_tests(
        "tests/server/test_app.py::test_schemathesis")),
    11: ("malformed bodies, over 150", by_tests("tests/server/test_app.py::test_malformed")),
    12: ("sizes out of bounds", checks.sizes),
    13: ("bodies of 1 MB and 50 MB", checks.bodies),
    14: ("100 slow or half-open sockets", checks.dawdlers),
    15: ("NaN in the latents", by_tests("tests/engine/test_worker.py::test_numbers_are_checked")),
    16: ("pickled weights, and code that comes with a model", by_tests(
        "tests/engine/test_loading.py::test_what_could_run_code")),
    17: ("paths and URLs of clients", by_tests(
        "tests/server/test_app.py::test_no_path", "tests/server/test_state.py::test_only_the_model",
        "tests/server/test_images.py::test_bad_forms")),
    18: ("soak: replicas, batches, adapters and videos, random requests, 10 % cancelled", memory.soak),
    19: ("requests do not affect each other", by_tests("tests/engine/test_mixes.py::test_in_any_mix")),
    20: ("SIGTERM with one running and five waiting, and a second one", checks.terminate),
    21: ("a bad prompt in a list", by_tests("tests/test_omni.py::test_a_bad_prompt_of_a_list")),
    22: ("one of several ranks dies", by_tests("tests/engine/test_local.py::test_a_rank_that_dies")),
    23: ("keys: none, wrong, in the query, 10,000 tries", checks.keys),
    24: ("a decompression bomb in an edit", checks.bomb),
    25: ("random inputs: HTTP framing, forms, images, model folders, settings, bodies", fuzz),
    26: ("`kill -9` one of two workers in a batch of three, with adapters", checks.kill_in_batch),
}  # fmt: skip

Rows = dict[str, dict[str, dict[str, Any]]]
"""By device and by number: an outcome, and of which machine and day it is."""


def read(file: Path) -> Rows:
    rows: Rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return rows


def merged(rows: Rows, new: Rows) -> Rows:
    """The newer of two rows; one that was not tried takes the place of none that was."""
    result = {device: dict(found) for device, found in rows.items()}
    for device, found in new.items():
        kept = result.setdefault(device, {})
        kept |= {n: row for n, row in found.items() if row["holds"] is not None or kept.get(n, row)["holds"] is None}
    return {device: dict(sorted(found.items(), key=lambda row: int(row[0]))) for device, found in result.items()}


def machine(device: str) -> str:
    """Where and when, and with what."""
    import diffusers
    import torch

    what = f"{platform.machine()} with {os.cpu_count()} cores"
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        what = f"{found.name} with {found.total_memory / 2**30:.0f} GiB, {what}"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, diffusers {diffusers.__version__}"
    return f"{date.today()}, {what}, {versions}"


def line(number: int, row: dict[str, Any]) -> str:
    outcome = Outcome(row["holds"], row["figures"], row["how"])
    return f"| {number} | {TESTS[number][0]} | {outcome.words} | {outcome.figures} |"


def page(rows: Rows) -> str:
    """All rows, for people."""
    parts = [
        "# Reliability",
        "What happens when things go wrong? Real servers in their own processes, tiny models, real signals, real "
        "sockets. `make reliability` and `make reliability-gpu` write this page; the figures are as the runs printed "
        'them. "Holds" means that every required figure was reached; where one was not, the row says which. A longer '
        "soak on a GPU: [ten minutes under load](other.md#ten-minutes-under-load).",
    ]
    for device, title in (("cpu", "On a CPU"), ("cuda", "On a GPU")):
        found = rows.get(device, {})
        numbers = list(TESTS) if device == "cpu" else [int(number) for number in found]
        if not found:
            parts += [f"## {title}", "Not run yet."]
            continue
        blank = {"holds": None, "how": "", "figures": "not run yet"}
        lines = [line(number, found.get(str(number), blank)) for number in numbers]
        parts += [f"## {title}", _abouts(found), "\n".join(["| # | test | | figures |", "|---|---|---|---|", *lines])]
    return "\n\n".join(parts) + "\n"


def _abouts(found: dict[str, dict[str, Any]]) -> str:
    """The machine and the day, and if there were several, which rows are of which."""
    by_about: dict[str, list[str]] = {}
    for number, row in found.items():
        by_about.setdefault(row["about"], []).append(number)
    if len(by_about) == 1:
        return f"{next(iter(by_about))}."
    return "\n".join(f"- {about}: rows {', '.join(numbers)}" for about, numbers in by_about.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", help="numbers of tests, such as 1,5,20; on a GPU 1,6,7,18,26 if not given")
    parser.add_argument("--soak-minutes", type=float, default=2.0, help="0 leaves it out (2)")
    parser.add_argument("--fuzz-minutes", type=float, default=5.0, help="0 leaves it out (5)")
    parser.add_argument("--json", type=Path, default=RESULT, help="where rows are kept")
    parser.add_argument("--take", type=Path, help="run nothing: take the rows of such a file")
    parser.add_argument("--write", type=Path, help="a page for all rows, such as docs/benchmarks/reliability.md")
    options = parser.parse_args()
    usual = ON_GPU if options.device == "cuda" else tuple(TESTS)
    chosen = usual if options.only is None else tuple(int(number) for number in options.only.split(","))
    unknown = [number for number in chosen if number not in TESTS]
    if unknown:
        parser.error(f"--only {options.only}: there is no test {unknown[0]}; they are 1 to {max(TESTS)}")
    rows: Rows = {} if options.take is None else read(options.take)
    if options.take is None:
        rows = run(chosen, options)
    else:
        keep(options.json, rows)
    if options.write is not None:
        options.write.write_text(page(read(options.json)), encoding="utf-8")
    return 1 if any(row["holds"] is False for found in rows.values() for row in found.values()) else 0


def run(chosen: tuple[int, ...], options: argparse.Namespace) -> Rows:
    """Run tests, and keep each row when it is there."""
    device = options.device
    rows: Rows = {device: {}}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), device, options.soak_minutes, options.fuzz_minutes)
        about = machine(device)
        for number in chosen:
            rows[device][str(number)] = row = {**asdict(TESTS[number][1](bench)), "about": about}
            print(line(number, row), flush=True)
            keep(options.json, rows)
    return rows


def keep(file: Path, rows: Rows) -> None:
    file.write_text(json.dumps(merged(read(file), rows), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
