"""What comes from the Hugging Face hub, by its local cache or downloaded."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ..core.errors import ModelError
from ..core.files import first_line

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@contextlib.contextmanager
def downloading(what: str, remedy: str = "") -> Iterator[None]:
    """Name what is not there, or cannot be reached."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{what} is not here and could not be downloaded from the hub: {first_line(error)} Check the name and the "
            f"network{remedy}."
        ) from error
