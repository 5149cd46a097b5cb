"""How peft's adapters are switched in a model.

peft's marks on layers are read here and nowhere else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch


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


def merged_adapters(layers: Iterable[torch.nn.Module]) -> list[list[str]]:
    """The adapters that are merged into the weights of some layers, for each layer that has any."""
    return [list(names) for layer in layers if (names := vars(layer).get("merged_adapters"))]


def adapter_layers(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """The layers that peft has put adapters on."""
    return [module for module in modules if adapter_settings(module) is not None]


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
