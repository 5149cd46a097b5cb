"""Graphs on a denoiser, and off again."""

from __future__ import annotations

import torch

from ..arch.modules import unwrapped
from ..hooks import Handle, HookRegistry, ModelHook, install_hook
from .config import GraphsConfig
from .replayer import Replayer, ReplayStats

HOOK_NAME = "graphs"


class GraphsHook(ModelHook, Handle):
    """Graphs on a denoiser, and the handle that takes them off."""

    def __init__(self, config: GraphsConfig, refused: str | None = None) -> None:
        Handle.__init__(self)
        self.config, self._refused = config, refused
        self._replayer: Replayer | None = None
        self._final: ReplayStats | None = None

    def initialize_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._replayer = Replayer(module, self.config, self._refused)
        HookRegistry.get_or_create(module).recorder = self._replayer
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        HookRegistry.get_or_create(module).recorder = None
        if self._replayer is not None:
            self._final = self._replayer.stats()
            self._replayer.forget()
            self._replayer = None
        return module

    def reset_state(self, module: torch.nn.Module) -> torch.nn.Module:
        if self._replayer is not None:
            self._replayer.forget()
        return module

    def stats(self) -> ReplayStats:
        """What was replayed."""
        found = self._final if self._replayer is None else self._replayer.stats()
        assert found is not None
        return found


def apply_graphs(module: torch.nn.Module, config: GraphsConfig | None = None, refused: str | None = None) -> GraphsHook:
    """Replay the computed forwards of a denoiser as CUDA graphs. Skipped steps of a cache stay outside. `refused`: why
    none can be, if that is known already."""
    module = unwrapped(module)
    HookRegistry.get_or_create(module).refuse_second(HOOK_NAME, "graphs", param="compile")
    hook = GraphsHook(config or GraphsConfig(), refused)
    install_hook(hook._undo, module, HOOK_NAME, hook)
    return hook
