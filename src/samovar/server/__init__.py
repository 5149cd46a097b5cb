"""How are images made over HTTP? An OpenAI-compatible server and its page; needs the extra `serve`."""

from .app import create_app
from .app_state import AppState
from .http_server import serve
from .settings import Limits, ServerConfig

__all__ = ["AppState", "Limits", "ServerConfig", "create_app", "serve"]
