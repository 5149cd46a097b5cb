"""An OpenAI-compatible server and its page."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app
    from .serving import serve
    from .settings import Limits, ServerConfig
    from .state import AppState

__all__ = ["AppState", "Limits", "ServerConfig", "create_app", "serve"]

_FILES = {
    "AppState": "state",
    "Limits": "settings",
    "ServerConfig": "settings",
    "create_app": "app",
    "serve": "serving",
}


def __getattr__(name: str) -> Any:
    """Looked up when it is used: the settings are needed for the help, and load no server."""
    if name in _FILES:
        return getattr(importlib.import_module(f".{_FILES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
