"""What the lab's commands share: the model, the folder, the prompts, and the settings to measure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..builtin import BUILTIN_MODELS
from ..core.errors import SettingError
from ..core.files import is_file_name, read_settings
from . import arguments
from .terminal import Status

if TYPE_CHECKING:
    from ..lab.methods import Method
    from ..lab.session import Session
    from ..lab.tasks import Task


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
