"""What a module holds, takes and weighs, looking through what torch.compile puts around it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn import Module, ModuleList

from ..core.interop import WRAPPED_MODULE
from ..core.tensor_parts import num_bytes_of


def unwrapped(module: Module) -> Module:
    """The module that `torch.compile` was given; any other module itself."""
    children = module._modules  # A scripted module has its own kind of dictionary, without `get`.
    inner = children[WRAPPED_MODULE] if WRAPPED_MODULE in children else None  # noqa: SIM401
    return module if inner is None else inner


def named_parts(model: Module) -> dict[str, Module]:
    """All modules within a model by their path, which is the same whether they are compiled or not."""
    return {
        path.replace(f"{WRAPPED_MODULE}.", ""): unwrapped(module)
        for path, module in model.named_modules()
        if not path.endswith(WRAPPED_MODULE)
    }


def module_class(kinds: Iterable[Any]) -> type[Module] | None:
    """The first class of modules among what an annotation says."""
    return next((kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Module)), None)


def is_container(module: Module) -> bool:
    """Whether a module only holds others and is never called itself."""
    return isinstance(module, (ModuleList, torch.nn.ModuleDict))


def is_list(module: Module) -> bool:
    """Whether a module holds others in order, and at least one."""
    return isinstance(module, (ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)) and len(module) > 0


def members(container: Module) -> dict[str, Module]:
    """The modules in a container. Unlike `named_children`, this lists a module that is held twice at both places."""
    return {name: unwrapped(module) for name, module in container._modules.items() if module is not None}


def parameters_of(module: Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward."""
    return inspect.signature(unwrapped(module).forward).parameters


def main_dtype(module: Module) -> torch.dtype | None:
    """The dtype of most of a module's weights: some models keep a few in float32. None if it has none."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else None


def tensor_bytes(modules: Iterable[Module]) -> int:
    """Bytes of all parameters and buffers, those shared between modules counted once."""
    return num_bytes_of(t for module in modules for tensors in (module.parameters(), module.buffers()) for t in tensors)
