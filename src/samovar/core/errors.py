"""The errors that Samovar raises.

    SamovarError
    ├── SettingError (ValueError)         a setting or argument that cannot be used; `param` names it
    │   └── StrategyError                 an attention that a parallel strategy cannot compute
    ├── ModelError (ValueError)           a model or class that cannot be found, built or read
    ├── DeclarationError (ValueError)     a declaration that does not fit the model it is about
    ├── HookConflictError (RuntimeError)  two hooks that cannot live on one module
    ├── ShardingError (RuntimeError)      a sharded forward that would have given a wrong result
    └── EngineError (RuntimeError)        a request that could not be served; `code` says why in one word
        ├── QueueFullError                too many requests are waiting: retry after `retry_after_s`
        ├── QueueTimeoutError             it waited longer than its deadline
        ├── CancelledRequestError         it was cancelled
        ├── WorkerLostError               its worker process died
        ├── StepTimeoutError              its worker process hung and was stopped
        ├── OutOfMemoryError              there was not enough memory for it
        ├── NanLatentsError               the latents became NaN or infinite
        ├── ShuttingDownError             the engine is closing
        └── EngineDownError               worker processes keep dying, so none is started for a while

Every message names the value, what was expected and a remedy. Each class also derives from the built-in error that a
caller who does not know Samovar would catch.
"""

from __future__ import annotations

import copyreg
import difflib
from collections.abc import Iterable
from typing import Any


class SamovarError(Exception):
    """Base of all errors that Samovar raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with all attributes, whatever the signature of the class."""
        return copyreg.__newobj__, (type(self), str(self)), vars(self)  # type: ignore[attr-defined]


class SettingError(SamovarError, ValueError):
    """A setting or argument that cannot be used."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        # It names the value, which may be of any size.
        super().__init__(message if len(message) < 3000 else f"{message[:2000]} [...] {message[-500:]}")
        self.param = param
        """Name of the parameter at fault as Python spells it; None if there is no single one."""


class ModelError(SamovarError, ValueError):
    """A model or class that cannot be found, built or read."""


class DeclarationError(SamovarError, ValueError):
    """A declaration that does not fit the model it is about."""


class HookConflictError(SamovarError, RuntimeError):
    """Two hooks that cannot live on one module."""


class StrategyError(SettingError):
    """An attention that the chosen strategy cannot compute."""


class ShardingError(SamovarError, RuntimeError):
    """A sharded forward that would have given a wrong result."""


class EngineError(SamovarError, RuntimeError):
    """A request that could not be served."""

    code = "engine_error"
    """The kind of error in one word, for programs."""


class QueueFullError(EngineError):
    """Too many requests are waiting."""

    code = "queue_full"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueTimeoutError(EngineError):
    """A request waited longer than its deadline."""

    code = "queue_timeout"


class CancelledRequestError(EngineError):
    """A request was cancelled."""

    code = "cancelled"


class WorkerLostError(EngineError):
    """The worker process of a request died."""

    code = "worker_restarted"


class StepTimeoutError(EngineError):
    """The worker process of a request hung and was stopped."""

    code = "step_timeout"


class OutOfMemoryError(EngineError):
    """There was not enough memory for the request."""

    code = "out_of_memory"


class NanLatentsError(EngineError):
    """The latents became NaN or infinite."""

    code = "nan_latents"

    def __init__(self, message: str, step: int, cache: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        """Counted from 1."""
        self.cache = cache
        """What the cache had done until then; None without one."""


class ShuttingDownError(EngineError):
    """The engine is closing."""

    code = "shutting_down"


class EngineDownError(EngineError):
    """Worker processes keep dying, so none is started for a while."""

    code = "engine_down"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known ones, or all if they are few."""
    name, names = name[:100].lower(), sorted(known)  # Comparing a megabyte would take seconds.
    folded = {candidate.lower(): candidate for candidate in names}
    alike = [each for each in folded if len(name) > 2 and name[:5] in each]
    alike.sort(key=lambda each: (not each.startswith(name[:5]), len(each)))
    if close := difflib.get_close_matches(name, folded, n=1, cutoff=0.6) or alike[:4]:
        return f"Did you mean {' or '.join(repr(folded[each]) for each in close)}?"
    if len(names) > 20:
        return f"None of the {len(names)} known names is similar."
    return f"Known: {', '.join(map(repr, names))}." if names else "None is known."
