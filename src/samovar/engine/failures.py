"""What is said when a model cannot be loaded, or its pipeline fails? Which package or how much memory was missing."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ..core.errors import EngineError, ModelError, SamovarError, SettingError
from .request import OmniDiffusionSamplingParams

_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad allocation", "_STATUS_ALLOC_FAILED",
              "Storage size calculation overflowed", "overflow")  # fmt: skip
_VISION = "torchvision"
_ASKS_FOR_VISION = f"is_{_VISION}_available"
"""What modules of diffusers import that use it only if it is there; if not, they lack a name when they run."""
_INSTALL = f"{_VISION}, which is not installed: pip install {_VISION}"


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY)


def described(params: OmniDiffusionSamplingParams, count: int, kind: str) -> str:
    """What did not fit into memory."""
    if kind == "audio":
        seconds = f" of {params.seconds:g} s" if params.seconds else ""
        return f"{count} sound{'s' * (count > 1)}{seconds}"
    size = f"{params.width} x {params.height} pixels" if params.width and params.height else "the default size"
    frames = f", {params.num_frames} frames" if params.num_frames else ""
    return f"{count} {kind}{'s' * (count > 1)} of {size}{frames}"


def failure(error: Exception, class_name: str, options: Collection[str], missing: str) -> SamovarError:
    """What to raise when a pipeline has failed. One that lacks an input, or gets an option that it cannot use, may say
    so with an error about types."""
    is_about_types = isinstance(error, (TypeError, AttributeError))
    if missing and is_about_types and "NoneType" in str(error):
        return SettingError(f"{class_name} failed: {error}. It was given no {missing}.")
    if options and is_about_types:
        names = ", ".join(options)
        return SettingError(f"{class_name} refuses these settings: {error} Check {names}.", param=next(iter(options)))
    return EngineError(f"{class_name} failed: {reason_of(error)}")


def reason_of(error: BaseException) -> str:
    """Why a pipeline failed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if isinstance(error, NameError) and trace is not None and _ASKS_FOR_VISION in trace.tb_frame.f_globals:
        return f"it needs {_INSTALL}."
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def naming_packages(what: str, loader: Any, components: Mapping[str, tuple[str, str]]) -> Iterator[None]:
    """Name a package that is not installed, if a pipeline that needs it cannot be loaded: the error names a file."""
    try:
        yield
    except ModelError as error:
        parts = [cls for library, cls in components.values() if library == "transformers" and _reads_videos(cls)]
        if hasattr(sys.modules.get(loader.__module__), _ASKS_FOR_VISION):
            parts.append(loader.__name__)
        if not parts or importlib.util.find_spec(_VISION) is not None:
            raise
        raise ModelError(f"{what} cannot be loaded: its {parts[0]} needs {_INSTALL}.") from error


def _reads_videos(name: str) -> bool:
    """Whether a class of transformers is a processor with a part for videos."""
    import transformers

    cls = getattr(transformers, name, None)
    if not inspect.isclass(cls) or not issubclass(cls, transformers.ProcessorMixin):
        return False
    return "video_processor" in inspect.signature(cls).parameters
