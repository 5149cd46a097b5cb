"""Other arguments of its pipeline that a request may set: plain ones that do not say how much is computed."""

from __future__ import annotations

import math
import re
from typing import Any

from ..core.files import brief
from ..core.settings import is_number
from ..engine import PipelineFacts
from .errors import refusal
from .settings import Limits

_HOW_MUCH = re.compile(
    r"(^|_)(num|max|count|height|width|area|size|resolution|frames?|length|duration|batch|steps?|layers?|tiles?)(_|$)"
)
"""Words in the names of arguments that set sizes, counts and durations."""
_SCHEDULES = ("sigmas", "timesteps")
"""Lists with a number for each step."""
_OTHER_PROMPTS = re.compile(r"(negative_)?prompt_\d")
_CLOSED = frozenset({"prompt", "output_type", "return_dict", "num_images_per_prompt", "num_videos_per_prompt",
                     "num_waveforms_per_prompt"})  # fmt: skip


def find_options(facts: PipelineFacts) -> dict[str, bool]:
    """The arguments that a request may set by their names, and whether each is text. A count could be a way around the
    limits, so those have names of their own in requests, or are set by whoever runs the server."""
    output = facts.output
    own = {output.frames_argument, output.fps_argument, output.duration_argument, *facts.inputs.takes}
    found = {name: False for name in _SCHEDULES if name in facts.takes}
    for name in facts.takes - own - _CLOSED:
        types = facts.types.get(name, ())
        if types == (bool,) or (types and not _HOW_MUCH.search(name)):
            found[name] = str in types
        elif _OTHER_PROMPTS.fullmatch(name):
            found[name] = True
    return found


def check_options(values: dict[str, Any], facts: PipelineFacts, limits: Limits) -> None:
    """Refuse what an argument should not be given; its type is checked by the facts."""
    for name, value in values.items():
        for kind, most, what in ((list, limits.max_steps, "steps"), (str, limits.max_prompt_characters, "characters")):
            if isinstance(value, kind) and len(value) > most:
                raise refusal(name, f"{name} has {len(value)} {what}; the limit is {most}.")
        is_schedule = name in _SCHEDULES
        if not (_is_schedule(value) if is_schedule else _is_plain(value)):
            expected = "a list of numbers" if is_schedule else "a plain value"
            raise refusal(name, f"{name} of {facts.class_name} takes {expected}, not {brief(value)}.")


def _is_schedule(value: Any) -> bool:
    return isinstance(value, list) and all(is_number(item) and math.isfinite(item) for item in value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return value.isprintable() or not any("\ud800" <= letter <= "\udfff" for letter in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < 2**63)
