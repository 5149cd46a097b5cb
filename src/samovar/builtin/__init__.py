"""The models that come with Samovar."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BUILTIN_MODELS", "MAX_SIDE"]

BUILTIN_MODELS = {name: Path(__file__).parent / name for name in ("emoji", "motion")}
"""The folder of each model, in diffusers format, with its own defaults in `samovar.json`: images and video."""
MAX_SIDE = 256
"""In pixels: they were trained for 128 or less, and larger outputs are repeated patterns that take minutes."""
