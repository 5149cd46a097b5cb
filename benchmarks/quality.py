"""Quality with skipped steps, beside other caches and fewer plain steps, on the built-in model.

    python benchmarks/quality.py --device cuda --dtype float32 --json benchmarks/results/quality.json

One process: settings are planned and tuned on 128 captions, then everything is measured on 64 others with 4 seeds each,
50 steps. A setting is tuned for three levels each of PSNR, LPIPS and speed, and checked on those others. What is
done is kept in `--state` until the end, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from caches import all_methods, bench

from samovar.core.errors import SettingError
from samovar.engine import OmniDiffusionSamplingParams
from samovar.lab import Journal, Runner, Session, make_tasks, read_prompts
from samovar.lab.progress import Progress
from samovar.lab.tasks import check_disjoint
from samovar.lab.tune import Target, tune
from samovar.lab.verdict import sentences

TARGETS = [("psnr", 35.0), ("psnr", 40.0), ("psnr", 45.0), ("lpips", 0.02), ("lpips", 0.01), ("lpips", 0.005),
           ("speedup", 2.0), ("speedup", 3.0), ("speedup", 5.0)]  # fmt: skip


def tuned(tuning: Session, testing: Session) -> list[dict[str, Any]]:
    """Each target, the setting chosen for it, and how many images meet it on captions that were not used to choose."""
    rows = []
    for metric, value in TARGETS:
        target = Target(metric, value)  # type: ignore[arg-type]
        try:
            found = tune(tuning, testing, target)
        except SettingError as error:
            rows.append({"promise": str(target), "problem": str(error)})
            continue
        held_out = {name: value for name, value in found.held_out.to_dict().items() if name != "each"}
        plain, images = found.plain.quality, found.held_out.images
        rows.append(
            {
                "promise": str(target), "setting": found.setting("benchmarks/quality.py", tuning.runner.params.given()),
                "held_out": held_out,
                "share_kept": found.share_met, "num_tried": len(found.tried),
                "worst": {"psnr": min(q.psnr for q in images), "lpips": max(q.lpips for q in images)},
                "plain_steps": plain._asdict(), "verdict": sentences(found.held_out, testing.tasks),
            }
        )  # fmt: skip
        print(
            f"{target}: {held_out['computed']} computed, {held_out['psnr']} dB, met by {found.share_met:.1%}",
            flush=True,
        )
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    params = OmniDiffusionSamplingParams(num_inference_steps=options.steps)
    runner = Runner("emoji", params, options.batch, options.dtype, options.device)
    learning = make_tasks(read_prompts("tuning", options.tuning_captions), 1, 0)
    judging = make_tasks(read_prompts("testing", options.captions), options.seeds, 100_000)
    check_disjoint(learning, judging)
    about = {**runner.about(), "tuning": learning, "testing": judging}
    journal = Journal(options.state, about)
    started = time.perf_counter()

    def report(text: str) -> None:
        print(f"{time.perf_counter() - started:5.0f} s  {text}", flush=True)

    tuning = Session(runner, learning, journal, "tuning")
    testing = Session(runner, judging, journal, "testing", Progress(report))
    methods = all_methods(tuning, only=options.only)
    print(f"planned in {time.perf_counter() - started:.0f} s; {len(methods)} methods", flush=True)
    rows = bench(testing, methods)
    print(f"measured after {time.perf_counter() - started:.0f} s", flush=True)
    promises = [] if options.no_tune else tuned(tuning, testing)
    about = runner.about() | {"date": date.today().isoformat(), "pictures": len(judging), "captions": options.captions}
    return {"about": about, "seconds": round(time.perf_counter() - started), "rows": rows, "promises": promises}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", help="cuda or cpu (a GPU if there is one)")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--captions", type=int, default=64)
    parser.add_argument("--tuning-captions", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="methods with these words in their names")
    parser.add_argument("--no-tune", action="store_true", help="only the curves")
    parser.add_argument("--state", type=Path, default=Path("quality-state"), help="where an interrupted run goes on")
    parser.add_argument("--json", type=Path, required=True, help="where the result goes")
    options = parser.parse_args()
    result = measure(options)
    command = f"python benchmarks/quality.py {' '.join(sys.argv[1:])}"
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"command": command, **result}) + "\n")
    shutil.rmtree(options.state)
    for row in result["rows"]:
        if "problem" in row:
            print(f"{row['method']:70} {row['problem']}")
        else:
            figures = f"{row['computed']:6.2f} {row['psnr']:6.2f} dB {row['lpips']:.5f}"
            print(f"{row['method'][:70]:70} {figures}")


if __name__ == "__main__":
    main()
