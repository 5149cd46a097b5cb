"""Which models come with Samovar, and where are they?"""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILTIN_MODELS"]

BUILTIN_MODELS = {name: Path(__file__).parent / name for name in ("emoji", "motion")}
"""The folder of each model, in diffusers format, with its own defaults in `samovar.json`: images and video."""
