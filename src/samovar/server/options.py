"""Which other arguments of its pipeline may a request set? Plain ones that do not say how much is computed."""

from __future__ import annotations

import math
import re
from typing import Any

from ..engine import PipelineFacts
from .api_errors import refusal
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
        problem = ""
        if isinstance(value, list):
            numbers = [item for item in value if isinstance(item, (int, float)) and not isinstance(item, bool)]
            if name not in _SCHEDULES or len(numbers) < len(value) or not all(map(math.isfinite, numbers)):
                problem = "a list"
            elif len(value) > limits.max_steps:
                raise refusal(name, f"{name} has {len(value)} steps; the limit is {limits.max_steps}.")
        elif isinstance(value, str):
            if len(value) > limits.max_prompt_characters:
                raise refusal(name, f"{name} has {len(value)} characters; the limit is {limits.max_prompt_characters}.")
            if not value.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in value):
                problem = "half a character"
        elif isinstance(value, dict):
            problem = "an object"
        elif isinstance(value, float) and not math.isfinite(value):
            problem = "infinite"
        elif isinstance(value, int) and abs(value) >= 2**63:
            problem = "so large"
        if problem:
            expected = "a list of numbers" if name in _SCHEDULES else "a plain value"
            raise refusal(name, f"{name} of {facts.class_name} takes {expected}; it is {problem}.")
