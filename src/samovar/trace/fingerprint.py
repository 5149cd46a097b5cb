"""Are these modules still what they were, with the same weights and adapters?

Parts and weights are known by identity, changes in place by torch's count of them. What `.data` is written into is not
counted, so that nothing whose bits matter may rest on this alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch

from ..other_libraries import adapter_settings, loaded_adapters


class Fingerprint:
    """The parts, weights and adapters of some modules, as they were."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._held: list[tuple[Any, list[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._adapters: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        self._hooks: list[tuple[Any, int]] = []
        self._processors: list[tuple[torch.nn.Module, Any, dict[str, Any]]] = []
        for module in modules:
            weights = [*module._parameters.values(), *module._buffers.values()]
            tensors = [tensor for tensor in weights if tensor is not None]
            self._held.append((module._modules, list(module._modules.values())))
            # What lies on the meta device is elsewhere for now: accelerate puts new tensors there after each call.
            if not any(tensor.is_meta for tensor in tensors):
                for held in (module._parameters, module._buffers):
                    self._held.append((held, list(held.values())))
                self._tensors += [tensor for tensor in tensors if not tensor.is_inference()]
            if (adapter := adapter_settings(module)) is not None:
                self._adapters.append((module, adapter))
            self._hooks += [(hooks, _count(hooks)) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
            if "processor" in vars(module):  # Of diffusers' attentions.
                self._processors.append((module, vars(module)["processor"], _settings(vars(module)["processor"])))
        self._held = [(held, parts) for held, parts in self._held if parts]
        self._versions = [tensor._version for tensor in self._tensors]

    def holds(self) -> bool:
        """Whether it is still so."""
        return (
            all(len(held) == len(parts) and all(map(is_, held.values(), parts)) for held, parts in self._held)
            and [tensor._version for tensor in self._tensors] == self._versions
            and all(adapter_settings(module) == adapter for module, adapter in self._adapters)
            and all(_count(hooks) == count for hooks, count in self._hooks)
            and all(
                vars(module).get("processor") is processor and _settings(processor) == settings
                for module, processor, settings in self._processors
            )
        )


_own: weakref.WeakSet[Any] = weakref.WeakSet()


def own(hook: Any) -> None:
    """Let a hook of ours on a module count for nothing."""
    _own.add(hook)


def _count(hooks: Mapping[int, Any]) -> int:
    return sum(hook not in _own for hook in hooks.values()) if hooks else 0


def _settings(processor: Any) -> dict[str, Any]:
    """The numbers that a processor goes by, such as the scales of an IP-Adapter."""
    entries = getattr(processor, "__dict__", {}).items()
    return {name: copy.copy(value) for name, value in entries if isinstance(value, (bool, int, float, str, list))}


class Adapters:
    """The adapters of peft on a whole model: which there are, which are active, and how they are scaled."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.generation = 0
        """Grows whenever they are seen to be others."""
        self._look()

    def _look(self) -> None:
        self._loaded = loaded_adapters(self._model)
        layers = self._model.modules() if self._loaded else ()
        found = ((module, adapter_settings(module)) for module in layers)
        self._layers = [(module, adapter) for module, adapter in found if adapter is not None]

    def check(self) -> int:
        """The generation, after a look at them. Without any it costs nothing."""
        are_same = all(adapter_settings(module) == adapter for module, adapter in self._layers)
        if not are_same or loaded_adapters(self._model) != self._loaded:
            self.generation += 1
            self._look()
        return self.generation
