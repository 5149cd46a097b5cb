"""How is a file that comes with a model read? With errors that name it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object, not {type(content).__name__}.")
    return content
