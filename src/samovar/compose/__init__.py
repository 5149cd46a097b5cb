"""How do a cache, offload and several ranks go on one pipeline together? `attach(pipe, ...)`."""

from .attached import Attached, AttachedStats, attach
from .config import AttachConfig
from .explain import Explanation

__all__ = ["AttachConfig", "Attached", "AttachedStats", "Explanation", "attach"]
