"""What is said of a pipeline that fails: settings that it refuses, memory or a package that was missing."""

from __future__ import annotations

from ..core.errors import EngineError, OutOfMemoryError, SamovarError, SettingError
from .request import Request

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation", "_STATUS_ALLOC_FAILED",
              "Storage size calculation overflowed", "overflow")  # fmt: skip
_VISION = "torchvision"


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def failure(error: Exception, class_name: str, kind: str, request: Request, missing: list[str]) -> SamovarError:
    """What to raise in place of an error of a pipeline. Its own checks raise ValueError; arguments that it cannot use
    raise errors about types. `missing`: what it may need and was not given."""
    if _is_out_of_memory(error):
        problem = next(iter(str(error).splitlines()), type(error).__name__)
        return OutOfMemoryError(f"There is not enough memory for {_described(request, kind)}: {problem}")
    given = [*request.params.options, *request.inputs]
    is_about_types = isinstance(error, (TypeError, AttributeError)) and (given or missing)
    if isinstance(error, ValueError) or is_about_types:
        hint = f" It was given no {' and no '.join(missing)}." if missing else ""
        hint += f" Check {', '.join(given)}." if given and not isinstance(error, ValueError) else ""
        words = str(error).rstrip(".")
        return SettingError(f"{class_name} refuses these settings: {words}.{hint}", param=next(iter(given), None))
    return EngineError(f"{class_name} failed: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Why a pipeline failed. Modules of diffusers that use torchvision only if it is there lack a name if it is not."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, NameError) and trace is not None and f"is_{_VISION}_available" in trace.tb_frame.f_globals:
        return f"it needs {_VISION}, which is not installed: pip install {_VISION}."
    return f"{type(error).__name__}: {error}"


def _described(request: Request, kind: str) -> str:
    """What did not fit into memory."""
    params = request.params
    if kind == "audio":
        return f"a sound of {params.seconds:g} s" if params.seconds else "a sound"
    size = f"{params.width} x {params.height} pixels" if params.width and params.height else "the default size"
    frames = f", {params.num_frames} frames" if params.num_frames else ""
    return f"{kind} of {size}{frames}"
