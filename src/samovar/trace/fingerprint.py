"""Are these modules still what they were, with the same weights and adapters?

Parts and weights are compared by identity, in-place changes by torch's version counter. Writes through `.data` are not
counted, so nothing whose bits matter may rest on this alone.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any

import torch

from ..other_libraries import adapter_settings, loaded_adapters

_own: weakref.WeakSet[Any] = weakref.WeakSet()


def own(hook: Any) -> None:
    """Make fingerprints ignore one of our hooks on a module."""
    _own.add(hook)


class Fingerprint:
    """The parts, weights, hooks and adapters of some modules, as they were."""

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
            # Weights on the meta device are elsewhere for now: accelerate puts new tensors there after each call.
            if not any(tensor.is_meta for tensor in tensors):
                for held in (module._parameters, module._buffers):
                    self._held.append((held, list(held.values())))
                self._tensors += [tensor for tensor in tensors if not tensor.is_inference()]
            self._adapters += _adapters([module])
            self._hooks += [(hooks, _count(hooks)) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
            if "processor" in vars(module):  # Of diffusers' attentions.
                self._processors.append((module, vars(module)["processor"], _settings(vars(module)["processor"])))
        self._held = [(held, parts) for held, parts in self._held if parts]
        self._versions = [tensor._version for tensor in self._tensors]

    def holds(self) -> bool:
        """Whether nothing has changed."""
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


class Generation:
    """Counts the changes of some modules, and of peft's adapters on a whole model."""

    def __init__(self, model: torch.nn.Module, modules: Callable[[], Iterable[torch.nn.Module]] = tuple) -> None:
        self._model = model
        self._modules = modules
        self._number = 0
        self._look()

    def _look(self) -> None:
        self._fingerprint = Fingerprint(self._modules())
        self._loaded = loaded_adapters(self._model)
        self._adapters = _adapters(self._model.modules()) if self._loaded else []

    def check(self) -> int:
        """The current generation; it grows when something is seen to have changed."""
        is_same = all(adapter_settings(module) == old for module, old in self._adapters)
        if not is_same or loaded_adapters(self._model) != self._loaded or not self._fingerprint.holds():
            self._number += 1
            self._look()
        return self._number


def _adapters(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """The layers that peft has put adapters on, with their settings."""
    found = ((module, adapter_settings(module)) for module in modules)
    return [(module, adapter) for module, adapter in found if adapter is not None]


def _count(hooks: Mapping[int, Any]) -> int:
    return sum(hook not in _own for hook in hooks.values()) if hooks else 0


def _settings(processor: Any) -> dict[str, Any]:
    """The settings of a processor, such as the scales of an IP-Adapter."""
    entries = getattr(processor, "__dict__", {}).items()
    return {name: copy.copy(value) for name, value in entries if isinstance(value, (bool, int, float, str, list))}
