"""How peft's adapters are switched in a model, and whether it was ever so before.

peft's marks on layers are read here and nowhere else.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

_MOST_STATES = 16
"""Settings that are remembered."""


def loaded_adapters(model: torch.nn.Module) -> tuple[str, ...]:
    """The names of the adapters that peft has put into a model."""
    return tuple(vars(model).get("peft_config") or ())


def adapter_settings(module: torch.nn.Module) -> dict[str, Any] | None:
    """The scales of peft's adapters on a layer, and which of them are active; None if the layer has none."""
    entries = vars(module)
    if not isinstance(entries.get("scaling"), Mapping):
        return None
    names = ("_active_adapter", "_disable_adapters", "merged_adapters")
    return dict(entries["scaling"]) | {name: copy.copy(entries.get(name)) for name in names}


def adapter_layers(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The layers that peft has put adapters on."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in modules if isinstance(module, BaseTunerLayer)]


def switch_adapters(layers: Iterable[Any], scales: Mapping[str, float], before: Iterable[str] = ()) -> None:
    """Use these adapters, and no others, in layers that peft made: as peft's own methods, without marking weights as
    trainable: in a large model that takes a tenth of a second. Those of `before` get their own scales again, so that
    what others asked for leaves no trace."""
    names, all_scales = list(scales), dict.fromkeys(before, 1.0) | dict(scales)
    for layer in layers:
        layer._active_adapter = names
        layer._disable_adapters = not names
        for name, scale in all_scales.items():
            layer.set_scale(name, scale)


# ------------------------------------------------------------------------------------------------ settings seen before


def adapters_of(modules: Iterable[torch.nn.Module]) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """The layers that peft has put adapters on, with their settings."""
    found = ((module, adapter_settings(module)) for module in modules)
    return [(module, adapter) for module, adapter in found if adapter is not None]


class AdapterStates:
    """Numbers the settings of all adapters of a model: those that were seen before have the number that they had."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._layers: list[torch.nn.Module] = []
        self._loaded: tuple[str, ...] | None = None
        self._last = self._now = 0
        self._seen: OrderedDict[int, list[Any]] = OrderedDict()

    def number(self) -> int:
        """That of the settings as they are now."""
        loaded = loaded_adapters(self._model)
        if loaded != self._loaded:
            self._loaded = loaded
            self._layers = [layer for layer, _ in adapters_of(self._model.modules())] if loaded else []
            self._seen.clear()
        settings = list(map(adapter_settings, self._layers))
        before = self._seen.get(self._now)
        if before != settings:
            # To merge weights and take them apart again does not give the same weights.
            if any(map(_is_merged, (*settings, *(before or ())))):
                self._seen.clear()
            self._now = next((number for number, old in self._seen.items() if old == settings), 0) or self._note(
                settings
            )
        self._seen.move_to_end(self._now)
        return self._now

    def _note(self, settings: list[Any]) -> int:
        self._last += 1
        self._seen[self._last] = settings
        if len(self._seen) > _MOST_STATES:
            self._seen.popitem(last=False)
        return self._last


def _is_merged(settings: dict[str, Any] | None) -> bool:
    return bool(settings and settings["merged_adapters"])
