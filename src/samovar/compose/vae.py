"""How does a VAE decode with less memory? In tiles, which are blended, or one image of a batch after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ..arch import ModuleDiscovery
from ..errors import SettingError

_SETTINGS = ("vae_tiling", "vae_slicing")
_METHODS = ("enable_tiling", "enable_slicing")
"""Of the VAEs of diffusers, for each setting."""


def find_vaes(pipe: Any, tiling: bool, slicing: bool) -> list[torch.nn.Module]:
    """The VAEs of a pipeline that can do what is asked for. Refused if none can."""
    vaes = [] if isinstance(pipe, torch.nn.Module) else ModuleDiscovery.discover(pipe).vaes
    for wanted, method, setting in (
        (tiling, "enable_tiling", "vae_tiling"),
        (slicing, "enable_slicing", "vae_slicing"),
    ):
        if wanted and not any(hasattr(vae, method) for vae in vaes):
            found = ", ".join(type(vae).__name__ for vae in vaes) or "none"
            raise SettingError(f"{setting}=True, and no VAE here can do that (found: {found}).", param=setting)
    return vaes


def divide_vaes(vaes: Sequence[Any], tiling: bool, slicing: bool) -> contextlib.ExitStack:
    """Have them decode in parts; closing what is returned restores them."""
    with contextlib.ExitStack() as undo:
        for vae in vaes:
            before = dict(vars(vae))
            undo.callback(_restore, vae, before)
            for wanted, method, setting in zip((tiling, slicing), _METHODS, _SETTINGS, strict=True):
                if wanted and hasattr(vae, method):
                    try:
                        getattr(vae, method)()
                    except NotImplementedError as error:
                        raise SettingError(f"{setting}=True: {error}", param=setting) from error
        return undo.pop_all()


def _restore(vae: torch.nn.Module, before: dict[str, Any]) -> None:
    """Put back the settings that are another value now, such as `use_tiling` and the size of tiles."""
    now = vars(vae)
    for name in [name for name in now if isinstance(now[name], (bool, int, float))]:
        if name not in before:
            del now[name]
        elif now[name] != before[name]:
            now[name] = before[name]
