"""How VAEs decode: in tiles, which are blended, one image of a batch after the other, or with channels last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..arch import ModuleDiscovery
from ..core.errors import SettingError
from ..core.tensor_parts import is_plain
from .config import AttachConfig

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_TILES_ONLY = ("AutoencoderKLAllegro",)
"""VAEs that refuse to decode otherwise, when all steps are done."""


class Way(NamedTuple):
    """How VAEs decode."""

    tiling: bool = False
    slicing: bool = False
    channels_last: bool = False

    def smaller(self, vaes: Sequence[Any], may_tile: bool | None, may_slice: bool | None) -> Iterator[Way]:
        """This one, and those that need less memory, as far as these VAEs can: first those that make the same images.
        None: it may."""
        yield self
        slices = self._replace(slicing=self.slicing or (may_slice is None and _can(vaes, "slicing")))
        if slices != self:
            yield slices
        if may_tile is None and _can(vaes, "tiling"):
            yield slices._replace(tiling=True)

    @property
    def chosen(self) -> str:
        """What it does to save memory, in words."""
        parts = " and ".join(f"vae_{name}" for name in ("tiling", "slicing") if getattr(self, name))
        return f"VAEs decode with {parts}"


def _can(vaes: Sequence[Any], name: str) -> bool:
    """Whether one of these VAEs can do this. Those of diffusers have a switch for what they can."""
    return any(name == "channels_last" or hasattr(vae, f"use_{name}") for vae in vaes)


def tiled_if_needed(pipe: Any, config: AttachConfig) -> AttachConfig:
    """The same settings, with tiles for a VAE that cannot do without, unless they say something else."""
    names = {cls.__name__ for part in pipe.components.values() for cls in type(part).__mro__}
    is_needed = config.vae_tiling is None and not names.isdisjoint(_TILES_ONLY)
    return replace(config, vae_tiling=True) if is_needed else config


def find_vaes(pipe: Any, way: Way) -> list[torch.nn.Module]:
    """The VAEs of a pipeline. Refused if none can do what is asked for."""
    vaes = [] if isinstance(pipe, torch.nn.Module) else ModuleDiscovery.discover(pipe).vaes
    for name, is_wanted in way._asdict().items():
        if is_wanted and not _can(vaes, name):
            found = ", ".join(type(vae).__name__ for vae in vaes) or "none"
            raise SettingError(f"vae_{name}=True, and no VAE here can do that (found: {found}).", param=f"vae_{name}")
    return vaes


def divide_vaes(vaes: Sequence[Any], way: Way) -> contextlib.ExitStack:
    """Have them decode in that way; closing what is returned restores them."""
    with contextlib.ExitStack() as undo:
        for vae in vaes if any(way) else ():
            undo.callback(_restore, vae, dict(vars(vae)))
            for name in ("tiling", "slicing"):
                if getattr(way, name) and _can([vae], name):
                    getattr(vae, f"enable_{name}")()
            if way.channels_last:
                weights = [weight for weight in vae.parameters() if weight.dim() in _LAST and is_plain(weight)]
                undo.callback(_lay_out, weights, last=False)
                _lay_out(weights, last=True)
        return undo.pop_all()


def _lay_out(weights: list[torch.nn.Parameter], *, last: bool) -> None:
    for weight in weights:
        weight.data = weight.data.contiguous(memory_format=_LAST[weight.dim()] if last else torch.contiguous_format)


def _restore(vae: torch.nn.Module, before: dict[str, Any]) -> None:
    """Put back the settings that are another value now, such as `use_tiling` and the size of tiles."""
    now = vars(vae)
    for name in [name for name in now if isinstance(now[name], (bool, int, float))]:
        if name not in before:
            del now[name]
        elif now[name] != before[name]:
            now[name] = before[name]
