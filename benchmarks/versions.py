"""The tests with the oldest and newest libraries that pyproject.toml allows, as a table.

    python benchmarks/versions.py [oldest] [newest] [PACKAGE==VERSION,...] [--write docs/reference/versions.md]
    python benchmarks/versions.py --here [--write docs/reference/versions.md]  # the environment that runs this
    python benchmarks/versions.py --take RESULT.json --write docs/reference/versions.md    # the rows of another machine

`oldest` takes every lower bound of pyproject.toml, `newest` the last release of each library; both keep the torch of
the running environment, since others are downloads of gigabytes. Another torch is asked for by its version
(`torch==2.14.1`), or has its row made by `--here` in an environment that has it.

An environment is a folder under .envs that sees the packages of the running one behind its own, so that only what
differs is installed; pip resolves what that needs. It is removed afterwards. Rows are kept in `--json`; the page is
made of all of them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "versions.json"
ENVIRONMENTS = ROOT / ".envs"
TESTS = ("arch", "hooks", "trace", "pipelines", "cache", "compose", "offload", "parallel", "builtin", "test_omni.py")
"""What depends on the libraries: every transformer class, every kind of pipeline, every feature on them."""
SHOWN = ("torch", "diffusers", "transformers", "accelerate", "numpy")
HEADER = """# Versions that were tried

`make test-versions` runs tests (in `tests`: {tests}) with the oldest versions that `pyproject.toml` allows and with the
newest; `benchmarks/versions.py --here` adds rows of other machines. Tests of classes that an older diffusers lacks
are skipped.

| date | Python | {shown} | passed | skipped | failed |
|---|---|{rule}---|---|---|
"""

Rows = list[dict[str, Any]]


def lower_bounds() -> list[str]:
    """The oldest version of each dependency that pyproject.toml allows, but torch's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [name.replace(">=", "==") for name in project["dependencies"] if not name.startswith("torch>=")]


def requirements(wanted: str) -> list[str]:
    if wanted == "oldest":
        return lower_bounds()
    if wanted == "newest":
        return ["--upgrade", *(bound.partition("==")[0] for bound in lower_bounds())]
    return wanted.split(",")


def make_environment(wanted: str) -> Path:
    """The Python of a new environment with these requirements over the running environment's packages."""
    home = ENVIRONMENTS / re.sub(r"[^\w.]+", "-", wanted)
    venv.create(home, clear=True, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    asked = requirements(wanted)
    fixed = home / "constraints.txt"
    fixed.write_text("" if any(name.startswith("torch==") for name in asked) else f"torch=={version_of('torch')}\n")
    command = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "-c", fixed]
    subprocess.run([*command, *asked], check=True)
    return home / "bin" / "python"


def version_of(package: str) -> str:
    return importlib.metadata.version(package)


def try_tests(python: Path | str, processes: int) -> dict[str, Any]:
    """One row: the versions that this Python sees, and what its tests gave."""
    # Warnings are errors in the normal run; here libraries of different years warn of each other.
    tests = [f"tests/{name}" for name in TESTS]
    command = [python, "-m", "pytest", "-q", "-n", str(processes), "-p", "no:cacheprovider", *tests]
    command += ["-o", "filterwarnings=default"]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    print("tests with", python, flush=True)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = result.stdout.strip().splitlines() or [result.stderr]
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    print(*failed, lines[-1], sep="\n", flush=True)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)", lines[-1])}
    return {
        "date": date.today().isoformat(),
        "python": run_python(python, "import platform; print(platform.python_version())"),
        "machine": platform.machine(),
        **{name: run_python(python, f"import {name}; print({name}.__version__)") for name in SHOWN},
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0),
        "failures": failed,
    }


def run_python(python: Path | str, code: str) -> str:
    result = subprocess.run([python, "-c", code], cwd=ENVIRONMENTS.parent, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def read(file: Path) -> Rows:
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def merged(rows: Rows, new: Rows) -> Rows:
    """A new row takes the place of an older one with the same versions."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(
            _parts(row[name]) for name in ("torch", "diffusers", "transformers", "accelerate", "numpy", "python")
        )

    found = {key(row): row for row in [*rows, *new]}
    return [found[versions] for versions in sorted(found)]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def page(rows: Rows) -> str:
    tests = ", ".join(f"`{name}`" for name in TESTS)
    header = HEADER.format(tests=tests, shown=" | ".join(SHOWN), rule="---|" * len(SHOWN))
    columns = ("date", "python", *SHOWN, "passed", "skipped", "failed")
    lines = ["| " + " | ".join(str(row[name]) for name in columns) + " |" for row in rows] + [""]
    for row in rows:
        about = f"- torch {row['torch']} with diffusers {row['diffusers']}: "
        lines += [about + text for text in (*row["failures"], *row.get("notes", ()))]
    return header + "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", help="oldest, newest, or PACKAGE==VERSION,... (oldest newest)")
    parser.add_argument("--here", action="store_true", help="only the running environment, as it is")
    parser.add_argument("--take", type=Path, help="rows of another machine; nothing is run")
    parser.add_argument("-n", "--processes", type=int, default=2, help="that share the tests (2)")
    parser.add_argument("--json", type=Path, default=RESULT, help="where rows are kept")
    parser.add_argument("--write", type=Path, help="a page for all rows, such as docs/reference/versions.md")
    options = parser.parse_args()
    rows = (
        read(options.take) if options.take else [try_tests(sys.executable, options.processes)] if options.here else []
    )
    for wanted in () if options.take or options.here else options.wanted or ("oldest", "newest"):
        python = make_environment(wanted)
        rows.append(try_tests(python, options.processes))
        shutil.rmtree(python.parents[1])
    options.json.write_text(json.dumps(merged(read(options.json), rows), indent=2) + "\n", encoding="utf-8")
    if options.write is not None:
        options.write.write_text(page(read(options.json)), encoding="utf-8")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
