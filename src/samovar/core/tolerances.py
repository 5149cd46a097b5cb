"""How much may a cache lose? By number, or by name."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

from .errors import SettingError, nearest

TOLERANCES: Mapping[str, float] = {"exact": 0.0, "high": 0.02, "fast": 0.06}
"""How far the skipped steps of a gap may take the sample off its way, relative to its size."""


def read_tolerance(value: Any, name: str = "tolerance") -> float:
    """The number that a tolerance stands for; it may be written out, as on a command line."""
    if isinstance(value, str) and value in TOLERANCES:
        return TOLERANCES[value]
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    with contextlib.suppress(ValueError):
        number = float(value) if isinstance(value, str) else number
    if 0 <= number < math.inf:
        return float(number)
    hint = nearest(value, TOLERANCES) if isinstance(value, str) else ""
    expected = f"a number from 0 upwards or one of {', '.join(TOLERANCES)}"
    raise SettingError(f"{name}={value!r:.200}; expected {expected}. {hint}".rstrip(), param=name)
