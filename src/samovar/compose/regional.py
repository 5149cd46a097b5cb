"""How are the repeated blocks compiled, and made plain again?

Each block is a region of its own: the blocks of a class share one graph, which is compiled once and is small. All
hooks stand outside of it, so a skipped block runs no graph, and one that is offloaded finds its weights in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..arch import find_anatomy
from ..arch.modules import unwrapped
from ..errors import ModelError, SettingError
from ..other_libraries import COMPILED_CALL, is_compiled

Regions = dict[str, torch.nn.Module]


def find_regions(denoisers: Mapping[str, torch.nn.Module]) -> Regions:
    """The blocks of all denoisers by their paths, each once; refused where there are none, or some are compiled."""
    regions: Regions = {}
    seen: set[int] = set()
    for name, denoiser in denoisers.items():
        stacks = find_anatomy(unwrapped(denoiser)).stacks
        if not stacks:
            raise ModelError(
                f"{name!r}, a {type(denoiser).__name__}, has no stack of blocks that could be compiled one by one. "
                "Declare one (samovar.register_declaration), or compile the model yourself and leave out compile."
            )
        for stack in stacks:
            for path, block in zip(stack.block_paths, stack.modules(denoiser), strict=True):
                if is_compiled(block):
                    raise SettingError(
                        f"{name}.{path} is compiled already. Leave out compile: blocks that are compiled stay so."
                    )
                if id(block) not in seen:
                    seen.add(id(block))
                    regions[f"{name}.{path}"] = block
    return regions


def compile_regions(regions: Regions, backend: str | Callable[..., Any] | None) -> Callable[[], None]:
    """Compile each block when it is first called; what is returned makes them plain again."""
    settings: dict[str, Any] = {} if backend is None else {"backend": backend}
    with contextlib.ExitStack() as undo:
        for block in regions.values():
            undo.callback(vars(block).pop, COMPILED_CALL, None)
            block.compile(**settings)
        return undo.pop_all().close
