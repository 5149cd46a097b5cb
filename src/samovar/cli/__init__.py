"""What can be done from the shell?"""

from .entry import main

__all__ = ["main"]
