"""Which prompts are tuned with, and which are kept for testing?"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..errors import SettingError, nearest

SHIPPED = ("testing", "tuning")
"""Captions of the built-in model that come with the lab. No emoji is in both."""


def read_prompts(source: str | Path, count: int | None = None) -> list[str]:
    """The prompts of a file, or of a list that comes with the lab, by its name; the first `count` of them.

    A file has one prompt a line; empty lines and those that begin with `#` do not count.
    """
    if isinstance(source, str) and source in SHIPPED:
        text = (resources.files(__package__) / "data" / f"{source}.txt").read_text(encoding="utf-8")
    else:
        file = Path(source).expanduser()
        if not file.is_file():
            raise SettingError(
                f"{str(source)!r} is no file of prompts, one a line, nor a list that comes with the lab. "
                f"{nearest(str(source), SHIPPED)}"
            )
        try:
            text = file.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise SettingError(
                f"{str(source)!r} is not UTF-8 text: {error}. Save it as such, one prompt a line."
            ) from error
    lines = (line.strip() for line in text.splitlines())
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise SettingError(f"{str(source)!r} holds no prompts. Write one a line.")
    if count is None:
        return prompts
    if type(count) is not int or not 1 <= count <= len(prompts):
        raise SettingError(f"{count!r} prompts were asked for; {str(source)!r} has {len(prompts)}.")
    return prompts[:count]
