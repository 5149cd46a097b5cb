"""Measure settings and choose one: `samovar compare`, `calibrate` and `tune`, which load the lab when they run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ..builtin import BUILTIN_MODELS
from ..core.errors import SettingError
from ..core.files import is_file_name, read_settings
from . import arguments
from .terminal import Status, aligned

if TYPE_CHECKING:
    from ..lab.methods import Method
    from ..lab.session import Session
    from ..lab.tasks import Task

_CACHE_HELP = "a cache by name, its settings as JSON, or a file saved by tune; may be repeated"


_FRAMES = """
    --frames N :num_frames   frames of a video
"""


def add_compare(commands: Any) -> None:
    parser = _add_command(commands, _compare, is_quantised=False)
    parser.add_argument("--cache", action="append", metavar="SETTING", help=f"{_CACHE_HELP} (auto, tea_cache)")
    parser.add_argument("--quantization", action="append", metavar="KIND",
                        help="weights to set beside the exact ones: int8, fp8, int4, nf4 or a .gguf file, or "
                        "COMPONENT=KIND,COMPONENT=KIND; may be repeated")  # fmt: skip
    _add_prompts(parser, "testing", 4)


def add_calibrate(commands: Any) -> None:
    _add_prompts(_add_command(commands, _calibrate), "tuning", 16)


def add_tune(commands: Any) -> None:
    parser = _add_command(commands, _tune)
    target = parser.add_mutually_exclusive_group(required=True)
    for name, text in {
        "psnr": "PSNR to the exact images in dB, at least",
        "lpips": "LPIPS to the exact images, at most",
        "speedup": "this many times fewer forwards",
    }.items():
        target.add_argument(f"--target-{name}", type=float, metavar="X", help=text)
    _add_prompts(parser, "tuning", 48)
    _add_prompts(parser, "testing", 48, test="test-")


def _add_command(commands: Any, run: Callable[[argparse.Namespace], int], is_quantised: bool = True) -> Any:
    """`is_quantised`: whether the images that count as exact may be those of quantised weights."""
    parser = arguments.add_command(commands, run)
    arguments.add_model(parser)
    name = run.__name__.lstrip("_")
    parser.set_defaults(command=name)
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help=f"({name})")
    arguments.add_options(parser, arguments.OUTPUT)
    group = arguments.add_options(parser, arguments.IMAGE + _FRAMES + arguments.DEVICE, "images")
    group.add_argument("--batch", type=int, default=1, metavar="N", help="images per call (1)")
    group.add_argument("--first-seed", type=int, default=0, metavar="N", help="(0)")
    lines = arguments.MEMORY + arguments.QUANTIZATION * is_quantised + arguments.TRUST
    note = "As in generate. Offload leaves images bit for bit the same."
    group = arguments.add_options(parser, lines, "speed and memory", note)
    if name != "calibrate":  # Which is not timed.
        arguments.add_compile(group)
    return parser


def _add_prompts(parser: Any, source: str, most: int, seeds: int = 1, test: str = "") -> None:
    """Options for the prompts to use, or with `test="test-"` for those that are kept for testing."""
    group = parser.add_argument_group("prompts for testing, which are not used to choose" if test else "prompts")
    text = f"one per line; or tuning or testing, which are shipped ({source})"
    group.add_argument(f"--{test}prompts", default=source, metavar="FILE", help=text)
    group.add_argument(f"--num-{test}prompts", type=int, metavar="N", help=f"use the first N (at most {most})")
    group.add_argument(f"--{test}seeds", type=int, default=seeds, metavar="N", help=f"images per prompt ({seeds})")
    parser.set_defaults(**{f"most_{test.replace('-', '_')}prompts": most})


# ------------------------------------------------------------------------------------------------ what they share


class Experiment:
    """A loaded model, an output folder, and the journal of an interrupted run."""

    def __init__(self, options: argparse.Namespace, status: Status, depends: dict[str, Any]) -> None:
        from ..engine import OmniDiffusionSamplingParams
        from ..lab.journal import Journal
        from ..lab.progress import Progress
        from ..lab.runner import ENGINE_SETTINGS, Runner

        params = OmniDiffusionSamplingParams(**arguments.settings_of(options, OmniDiffusionSamplingParams))
        names = {*ENGINE_SETTINGS, "dtype", "device"}
        if options.command == "compare":  # What is compared with the exact images is no setting of theirs.
            names.remove("quantization")
        settings = arguments.engine_settings(options, names)
        self.runner = Runner(_model_of(options), params, options.batch, **settings)
        self.folder: Path = options.output or Path(options.command)
        self._options, self._status = options, status
        self._about = self.runner.about() | {"date": date.today().isoformat()}
        self.journal = Journal(self.folder / "state", self.runner.about() | depends)
        self.progress = Progress(status.update)
        if len(self.journal):
            status.note(f"resuming with {len(self.journal)} measurements from {self.journal.folder}")

    def session(self, tasks: Sequence[Task], name: str = "", is_timed: bool = False) -> Session:
        from ..lab.session import Session

        return Session(self.runner, tasks, self.journal, name, self.progress, is_timed=is_timed)

    def origin(self, tasks: Sequence[Task]) -> str:
        from ..core.quantisers import quantised_as

        about = self._about
        kinds = sorted({kind for model in self.runner.denoisers.values() if (kind := quantised_as(model))})
        return (
            f"samovar {self._options.command} of {about['model']}, {len(tasks)} images of {self.runner.steps} steps, "
            f"{', '.join([about['dtype'], *kinds])}, {about['date']}, samovar {about['samovar']}, "
            f"diffusers {about['diffusers']}"
        )

    def finish(self, name: str, result: dict[str, Any]) -> None:
        """Write the result, and only then delete the journal."""
        self._result = json.dumps({"about": self._about, **result})
        (self.folder / name).write_text(self._result + "\n", encoding="utf-8")
        self.journal.delete()

    def say(self, *lines: str) -> None:
        """Print the result for programs, or these lines for people."""
        if self._options.json or not self._options.quiet:
            print(self._result if self._options.json else "\n".join(lines))


@contextmanager
def experiment(options: argparse.Namespace, **depends: Any) -> Iterator[Experiment]:
    """`depends` are all settings that the figures depend on, besides the model's."""
    with Status("loading the model", options.quiet) as status:
        experiment = Experiment(options, status, depends)
        try:
            yield experiment
        finally:
            experiment.runner.close()


def _model_of(options: argparse.Namespace) -> str:
    return arguments.model_of(options) or "emoji"


def methods_of(options: argparse.Namespace) -> list[Method]:
    from ..core.settings import table
    from ..engine import OmniDiffusionConfig
    from ..lab.methods import read_method

    caches = options.cache or []
    _use_saved_params(options, caches)
    return [read_method(table(OmniDiffusionConfig)["cache"].parse(text)) for text in caches]


def check_quantisations(options: argparse.Namespace, settings: Sequence[Any]) -> None:
    """Refuse quantisations that cannot be had of this model, before it is loaded."""
    from ..arch.skeleton import read_skeleton
    from ..engine.models import fetch_model
    from ..engine.quantize import Quantization
    from ..engine.settings import OmniDiffusionConfig

    device = OmniDiffusionConfig(device=options.device).execution_device()
    if wanted := [Quantization.read(setting, device) for setting in settings]:
        folder = fetch_model(_model_of(options), trust_remote_code=bool(options.trust_remote_code))
        _, parts = read_skeleton(str(folder))
        for each in filter(None, wanted):
            each.applied(parts)


def _use_saved_params(options: argparse.Namespace, caches: Sequence[str]) -> None:
    """Take the steps, the guidance, the size and the rest from saved settings, unless they are given. Refuse those of
    another model, and schedules for other steps, now, before it is loaded."""
    from ..cache import TunedFor
    from ..engine.models import fetch_model
    from ..engine.request import saved_defaults

    origins: dict[str, str] = {}
    for file in filter(is_file_name, caches):
        tuned_for = TunedFor.read(file)
        if tuned_for is not None:
            tuned_for.check_folder(fetch_model(_model_of(options)))
        for name, value in saved_defaults(file).given().items():
            chosen = getattr(options, name, None)
            if name in origins and chosen != value:
                message = f"{origins[name]!r} was tuned with {name}={chosen!r} and {file!r} with {value!r}. Say which:"
                raise SettingError(f"{message} {name}.", param=name)
            is_scheduled = name == "num_inference_steps" and "schedule" in read_settings(file, "cache")
            if is_scheduled and chosen not in (None, str(value), value):
                message = f"num_inference_steps={chosen}, but {file!r} has a schedule for {value} steps."
                raise SettingError(f"{message} Leave it out, or tune again with this number.", param=name)
            if chosen is None:
                setattr(options, name, value)
                origins[name] = file
    if origins and not options.quiet:
        taken = ", ".join(f"{name}={getattr(options, name)!r}" for name in origins)
        print(f"samovar: {taken}, as saved in {' and '.join(dict.fromkeys(origins.values()))}", file=sys.stderr)


def _check_prompts(options: argparse.Namespace) -> None:
    """Refuse emoji captions on a model that was not made for them: the figures would say nothing about it."""
    from ..engine.models import find_model
    from ..lab.tasks import SHIPPED

    lists = [name for name in ("prompts", "test_prompts") if getattr(options, name, None) in SHIPPED]
    if lists and find_model(_model_of(options)) != BUILTIN_MODELS["emoji"]:
        asked = " and ".join(f"--{name.replace('_', '-')} FILE" for name in lists)
        raise SettingError(
            f"{_model_of(options)!r} needs prompts of its own kind, and the shipped ones are captions of emoji. Give "
            f"{asked}, with one prompt per line.",
            param=lists[0],
        )


def tasks_of(options: argparse.Namespace, which: str = "") -> list[Task]:
    """The images to make, or with `which="test_"` those that are kept for testing."""
    from ..lab.tasks import make_tasks, read_prompts

    _check_prompts(options)
    count = getattr(options, f"num_{which}prompts")
    prompts = read_prompts(getattr(options, f"{which}prompts"), count)
    if count is None:
        prompts = prompts[: getattr(options, f"most_{which}prompts")]
    first = options.first_seed + (100_000 if which else 0)  # Held-out images have their own noise too.
    return make_tasks(prompts, getattr(options, f"{which}seeds"), first)


# ------------------------------------------------------------------------------------------------ the commands


def _compare(options: argparse.Namespace) -> int:
    """Show what settings do to images, beside the exact ones.

    Make the same images exactly, with each setting, and with as many plain steps as it computes. Say what to expect of
    each setting, and write contact sheets, one of them of the worst images, a page with a slider, and JSON. After an
    interruption, the same command resumes.

    examples:
      samovar compare --cache auto --cache '{"rel_l1_thresh": 0.2}' --num-prompts 4
      samovar compare ./flux --prompts prompts.txt --cache tune/setting.json
      samovar compare ./flux --quantization int8 --quantization transformer=int4,text_encoder_2=int8 --cache auto
    """
    from ..lab.compare import compare, contact_sheet, page, table
    from ..lab.methods import cached, quantised

    settings = [arguments.quantization_of([text]) for text in options.quantization or ()]
    check_quantisations(options, settings)
    methods = [*map(quantised, settings), *methods_of(options)] or [cached("auto", {}), cached("tea_cache", {})]
    tasks = tasks_of(options)
    # Images of methods are in folders by number, so other methods are another run.
    with experiment(options, tasks=tasks, methods=[{"name": m.name, **m.settings} for m in methods]) as lab:
        found = compare(lab.session(tasks, is_timed=True), methods, lab.folder / "images")
        contact_sheet(tasks, found.rows).save(lab.folder / "sheet.png")
        for number, row in enumerate(found.judged(), start=1):
            contact_sheet(tasks, [found.rows[0], row], worst_only=True).save(lab.folder / f"worst-{number}.png")
        title = f"{lab.runner.model}: {len(tasks)} images, {lab.runner.steps} steps"
        (lab.folder / "compare.html").write_text(page(found, title), encoding="utf-8")
        lab.finish("compare.json", found.to_dict())
    lab.say(
        *aligned(table(found.rows), right=range(1, 6)),
        "",
        *found.verdict(),
        f"{lab.folder / 'compare.html'}, {lab.folder / 'sheet.png'}, {lab.folder / 'worst-1.png'}",
    )
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    """Fit TeaCache's coefficients to a model.

    Make images without skipping, measure how well the signal predicts the change of the output, and fit the polynomial.
    After an interruption, the same command resumes.

    examples:
      samovar calibrate ./my-model --prompts prompts.txt --steps 50
    """
    from ..lab.calibrate import calibrate, check_tasks

    tasks = tasks_of(options)
    check_tasks(tasks)
    with experiment(options, tasks=tasks) as lab:
        fit = calibrate(lab.runner, tasks, lab.journal, lab.progress)
        lab.finish("calibration.json", fit.to_dict(lab.runner, lab.origin(tasks)))
    values = ", ".join(f"{value:.6g}" for value in fit.coefficients)
    lab.say(
        f"degree {fit.degree}: {fit.verdict}",
        f"coefficients: [{values}], for signals from {fit.signal_from:.4f} to {fit.signal_to:.4f}",
        str(lab.folder / "calibration.json"),
    )
    return 0


def _tune(options: argparse.Namespace) -> int:
    """Find the fastest setting that meets a quality target.

    Search tolerances and schedules for the fastest setting with which 95 of 100 images meet a target, and check it on
    other prompts. Write setting.json, which --cache takes. After an interruption, the same command resumes.

    examples:
      samovar tune --target-psnr 30 --steps 50
      samovar tune ./flux --target-speedup 2 --prompts mine.txt --test-prompts others.txt --gpu-memory 12GiB
    """
    from ..cache.tuned import KEY, describe
    from ..lab.compare import contact_sheet
    from ..lab.tasks import check_disjoint
    from ..lab.tune import Metric, Target, tune
    from ..lab.verdict import sentences

    (metric,) = (name for name in get_args(Metric) if getattr(options, f"target_{name}") is not None)
    target = Target(metric, getattr(options, f"target_{metric}"))
    tasks, test_tasks = tasks_of(options), tasks_of(options, "test_")
    check_disjoint(tasks, test_tasks)
    target.check_tasks(tasks)
    with experiment(options, tasks=tasks, test_tasks=test_tasks) as lab:
        tuning = lab.session(tasks, "tuning")
        testing = lab.session(test_tasks, "testing", is_timed=True)
        found = tune(tuning, testing, target, lab.folder / "images")
        sheet = contact_sheet(test_tasks, [testing.exact(), found.held_out], worst_only=True)
        sheet.save(lab.folder / "worst.png")
        made_for = {"model": lab.runner.model, KEY: describe(lab.runner.pipeline)}
        setting = made_for | found.setting(lab.origin(tasks), lab.runner.params.given())
        file = lab.folder / "setting.json"
        file.write_text(json.dumps(setting, indent=2) + "\n", encoding="utf-8")
        lab.finish("tune.json", {"setting": setting, **found.to_dict()})
    is_bound = target.metric != "speedup"  # A speed-up promises nothing about single images.
    rows = [(r.method.name, f"{r.computed:g}", f"{r.quality.psnr:.2f}", f"{r.quality.lpips:.5f}",
             *[f"{target.bound(r):.5g}"] * is_bound, "yes" if target.is_met(r) else "no")
            for r in found.tried]  # fmt: skip
    head = ("tried", "computed", "PSNR dB", "LPIPS", *["95 of 100 reach"] * is_bound, "meets it")
    held_out, plain = found.held_out, found.plain
    lab.say(
        *aligned([head, *rows], right=range(1, 6)),
        f"\nOn {len(held_out.images)} held-out images:",
        *sentences(held_out, test_tasks),
        f"{target}: {found.verdict}.",
        f"{plain.steps} plain steps: {plain.quality.psnr:.2f} dB, LPIPS {plain.quality.lpips:.5f}, and this setting "
        f"{held_out.quality.psnr:.2f} dB, {held_out.quality.lpips:.5f}"
        f"{'.' if found.is_worth_it else ': use these and no cache.'}",
        f"{file}, {lab.folder / 'worst.png'}",
    )
    return 0 if found.is_met else 1
