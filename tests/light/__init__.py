"""Processes that tests start import no libraries of quantisation, unless they are tested there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NAME = "HIDE_QUANTISERS_FROM_TESTS"


def hide_quantisers() -> None:
    """From processes that are started from now on."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(Path(__file__).parent))))
    os.environ[NAME] = "1"


@contextlib.contextmanager
def with_quantisers() -> Iterator[None]:
    """Processes that are started inside have all that is installed."""
    hidden = os.environ.pop(NAME, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[NAME] = hidden
