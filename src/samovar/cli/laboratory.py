"""How good is a setting, and which is best? `samovar compare`, `calibrate`, `tune` and `bench`."""

from __future__ import annotations

import argparse
import json
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, nearest
from ..files import is_file_name, read_json
from .terminal import Status, aligned

if TYPE_CHECKING:
    from ..lab.journal import Journal
    from ..lab.methods import Method
    from ..lab.studio import Studio, Task


def add_compare(commands: Any) -> None:
    """Make the command known."""
    compare = _command(
        commands,
        "compare",
        "show what settings do to pictures, beside the exact ones",
        "Make the same pictures exactly, with each setting, and with as many plain steps as take the same time. Writes "
        "a contact sheet, a page with a slider, and JSON.",
        "  samovar compare --cache-config forecast --cache-config '{\"rel_l1_thresh\": 0.2}' --num-prompts 4\n"
        "  samovar compare ./flux --prompts prompts.txt --cache-config tuned.json --steps 50",
        output="comparison",
    )
    compare.add_argument(
        "--cache-config", action="append", metavar="SETTING", default=[],
        help="a cache by name, settings as JSON, or a file that tune wrote; may be repeated (forecast, tea_cache)",
    )  # fmt: skip
    _add_tasks(compare, prompts="testing", num_prompts=4, seeds=1)
    compare.set_defaults(run=_compare)


def add_calibrate(commands: Any) -> None:
    """Make the command known."""
    calibrate = _command(
        commands,
        "calibrate",
        "fit TeaCache's coefficients to a model",
        "Make pictures without skipping, see how far a change of the signal tells that of the output, and fit the "
        "polynomial. Also measures what using an old output again would cost at every two steps.",
        "  samovar calibrate ./my-model --prompts prompts.txt --steps 50",
        output="calibration",
    )
    _add_tasks(calibrate, prompts="tuning", num_prompts=16, seeds=1, batch=False)
    calibrate.set_defaults(run=_calibrate, batch=1)


def add_tune(commands: Any) -> None:
    """Make the command known."""
    tune = _command(
        commands,
        "tune",
        "find the fastest setting that keeps a promise",
        "Search thresholds, forecasts and schedules for the fastest setting with which 95 of 100 pictures keep a "
        "promise, and check it on prompts that had no say in it. Writes setting.json, which --cache-config takes.",
        "  samovar tune --target-psnr 30 --steps 50\n"
        "  samovar tune ./flux --target-speedup 2 --prompts mine.txt --test-prompts others.txt",
        output="tuned",
    )
    target = tune.add_mutually_exclusive_group(required=True)
    target.add_argument("--target-psnr", type=float, metavar="DB", help="at least so near")
    target.add_argument("--target-lpips", type=float, metavar="X", help="at most so different")
    target.add_argument("--target-speedup", type=float, metavar="X", help="so many times fewer forwards")
    _add_refine(tune)
    _add_tasks(tune, prompts="tuning", num_prompts=48, seeds=1)
    _add_testing(tune, num_prompts=48)
    tune.set_defaults(run=_tune)


def add_bench(commands: Any) -> None:
    """Make the command known."""
    bench = _command(
        commands,
        "bench",
        "compare our curves with those of other caches",
        "Measure our settings and, where they are installed, diffusers' caches and cache-dit: same prompts, seeds and "
        "attention, one process. Schedules are planned on other prompts. Writes bench.json and bench.png.",
        "  samovar bench --steps 50 --device cuda --dtype float32 --batch 64\n  samovar bench --plot-from bench.json",
        output="bench",
    )
    _add_refine(bench)
    bench.add_argument("--plot-from", type=Path, metavar="FILE", help="only draw the curves of a saved bench.json")
    bench.add_argument("--only", metavar="WORDS", action="append", default=[],
                       help="only methods whose name has these words; may be repeated")  # fmt: skip
    bench.add_argument("--cache-config", action="append", metavar="SETTING", default=[],
                       help="a setting of your own, as in compare; may be repeated")  # fmt: skip
    bench.add_argument("--alone", type=int, default=8, metavar="N",
                       help="pictures that adaptive methods also make one at a time, beside a batch (8)")  # fmt: skip
    _add_tasks(bench, prompts="tuning", num_prompts=48, seeds=1)
    _add_testing(bench, num_prompts=64, seeds=4)
    bench.set_defaults(run=_bench)


def _command(commands: Any, name: str, help: str, description: str, examples: str, output: str) -> Any:
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}\n\nInterrupted, it goes on where it stopped when it is called again.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", default="emoji", help="a built-in model, a folder, or a name of the hub (emoji)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", default=Path(output), help=f"({output})")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress, only errors")
    group = parser.add_argument_group("the pictures")
    group.add_argument(
        "--steps", type=int, dest="num_inference_steps", metavar="N", help="of an exact picture (the model's)"
    )
    group.add_argument("--height", type=int, metavar="PIXELS", help="(the model's)")
    group.add_argument("--width", type=int, metavar="PIXELS", help="likewise")
    group.add_argument("--true-cfg-scale", type=float, metavar="X", help="likewise")
    group.add_argument("--guidance-scale", type=float, metavar="X", help="likewise")
    group.add_argument("--negative-prompt", metavar="TEXT", help="likewise")
    group.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="likewise")
    group.add_argument("--dtype", default="auto", metavar="TYPE", help="float32, bfloat16 or float16 (auto)")
    group.add_argument("--device", help="cpu, cuda, cuda:1 ... (a GPU if there is one)")
    return parser


def _add_tasks(parser: Any, prompts: str, num_prompts: int, seeds: int, batch: bool = True) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        default=prompts,
        metavar="FILE",
        help=f"one a line, or tuning or testing, which come with the lab ({prompts})",
    )
    group.add_argument("--num-prompts", type=int, metavar="N", help=f"the first of them (at most {num_prompts})")
    group.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"pictures of each prompt ({seeds})")
    group.add_argument("--first-seed", type=int, default=0, metavar="N", help="(0)")
    if batch:
        group.add_argument("--batch", type=int, default=1, metavar="N", help="pictures at a time (1)")
    parser.set_defaults(usual_num_prompts=num_prompts)


def _add_refine(parser: Any) -> None:
    parser.add_argument(
        "--refine", type=int, default=0, metavar="N", help="changes of a planned schedule to try on pictures (0)"
    )


def _add_testing(parser: Any, num_prompts: int, seeds: int = 1) -> None:
    group = parser.add_argument_group("prompts that have no say in what is chosen")
    group.add_argument("--test-prompts", default="testing", metavar="FILE", help="likewise (testing)")
    group.add_argument("--num-test-prompts", type=int, metavar="N", help=f"likewise (at most {num_prompts})")
    group.add_argument("--test-seeds", type=int, default=seeds, metavar="N", help=f"likewise ({seeds})")
    parser.set_defaults(usual_num_test_prompts=num_prompts)


# ------------------------------------------------------------------------------------------------ the commands


def _compare(options: argparse.Namespace) -> int:
    from ..lab.compare import compare
    from ..lab.methods import ours
    from ..lab.report import contact_sheet, figures_of, page
    from ..lab.session import Session

    methods = [_method(text) for text in options.cache_config] or [ours("forecast", {}), ours("tea_cache", {})]
    tasks = _tasks(options)
    # Their pictures are in folders by number.
    wish = {"tasks": tasks, "methods": [{"name": method.name, **method.settings} for method in methods]}
    studio, journal = _open(options, wish)
    session = Session(studio, tasks, journal, progress=_shows(options))
    found = compare(session, methods, options.output / "pictures")
    about = studio.about() | {"date": date.today().isoformat()}
    contact_sheet(found).save(options.output / "sheet.png")
    title = f"{studio.config.model}: {len(tasks)} pictures, {studio.steps} steps"
    (options.output / "compare.html").write_text(page(found, title), encoding="utf-8")
    report = {"about": about, **found.to_dict()}
    _finish(options, journal, "compare.json", report)
    if not (options.json or options.quiet):
        lines = [figures_of(row) for row in found.rows]
        _print_table([list(lines[0]), *(list(line.values()) for line in lines)])
        print(f"{options.output / 'compare.html'}, {options.output / 'sheet.png'}")
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    from ..lab.calibrate import calibrate, check_tasks
    from ..lab.session import Session

    tasks = _tasks(options)
    check_tasks(tasks)
    studio, journal = _open(options, {"tasks": tasks})
    session = Session(studio, tasks, journal, progress=_shows(options))
    found = calibrate(session, _origin(studio, "calibrate", len(tasks)))
    report = {"about": studio.about(), "date": date.today().isoformat(), **found.to_dict()}
    _finish(options, journal, "calibration.json", report)
    if not (options.json or options.quiet):
        for name, fit in found.branches.items():
            print(f"{name}: degree {fit.degree}, {fit.verdict}")
        values = ", ".join(f"{value:.6g}" for value in found.fit.coefficients)
        print(f"coefficients: [{values}], for signals from {found.fit.signal_from:.4f} to {found.fit.signal_to:.4f}")
        print(options.output / "calibration.json")
    return 0


def _tune(options: argparse.Namespace) -> int:
    from ..lab.session import Session
    from ..lab.tune import Promise, tune

    given = {name: getattr(options, f"target_{name}") for name in ("psnr", "lpips", "speedup")}
    target = next(name for name, value in given.items() if value is not None)
    promise = Promise(target, given[target])  # type: ignore[arg-type]
    tasks, test_tasks = _apart(options)
    studio, journal = _open(options, {"tasks": tasks, "test_tasks": test_tasks})
    tuning = Session(studio, tasks, journal, "tuning", _shows(options))
    testing = Session(studio, test_tasks, journal, "testing", _shows(options))
    found = tune(tuning, testing, promise, refinements=options.refine)
    setting = {"model": options.model, **found.setting(_origin(studio, "tune", len(tasks)))}
    (options.output / "setting.json").write_text(json.dumps(setting, indent=2) + "\n", encoding="utf-8")
    _finish(options, journal, "tune.json", {"about": studio.about(), "setting": setting, **found.to_dict()})
    if not (options.json or options.quiet):
        rows = [(r.method, f"{r.computed:g}", f"{r.quality.psnr:.2f}", f"{r.quality.lpips:.5f}",
                 f"{promise.bound(r.pictures):.5g}", "yes" if promise.is_kept(r) else "no")
                for r in found.tried]  # fmt: skip
        _print_table([("tried", "computed", "PSNR dB", "LPIPS", "95 of 100 reach", "keeps it"), *rows])
        kept, rest = found.held_out, found.plain
        print(f"\nchosen: {found.row.method}")
        print(f"on {len(kept.pictures)} held-out pictures: {kept.computed:g} of {kept.steps} steps computed, "
              f"{kept.speedup:.2f}x, {kept.quality.psnr:.2f} dB, LPIPS {kept.quality.lpips:.5f}; {promise}: kept "
              f"by {found.share_kept:.1%}{'' if found.is_kept else ', WHICH IS TOO FEW'}")  # fmt: skip
        beaten = "" if found.is_worth_it else ": nearer, so use these and no cache"
        print(f"{rest.steps} plain steps: {rest.quality.psnr:.2f} dB, LPIPS {rest.quality.lpips:.5f}{beaten}")
        print(options.output / "setting.json")
    return 0 if found.is_kept else 1


def _bench(options: argparse.Namespace) -> int:
    from ..lab.bench import all_methods, bench, check_only

    if options.plot_from is not None:
        picture = _plot(options.plot_from)
        print(json.dumps({"file": str(picture)}) if options.json else picture)
        return 0
    from ..lab.report import BENCH_COLUMNS, bench_line
    from ..lab.session import Session
    from ..lab.studio import Studio, StudioConfig

    extra = [_method(text) for text in options.cache_config]
    tasks, test_tasks = _apart(options)
    wish = {"tasks": tasks, "test_tasks": test_tasks, "alone": options.alone, "refine": options.refine}
    check_only(options.only, extra)
    (studio, journal), shows = _open(options, wish), _shows(options)
    methods = all_methods(Session(studio, tasks, journal, "tuning", shows), extra, options.refine)
    chosen = [m for m in methods if not options.only or any(w.lower() in m.name.lower() for w in options.only)]
    if not chosen:
        raise SettingError(f"--only {options.only} leaves none of: {', '.join(method.name for method in methods)}.")
    alone = None
    if options.alone and studio.config.batch > 1:
        single = StudioConfig(studio.config.model, studio.config.dtype, studio.config.device, studio.params)
        alone = Session(Studio(single, studio.pipeline), test_tasks[: options.alone], journal, "alone", shows)
    rows = bench(Session(studio, test_tasks, journal, progress=shows), chosen, alone)
    about = studio.about() | {"date": date.today().isoformat(), "pictures": len(test_tasks)}
    report = {"about": about, "tasks": [task._asdict() for task in test_tasks], "rows": rows}
    _finish(options, journal, "bench.json", report)
    if not (options.json or options.quiet):
        _print_table([BENCH_COLUMNS, *map(bench_line, rows)])
        print(options.output / "bench.json")
    if find_spec("matplotlib") is not None:  # Else it can be done elsewhere, from the file.
        _plot(options.output / "bench.json")
    return 0


def _plot(file: Path) -> Path:
    """Draw the curves of a saved bench beside it."""
    from ..lab.plot import draw

    if not file.is_file():
        raise SettingError(f"{str(file)!r} is no file. Give the bench.json that a bench wrote.")
    report = read_json(file)
    if not isinstance(report.get("rows"), list) or not isinstance(report.get("about"), dict):
        raise SettingError(f"{str(file)!r} was not written by a bench: it has no rows. Give its bench.json.")
    about = report["about"]
    if "pictures" not in about:
        raise SettingError(f"{str(file)!r} was not written by a bench, but by another command. Give a bench.json.")
    picture = file.with_suffix(".png")
    words = f"{about['model']}, {about['pictures']} pictures, {about['settings']['num_inference_steps']} steps"
    draw(report["rows"], picture, f"{words}, {about['dtype']}, {about['device']}, batch {about['batch']}")
    return picture


# ------------------------------------------------------------------------------------------------ what they share


def _tasks(options: argparse.Namespace, which: str = "") -> list[Task]:
    from ..lab.prompts import read_prompts
    from ..lab.studio import tasks_of

    source = getattr(options, f"{which}prompts")
    count = getattr(options, f"num_{which}prompts")
    prompts = read_prompts(source, count)
    if count is None:
        prompts = prompts[: getattr(options, f"usual_num_{which}prompts")]
    # Held-out pictures have noise of their own too.
    first = options.first_seed + (100_000 if which else 0)
    return tasks_of(prompts, getattr(options, f"{which}seeds"), first)


def _apart(options: argparse.Namespace) -> tuple[list[Task], list[Task]]:
    """Tasks for tuning, and others to judge by."""
    from ..lab.studio import keep_apart

    tasks, test_tasks = _tasks(options), _tasks(options, "test_")
    keep_apart(tasks, test_tasks)
    return tasks, test_tasks


def _open(options: argparse.Namespace, wish: dict[str, Any]) -> tuple[Studio, Journal]:
    """A loaded model, and what an interrupted run left."""
    with Status("starting", options.quiet):
        import dataclasses

        from ..engine import OmniDiffusionSamplingParams
        from ..lab.journal import Journal
        from ..lab.studio import Studio, StudioConfig

        names = [field.name for field in dataclasses.fields(OmniDiffusionSamplingParams)]
        given = {name: value for name, value in vars(options).items() if name in names}
        params = OmniDiffusionSamplingParams(**given)
        studio = Studio(StudioConfig(options.model, options.dtype, options.device, params, options.batch))
        journal = Journal(options.output / "state", studio.about() | wish)
    if journal.num_known and not (options.quiet or options.json):
        print(f"going on with {journal.num_known} measurements from {journal.folder}")
    return studio, journal


def _finish(options: argparse.Namespace, journal: Journal, name: str, report: dict[str, Any]) -> None:
    """Write the result; only then is what was kept for going on let go."""
    text = json.dumps(report)
    (options.output / name).write_text(text + "\n", encoding="utf-8")
    journal.close()
    if options.json:
        print(text)


def _method(text: str) -> Method:
    """The setting that is meant: a cache by name, settings as JSON, or a file."""
    from ..cache import cache_names
    from ..lab.methods import read_method

    if text in cache_names() or is_file_name(text):
        return read_method(text)
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        why = f" ({error})." if text.lstrip().startswith("{") else f". {nearest(text, cache_names())}"
        raise SettingError(
            f"cache={text!r} is neither a cache ({', '.join(cache_names())}), nor a file, nor JSON such as "
            f"'{{\"rel_l1_thresh\": 0.2}}'{why}",
            param="cache",
        ) from error
    if not isinstance(settings, dict):
        raise SettingError(f"cache={text!r} must be a JSON object: '{{\"name\": value}}'.", param="cache")
    return read_method(settings)


def _origin(studio: Studio, command: str, num_pictures: int) -> str:
    about = studio.about()
    return (
        f"samovar {command} of {about['model']}, {num_pictures} pictures of {studio.steps} steps, {about['dtype']}, "
        f"{date.today().isoformat()}, samovar {about['samovar']}, diffusers {about['diffusers']}"
    )


def _shows(options: argparse.Namespace) -> bool:
    return Status.is_shown(options.quiet or options.json)


def _print_table(rows: Any) -> None:
    for line in aligned(rows, right=range(1, 6)):
        print(line)
