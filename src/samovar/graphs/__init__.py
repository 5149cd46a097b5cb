"""Computed forwards are replayed as CUDA graphs, with the bits of the model."""

from .config import GraphsConfig
from .replayer import GraphsHook, ReplayStats, apply_graphs

__all__ = ["GraphsConfig", "GraphsHook", "ReplayStats", "apply_graphs"]
