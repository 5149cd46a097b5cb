"""Are these modules still what they were, with the same weights and adapters?

Parts and weights are known by identity, changes in place by torch's count of them. What `.data` is written into is not
counted, so that nothing whose bits matter may rest on this alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .. import tree


class Fingerprint:
    """The parts, weights and adapters of some modules, as they were."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._sizes: list[tuple[Any, int]] = []
        self._entries: list[tuple[Any, str, Any, int | None]] = []
        self._scales: list[tuple[Any, dict[str, Any]]] = []
        for module in modules:
            for held in (module._modules, module._parameters, module._buffers):
                self._sizes.append((held, len(held)))
                # What lies on the meta device is elsewhere for now: accelerate puts new tensors there after each call.
                parts = [(n, p) for n, p in held.items() if not (isinstance(p, torch.Tensor) and p.is_meta)]
                self._entries += [(held, name, part, _version(part)) for name, part in parts]
            scaling = vars(module).get("scaling")
            if isinstance(scaling, Mapping):  # An adapter of peft.
                self._scales.append((module, _adapter(module)))

    def holds(self) -> bool:
        """Whether it is still so."""
        return (
            all(len(held) == size for held, size in self._sizes)
            and all(held.get(name) is part and _version(part) == seen for held, name, part, seen in self._entries)
            and all(_adapter(module) == adapter for module, adapter in self._scales)
        )


def _version(part: Any) -> int | None:
    return tree.version(part) if isinstance(part, torch.Tensor) else None


def _adapter(module: Any) -> dict[str, Any]:
    entries = vars(module)
    names = ("_active_adapter", "_disable_adapters", "merged_adapters")
    return dict(entries["scaling"]) | {name: copy.copy(entries.get(name)) for name in names}
