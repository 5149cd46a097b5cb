"""How are pictures made over HTTP? An OpenAI-compatible server and its page; needs the extra `serve`."""

from .app import create_app
from .house import House
from .listening import serve
from .settings import Limits, ServerConfig

__all__ = ["House", "Limits", "ServerConfig", "create_app", "serve"]
