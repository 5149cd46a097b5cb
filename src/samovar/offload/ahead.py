"""Choose the layers that are computed ahead of the steps, as a call shows, real or rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..arch.modules import named_parts, tensor_bytes, unwrapped
from ..core.interop import is_compiled
from ..hooks.intercept import attached_registry
from ..trace.dry_run import CallForm
from ..trace.time_only import find_tape, is_plain
from .moving import HOOK as OFFLOAD_HOOK
from .sizes import Component
from .weights import held_by

HOOK = "samovar_time_layers"
"""The name of the hooks on layers that are computed ahead, and on their model."""
LEAST_IN_BLOCKS, LEAST_OUTSIDE = 2**20, 2**26
"""Bytes of the smallest layers that are worth it. Outside of blocks a layer also runs in steps that a cache skips."""
_global_hooks = torch.nn.modules.module._global_forward_hooks
_global_pre_hooks = torch.nn.modules.module._global_forward_pre_hooks


def may_have_time_layers(component: Component) -> bool:
    """Whether a component has any layer that is large enough."""
    if component.role != "denoiser":
        return False
    leaves = (module for module in unwrapped(component.module).modules() if not module._modules)
    return any(tensor_bytes([leaf]) >= LEAST_IN_BLOCKS for leaf in leaves)


def with_time_layers(
    components: Iterable[Component], calls: Mapping[str, CallForm]
) -> tuple[list[Component], dict[str, str]]:
    """The components, each with the layers that its call shows to depend on time alone, and why others are not."""
    found, reasons = [], {}
    for component in components:
        if component.name in calls and may_have_time_layers(component):
            call = calls[component.name]
            layers, reasons[component.name] = find_time_layers(component, call.args, dict(call.kwargs))
            component = replace(component, time_layers=layers)
        found.append(component)
    return found, reasons


def find_time_layers(component: Component, args: Any, kwargs: Any) -> tuple[dict[str, torch.nn.Module], str]:
    """The layers of a component that a call with these arguments shows to depend on time alone, and which such layers
    stay what they are."""
    model = unwrapped(component.module)
    tape, problem = find_tape(model, args, kwargs, LEAST_IN_BLOCKS)
    if problem:
        return {}, f"whether layers see time alone is unknown: {problem}"
    return choose_layers(component, () if tape is None else tape.layers)


def choose_layers(component: Component, paths: Iterable[str]) -> tuple[dict[str, torch.nn.Module], str]:
    """Those of some time-only layers that can be computed ahead and are worth it, and which are not."""
    model = unwrapped(component.module)
    parts, blocks = named_parts(model), tuple(f"{block}." for block in component.blocks)
    compiled = {id(unwrapped(part)) for part in component.module.modules() if is_compiled(part)}
    found: dict[str, torch.nn.Module] = {}
    left: dict[str, int] = {}
    for path in dict.fromkeys(paths):
        layer = parts[path]
        above = [parts[path[:end]] for end in range(len(path)) if path[end] == "."]
        least = LEAST_IN_BLOCKS if path.startswith(blocks) else LEAST_OUTSIDE
        if any(id(part) in compiled for part in (layer, *above, model)):
            reason = "compiled"
        elif not is_free(layer):
            reason = "hooked by others"
        elif any(id(tensor) in component.skip for tensor in held_by(layer)):
            reason = "shared"
        elif tensor_bytes([layer]) < least:
            reason = "small"
        else:
            found[path] = layer
            continue
        left[reason] = left.get(reason, 0) + 1
    return found, ", ".join(f"{count} {reason}" for reason, count in left.items())


def is_watched(layer: torch.nn.Module) -> bool:
    """Whether torch calls somebody when a layer is called."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or _global_hooks or _global_pre_hooks)


def is_free(layer: torch.nn.Module) -> bool:
    """Whether nobody but us looks on when a layer is called."""
    registry = attached_registry(layer)
    return (
        is_plain(layer)
        and not is_watched(layer)
        and (registry is None or all(name in (HOOK, OFFLOAD_HOOK) for name, _ in registry.chain))
    )
