"""Put known faults into the source, one at a time, and see whether the tests find them.

The faults are in faults.toml. Each one is applied to a copy of the source, and the tests that are named for it run on
that copy, then all tests of its room, until one fails. A fault is found if a test fails with it and passes without it.
A module that can no longer be imported, or a run that exceeds its time limit, finds nothing.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
MIN_FOUND, MAX_MISSED = 57, 9
"""What a run of all faults must reach."""
FOUND, MISSED, OPEN, BROKEN = "found", "NOT FOUND", "open", "DOES NOT APPLY"
OUT_OF_TIME, CANNOT_RUN, FAILS_ANYWAY = "OUT OF TIME", "CANNOT RUN", "FAILS WITHOUT IT"


class PatchError(ValueError):
    """A patch that does not fit the source."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A mistake that somebody could make."""

    id: str
    room: str
    wrong: str
    """What a user or a caller sees, whatever the code looks like."""
    matters: str
    tests: tuple[str, ...]
    """Files, folders or single tests that should find it."""
    patch: str = ""
    """How it is made, as a diff of one file; empty until the code is there."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of a fault."""

    fault: Fault
    verdict: str
    note: str = ""
    """The test that found it, or what went wrong."""
    seconds: float = 0.0


def read_faults(root: Path = ROOT) -> list[Fault]:
    """All faults of a project."""
    content = tomllib.loads((root / "tests/mutants/faults.toml").read_text(encoding="utf-8"))
    return [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in content["fault"]]


# ------------------------------------------------------------------------------------------------ patches


def patched(fault: Fault, root: Path = ROOT) -> tuple[str, str]:
    """The file that a fault changes, from the root, and its text with the fault; PatchError if it does not fit."""
    name, hunks = _read_patch(fault.patch)
    file = root / name
    if not name.startswith("src/") or ".." in Path(name).parts or not file.is_file():
        raise PatchError(f"{name} is not a file of the source")
    for test in fault.tests:
        if not (root / test.partition("::")[0]).exists():
            raise PatchError(f"{test} does not exist")
    before = file.read_text(encoding="utf-8")
    lines = before.split("\n")
    for old, new in hunks:
        places = [start for start in range(len(lines)) if old and lines[start : start + len(old)] == old]
        if len(places) != 1:
            raise PatchError(f"{name} has {len(places)} places for the lines {old}; expected one")
        lines[places[0] : places[0] + len(old)] = new
    after = "\n".join(lines)
    if _code(after, name) == _code(before, name):
        raise PatchError(f"the patch changes no code of {name}")
    return name, after


def _read_patch(patch: str) -> tuple[str, list[tuple[list[str], list[str]]]]:
    """The file of a diff, and for each of its hunks the lines that are there and those that take their place. Line
    numbers do not count."""
    name = ""
    hunks: list[tuple[list[str], list[str]]] = []
    for line in patch.strip("\n").split("\n"):
        mark, text = line[:1] or " ", line[1:]
        is_heading = line.startswith(("+++ ", "--- ", "diff ", "index "))
        if line.startswith("@@"):
            hunks.append(([], []))
        elif is_heading and not hunks:
            name = line[4:].strip().removeprefix("b/") if line.startswith("+++ ") else name
        elif hunks and not is_heading and mark in " -+":
            old, new = hunks[-1]
            old += [text] * (mark in " -")
            new += [text] * (mark in " +")
        else:
            raise PatchError(f"{line!r} is not a line of a diff of one file")
    if not name or not hunks:
        raise PatchError("a patch needs a line '+++ FILE' and a line '@@' before what changes")
    return name, hunks


def _code(text: str, name: str) -> str:
    """What counts of a file: of Python neither comments nor layout."""
    if not name.endswith(".py"):
        return text
    try:
        return ast.dump(ast.parse(text))
    except SyntaxError as error:
        raise PatchError(f"{name} is no Python any more: {error}") from error


# ------------------------------------------------------------------------------------------------ runs


async def try_fault(fault: Fault, root: Path, limit_s: float) -> Result:
    """Run the tests on a copy of the source that has the fault. Their output goes to out/mutants."""
    started = time.monotonic()
    try:
        name, text = patched(fault, root)
    except PatchError as error:
        return Result(fault, BROKEN, str(error))
    log = root / f"out/mutants/{fault.id}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    room = f"tests/{fault.room}"
    stages = [list(fault.tests), *([] if room in fault.tests else [[room]])]
    with tempfile.TemporaryDirectory(prefix="samovar-mutant-") as folder:
        source = Path(folder) / "src"
        await asyncio.to_thread(shutil.copytree, root / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / name).write_text(text, encoding="utf-8")
        for tests in stages:
            code, failed = await _run_tests(tests, root, source, limit_s, log)
            verdict, note = _judge(code, failed)
            if verdict != MISSED:
                break
        if verdict == FOUND:
            again = [failed] if failed else tests
            code, _ = await _run_tests(again, root, root / "src", limit_s, log.with_suffix(".without.txt"))
            verdict = FOUND if code == 0 else FAILS_ANYWAY
    return Result(fault, verdict, note, time.monotonic() - started)


def _judge(code: int | None, failed: str) -> tuple[str, str]:
    if code is None:
        return OUT_OF_TIME, ""
    if code == 1 and failed:
        return FOUND, failed
    if code == 0:
        return MISSED, ""
    if code < 0 and code != -signal.SIGKILL:  # Which may be the system's, for want of memory.
        return FOUND, f"the tests ended by {signal.Signals(-code).name}"
    return CANNOT_RUN, f"pytest ended with {code}"


async def _run_tests(
    tests: Sequence[str], root: Path, source: Path, limit_s: float, log: Path
) -> tuple[int | None, str]:
    """Run tests on a source until one fails. The exit status, None at the limit, and the test that failed."""
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory(prefix="samovar-mutant-") as cache, open(log, "wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}", *tests,
            cwd=root, env={**os.environ, "PYTHONPATH": path}, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    code = await process.wait()
        finally:  # With whatever the tests have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        failed = Path(cache) / "v/cache/lastfailed"
        names = json.loads(failed.read_text(encoding="utf-8")) if failed.is_file() else {}
    return code, next((name for name in names if "::" in name), "")


# ------------------------------------------------------------------------------------------------ the command


async def _try_all(faults: Sequence[Fault], root: Path, jobs: int, limit_s: float) -> list[Result]:
    free, width = asyncio.Semaphore(jobs), max(len(fault.id) for fault in faults)

    async def one(fault: Fault) -> Result:
        async with free:
            result = await try_fault(fault, root, limit_s) if fault.patch.strip() else Result(fault, OPEN)
        print(f"{fault.id:{width}}  {result.verdict:16}  {result.seconds:4.0f} s  {result.note}", flush=True)
        return result

    return await asyncio.gather(*map(one, faults))


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Try the faults that are asked for, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="ID", help="this fault; again for more")
    parser.add_argument("--room", help="the faults of one room")
    parser.add_argument("-j", "--jobs", type=int, default=1, metavar="N", help="faults to try at the same time (1)")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for a run of tests (900)")
    options = parser.parse_args(arguments)
    faults = read_faults(root)
    if unknown := set(options.only or ()) - {fault.id for fault in faults}:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}")
    chosen = [f for f in faults if f.id in (options.only or [f.id]) and f.room == (options.room or f.room)]
    if not chosen:
        parser.error(f"there is no such fault in the room {options.room}")
    if options.jobs < 1:
        parser.error(f"-j {options.jobs}: at least one fault must be tried at a time")
    results = asyncio.run(_try_all(chosen, root, options.jobs, options.limit))
    count = Counter(result.verdict for result in results)
    print(", ".join(f"{number} {verdict.lower()}" for verdict, number in count.most_common()))
    missed = len(results) - count[FOUND] - count[OPEN]
    if len(chosen) < len(faults):
        return int(missed > 0)
    is_enough = count[FOUND] >= MIN_FOUND and missed <= MAX_MISSED
    print(f"At least {MIN_FOUND} must be found, and at most {MAX_MISSED} missed: {'yes' if is_enough else 'NO'}.")
    return int(not is_enough or count[BROKEN] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
