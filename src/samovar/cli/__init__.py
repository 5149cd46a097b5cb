"""The shell: `samovar` and its commands."""

from .entry import main

__all__ = ["main"]
