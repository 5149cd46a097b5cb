"""Which components have layers that can be computed ahead of the steps? As a call of each shows, real or rehearsed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..arch.modules import tensor_bytes, unwrapped
from ..arch.skeleton import Parts
from ..trace.rehearse import CallForm
from .sizes import Component, ComponentSize, measure_components, split_parts
from .time_layers import LEAST_IN_BLOCKS, find_time_layers


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


def sizes_of(parts: Parts, calls: Mapping[str, CallForm] | None = None) -> tuple[ComponentSize, ...]:
    """The sizes of components that were read without weights; `calls` show which layers can be computed ahead."""
    found, _ = with_time_layers(split_parts(parts), calls or {})
    return measure_components(found, coded=True)
