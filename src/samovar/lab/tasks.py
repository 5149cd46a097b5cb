"""Images to make, and the prompts that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from ..core.errors import SettingError, nearest
from ..core.settings import count, read_as

SHIPPED = ("testing", "tuning")
"""Lists of captions for the built-in model. No emoji is in both."""


class Task(NamedTuple):
    """One image to make."""

    prompt: str
    seed: int


def make_tasks(prompts: Sequence[str], num_seeds: int, first_seed: int) -> list[Task]:
    """Every prompt with `num_seeds` seeds. No two images share a seed, so that no noise counts twice."""
    read_as(count(1), num_seeds, "seeds")
    repeated = [prompt for prompt in prompts for _ in range(num_seeds)]
    return [Task(prompt, first_seed + number) for number, prompt in enumerate(repeated)]


def check_disjoint(tuning: Sequence[Task], testing: Sequence[Task]) -> None:
    """Refuse to test a setting on prompts that it was tuned on."""
    shared = {task.prompt for task in tuning} & {task.prompt for task in testing}
    if shared:
        raise SettingError(f"The prompt {min(shared)!r} is in both lists, for tuning and for testing. Keep them apart.")


def read_prompts(source: str | Path, num_prompts: int | None = None) -> list[str]:
    """The prompts of a file, or of a shipped list by name; only the first ones if a number is given.

    A file has one prompt per line. Empty lines and lines that begin with `#` are ignored.
    """
    if isinstance(source, str) and source in SHIPPED:
        text = (resources.files(__package__) / "data" / f"{source}.txt").read_text(encoding="utf-8")
    else:
        file = Path(source).expanduser()
        if not file.is_file():
            hint = nearest(str(source), SHIPPED)
            raise SettingError(f"{str(source)!r} is neither a file of prompts nor a shipped list. {hint}")
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SettingError(f"{str(source)!r} is not UTF-8 text: {error}. Save it as UTF-8.") from error
    lines = (line.strip() for line in text.splitlines())
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise SettingError(f"{str(source)!r} contains no prompts. Write one per line.")
    if num_prompts is not None:
        read_as(count(1, len(prompts)), num_prompts, "num_prompts", f"{str(source)!r}: num_prompts")
    return prompts[:num_prompts]
