"""Quality at any number of steps, guidance and sampler: our caches, peers and fewer plain steps.

    python benchmarks/regimes.py --captions reporting --device cuda --processes 12 --state FOLDER --json FILE
    python benchmarks/regimes.py --captions reporting --cells 28-4.5-pairs-euler --alone 6 --state FOLDER --json FILE

A cell is a number of steps, a guidance, a kind of captions and a sampler. Each is planned and tuned on the shipped
tuning captions and measured on others: `choosing` to choose constants by, `reporting` for the table, `last` for the
very last run. What needs no tuning comes first, in all cells. A run stops when its `--seconds` are over; one with the
same file makes what is missing there, and with the same state goes on within a cell. Peers that adapt decide for a
batch as one: `--alone` makes some images one at a time, and times them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import gpu_models
import torch
from caches import SCHEDULE_SHARES, PeerGuard, all_methods

from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Method, Runner, Session, Task, make_tasks, read_prompts
from samovar.lab.progress import Progress
from samovar.lab.session import Row
from samovar.lab.tasks import check_disjoint

CAPTIONS = Path(__file__).parent / "captions"
IMAGES = 96
SAMPLERS = ("euler", "unipc")
METHODS = ("plain", "auto", "tea_cache", "FirstBlockCache", "TaylorSeer", "MagCache", "DBCache")
"""Words in the names of the methods of a cell, beside the schedules."""
SHARES = SCHEDULE_SHARES[:3]
"""Of the steps, computed by the schedules."""
FIRST_SEED = 700_000


class Cell(NamedTuple):
    """One regime."""

    steps: int
    guidance: float
    kind: str
    """Of the captions."""
    sampler: str

    @property
    def name(self) -> str:
        return f"{self.steps}-{self.guidance:g}-{self.kind}-{self.sampler}"

    @property
    def tuned_as(self) -> str:
        """Captions of any kind are planned for by the same tuning captions."""
        return self._replace(kind="tuning").name


CELLS = [Cell(*of) for of in itertools.product((50, 28, 20), (2.0, 4.5), ("pairs", "free"), SAMPLERS)]


class OutOfTime(BaseException):
    """The rest is for the next run. No error: a guard would take it for a peer's."""


def sampled(pipeline: Any, sampler: str) -> None:
    """Give a pipeline its sampler: its own, or a multistep solver of second order for the same noise levels."""
    from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

    own = pipeline.scheduler.config
    if sampler == "euler":
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_config(own)
    else:
        pipeline.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=own.get("shift", 1.0), solver_order=2
        )


def tasks_of(captions: str, kind: str, count: int) -> list[Task]:
    """The images of a cell: as many captions as are needed, with several seeds where there are fewer."""
    prompts = read_prompts(CAPTIONS / f"{captions}_{kind}.txt")[:count]
    return make_tasks(prompts, -(-count // len(prompts)), FIRST_SEED)[:count]


class Table:
    """The cells, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._ends = options, time.monotonic() + options.seconds
        self.rows, self.earlier = known(options)

    def run(self) -> Iterator[None]:
        """Measure what is missing: first all that needs no tuning, then one schedule of each cell after the other."""
        cells = [cell for cell in CELLS if not self._options.cells or cell.name in self._options.cells]
        for turn in self._options.only or [None, *range(len(SHARES))]:
            for cell in cells:
                share = SHARES[turn] if isinstance(turn, int) else None
                words = [turn] if isinstance(turn, str) else METHODS if share is None else [schedule(cell, share)]
                try:
                    yield from self._measure(cell, words, is_planned=share is not None)
                except OutOfTime:
                    print(f"{cell.name}: the rest is for the next run", flush=True)
                    return

    def _measure(self, cell: Cell, words: Sequence[str], is_planned: bool) -> Iterator[None]:
        """The methods with these words in their names that are not there yet."""
        options, rows = self._options, self.rows.setdefault(cell.name, {})
        if is_planned and set(words) <= set(rows):
            return
        params = OmniDiffusionSamplingParams(num_inference_steps=cell.steps, true_cfg_scale=cell.guidance)
        runner = Runner("emoji", params, options.batch, "float32", options.device)
        sampled(runner.pipeline, cell.sampler)
        learning = make_tasks(read_prompts("tuning", options.tuning_images), 1, 0)
        judging = tasks_of(options.captions, cell.kind, options.alone or options.images)
        check_disjoint(learning, judging)
        judge = Runner("emoji", params, 1, pipeline=runner.pipeline) if options.alone else runner
        about = {**judge.about(), "cell": cell.name, "tuning": learning, "testing": judging}
        shared = cell.tuned_as
        planning = Journal(options.state / shared, {**runner.about(), "cell": shared, "tuning": learning})
        journal = Journal(options.state / (f"{cell.name}-alone" if options.alone else cell.name), about)
        tuning = Session(runner, learning, planning, "tuning", Progress(self._watch))
        testing = Session(judge, judging, journal, "testing", Progress(self._watch), is_timed=bool(options.alone))
        if options.alone and "exact" not in rows:
            rows["exact"] = {"method": "exact", "family": "exact", **figures(testing.exact())}
        for method in all_methods(tuning, only=words):
            if method.name not in rows:
                rows[method.name] = self._row(testing, method)
                print(cell.name, json.dumps(rows[method.name]), flush=True)
                yield

    def _watch(self, text: str) -> None:
        """Called before each batch, when what is done is safe."""
        if time.monotonic() > self._ends:
            raise OutOfTime

    def _row(self, session: Session, method: Method) -> dict[str, Any]:
        with PeerGuard(method) as guard:
            return {"method": method.name, "family": method.family, **figures(session.measure(method))}
        return {"method": method.name, "family": method.family, "problem": guard.problem}


def figures(row: Row) -> dict[str, float]:
    """By image: the mean, the 5th percentile and the worst. And seconds, if images were made alone."""
    psnr = sorted(image.psnr for image in row.images)
    times = {"seconds": row.seconds, "speedup": row.speedup}
    return {
        "computed": row.computed,
        "psnr": round(row.quality.psnr, 2),
        "psnr_5th": round(quantiles(psnr, n=20, method="inclusive")[0], 2) if len(psnr) > 1 else psnr[0],
        "psnr_worst": round(psnr[0], 2),
        "lpips": round(row.quality.lpips, 7),
        "lpips_worst": round(max(image.lpips for image in row.images), 6),
        **({name: round(value, 4) for name, value in times.items() if value is not None} if row.seconds else {}),
    }


def schedule(cell: Cell, share: float) -> str:
    """The name of the method that computes a share of a cell's steps, and is planned for it."""
    return f"schedule, {round(share * cell.steps)} computed"


def known(options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """The rows of earlier runs, by cell and method, and what they were made with; what failed is tried again."""
    file: Path = options.json
    if not file.is_file():
        return {}, []
    before = json.loads(file.read_text(encoding="utf-8"))
    cells, earlier = before.pop("cells"), before.pop("earlier", [])
    for name, value in about_the_run(options).items():
        if before.pop(name, value) != value:
            raise SystemExit(f"{file} has rows with another {name} than {value}. Give another --json.")
    rows = {cell: {row["method"]: row for row in of if "problem" not in row} for cell, of in cells.items()}
    return rows, [*earlier, before]


def about_the_run(options: argparse.Namespace) -> dict[str, Any]:
    """What rows of one file must share."""
    images = options.alone or options.images
    return {"captions": options.captions, "images": images, "alone": bool(options.alone), "tf32": options.tf32}


def save(
    options: argparse.Namespace, rows: Mapping[str, Mapping[str, Any]], earlier: list[dict[str, Any]], device: str
) -> None:
    """Keep what is there; whole at any time, since a run may be ended while it writes."""
    packages = ["cache_dit"] if find_spec("cache_dit") else []
    cells = {cell.name: list(rows[cell.name].values()) for cell in CELLS if rows.get(cell.name)}
    unfinished = options.json.with_suffix(".part")
    about = {**gpu_models.header(device, *packages), "earlier": earlier, **about_the_run(options)}
    gpu_models.write(unfinished, {**about, "cells": cells})
    unfinished.replace(options.json)


def in_processes(count: int, options: argparse.Namespace, device: str) -> None:
    """Measure cells side by side, those that share what is tuned in one process."""
    chosen = [cell for cell in CELLS if not options.cells or cell.name in options.cells]
    groups = [
        [cell.name for cell in chosen if cell.tuned_as == name] for name in dict.fromkeys(c.tuned_as for c in chosen)
    ]
    (rows, earlier), files = known(options), [options.state / f"{cells[0]}.json" for cells in groups]
    waiting, running = list(zip(groups, files, strict=True)), list[subprocess.Popen[bytes]]()
    failed = 0
    options.state.mkdir(parents=True, exist_ok=True)
    if options.json.is_file():
        for file in files:
            shutil.copy(options.json, file)
    while waiting or running:
        ended = [process for process in running if process.poll() is not None]
        failed += sum(process.returncode != 0 for process in ended)
        running = [process for process in running if process not in ended]
        while waiting and len(running) < count:
            cells, file = waiting.pop(0)
            own = ["--processes", "1", "--json", str(file), "--cells", *cells]
            running.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *own]))
        time.sleep(2.0)
        for cells, file in zip(groups, files, strict=True):
            if file.is_file():
                found = json.loads(file.read_text(encoding="utf-8"))["cells"]
                rows |= {name: {row["method"]: row for row in found[name]} for name in cells if name in found}
        save(options, rows, earlier, device)
    if failed:
        raise SystemExit(
            f"{failed} of {len(groups)} processes failed, as they say above. The rest is in {options.json}."
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--captions", choices=("choosing", "reporting", "last"), default="choosing")
    parser.add_argument("--cells", nargs="*", metavar="NAME", help=f"such as {CELLS[0].name} (all)")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="methods with these words in their names")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--tuning-images", type=int, default=128)
    # With all tuning images in one batch, weights are fitted in one pass of the closed loop, not in several.
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", help="cuda or cpu (a GPU if there is one)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long")
    parser.add_argument("--state", type=Path, required=True, help="where the next run goes on")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    parser.add_argument("--processes", type=int, default=1, help="that share the device")
    parser.add_argument("--alone", type=int, default=0, metavar="N", help="make N images of each cell, one at a time")
    parser.add_argument("--tf32", action="store_true", help="products of matrices with ten bits, three times as fast")
    options = parser.parse_args(arguments)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    if options.processes > 1:
        in_processes(options.processes, options, device)
        return
    table = Table(options)
    for _ in table.run():
        save(options, table.rows, table.earlier, device)


if __name__ == "__main__":
    main()
