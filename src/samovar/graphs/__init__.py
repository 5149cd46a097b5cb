"""Computed forwards are replayed as CUDA graphs, with the bits of the model."""

from .apply import GraphsHook, apply_graphs
from .config import GraphsConfig
from .replayer import ReplayStats

__all__ = ["GraphsConfig", "GraphsHook", "ReplayStats", "apply_graphs"]
