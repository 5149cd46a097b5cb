"""Compilation of the repeated blocks.

Each block is compiled separately: the blocks of a class share one small graph, compiled once. All hooks are outside it,
so a skipped block runs no graph, and an offloaded one finds its weights in place.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..arch import find_anatomy
from ..arch.modules import unwrapped
from ..core.errors import ModelError, SettingError
from ..core.interop import COMPILED_CALL, is_compiled
from ..core.quantisers import is_untraceable

Regions = dict[str, torch.nn.Module]
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch's compiler looks for the folder that keeps what it has compiled."""
_kept_in: list[str] = []
"""The folder in use, once for each pipeline."""


def find_regions(denoisers: Mapping[str, torch.nn.Module]) -> Regions:
    """The blocks of all denoisers by path. Refused if a denoiser has none, or some cannot be compiled."""
    regions: Regions = {}
    for name, denoiser in denoisers.items():
        stacks = find_anatomy(unwrapped(denoiser)).stacks
        if not stacks:
            raise ModelError(
                f"{name!r}, a {type(denoiser).__name__}, has no stack of blocks to compile. Declare one "
                "(samovar.register_declaration), or compile the model yourself and leave out compile."
            )
        for stack in stacks:
            blocks = zip(stack.block_paths, stack.modules(denoiser), strict=True)
            regions |= {f"{name}.{path}": block for path, block in blocks}
    for path, block in regions.items():
        _check(path, block)
    return regions


def _check(path: str, block: torch.nn.Module) -> None:
    if is_compiled(block):
        raise SettingError(
            f"{path} is compiled already. Leave out compile: compiled blocks stay compiled.", param="compile"
        )
    for name, parameter in block.named_parameters():
        if is_untraceable(parameter):  # It would fail in the first call, far from here.
            raise SettingError(
                f"{path} cannot be compiled: torch.compile cannot trace its {name}, a {type(parameter).__name__}. "
                "Leave out compile, or quantise the model in another way.",
                param="compile",
            )


def compile_regions(regions: Regions, backend: Any) -> Callable[[], None]:
    """Compile each block at its first call; True is torch's own compiler. The returned function restores them."""
    with contextlib.ExitStack() as undo:
        for block in set(regions.values()):  # Denoisers may share blocks.
            undo.callback(vars(block).pop, COMPILED_CALL, None)
            block.compile(**{} if backend is True else {"backend": backend})
        return undo.pop_all().close


def keep_compiled(folder: str | Path) -> Callable[[], None]:
    """Have torch's compiler keep what it makes in a folder, where later processes find it. The returned function puts
    back what was before. Files in it are run as code."""
    path, before = str(Path(folder).expanduser().resolve()), os.environ.get(CACHE_VARIABLE)
    if _kept_in and path not in _kept_in:
        raise SettingError(
            f"compile_cache={str(folder)!r}, and another pipeline of this process keeps its blocks in {_kept_in[0]!r}. "
            "torch has one folder for a process: give the same to both.",
            param="compile_cache",
        )
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(
            f"compile_cache={str(folder)!r} cannot be used as a folder ({error.strerror}).", param="compile_cache"
        ) from error
    _kept_in.append(path)
    os.environ[CACHE_VARIABLE] = path

    def undo() -> None:
        _kept_in.remove(path)
        if not _kept_in:
            os.environ.pop(CACHE_VARIABLE)
            os.environ.update({} if before is None else {CACHE_VARIABLE: before})

    return undo
