"""Which errors can Samovar raise?

    SamovarError
    ├── SettingError (ValueError)         a setting or argument that cannot be used
    │   └── StrategyError                 an attention that a parallel strategy cannot compute
    ├── ModelError (ValueError)           a model or class that cannot be found, built or read
    ├── DeclarationError (ValueError)     a declaration that does not fit the model it is about
    ├── HookConflictError (RuntimeError)  two hooks that cannot live on one module
    ├── ShardingError (RuntimeError)      a sharded forward that would have given a wrong result
    └── RankError (RuntimeError)          a rank that failed or died, and with it its group

Every message says what was given, what was expected and what to do. The built-in base of each class
is what a caller who has never heard of Samovar would catch.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SamovarError(Exception):
    """Base of all errors that Samovar raises on purpose."""


class SettingError(SamovarError, ValueError):
    """A setting or argument that cannot be used."""


class ModelError(SamovarError, ValueError):
    """A model or class that cannot be found, built or read."""


class DeclarationError(SamovarError, ValueError):
    """A declaration that does not fit the model it is about."""


class HookConflictError(SamovarError, RuntimeError):
    """Two hooks that cannot live on one module."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the known ones nearest to it, or all of them if they are few."""
    names = sorted(known)
    folded = {candidate.lower(): candidate for candidate in names}
    close = [folded[c] for c in difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)]
    parts = [candidate for candidate in names if name.lower()[:5] in candidate.lower()]
    parts.sort(key=lambda candidate: (not candidate.lower().startswith(name.lower()[:5]), len(candidate)))
    close = close or parts[:4]
    if close:
        return f"Did you mean {' or '.join(repr(candidate) for candidate in close)}?"
    if len(names) > 20:
        return f"None of the {len(names)} known names is near it."
    return f"Known: {', '.join(map(repr, names))}." if names else "None is known."
