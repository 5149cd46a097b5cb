"""What have other libraries put on this pipeline, and what of ours cannot go with it?

Their hooks replace `forward` and ours stand around `__call__`, so nearly everything goes together. What does not is
what decides the same thing twice: two caches, two ways to compile, two ways to spread a model over ranks. (Two that
move the same weights are refused by offload itself, which knows best what it would move.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch

from ..arch.modules import named_parts, unwrapped
from ..errors import SettingError
from .config import AttachConfig

Kind = Literal["cache", "offload", "parallel", "compiled", "other"]

_KINDS: dict[str, Kind] = {
    "group_offload": "offload", "cache": "cache", "fbc_": "cache", "pyramid_attention": "cache", "cp_input": "parallel",
    "cp_output": "parallel",
}  # fmt: skip
"""What a hook of diffusers is, by a word in its name."""
_HELPERS = ("layer_execution_tracker", "lazy_", "peft_autocast")


class Peer(NamedTuple):
    """Something of another library."""

    kind: Kind
    name: str
    where: str


def find_peers(denoisers: Mapping[str, torch.nn.Module]) -> list[Peer]:
    """What others have on the denoisers, each once, at the first place where it is."""
    found: dict[tuple[Kind, str], Peer] = {}
    for name, denoiser in denoisers.items():
        for peer in _peers_on(name, denoiser):
            found.setdefault((peer.kind, peer.name), peer)
    return list(found.values())


def _peers_on(name: str, denoiser: torch.nn.Module) -> Iterator[Peer]:
    """Marks of other libraries can only be asked for by name: they are no part of any type."""
    bare: Any = unwrapped(denoiser)
    if bare is not denoiser or bare._compiled_call_impl is not None:
        yield Peer("compiled", "torch.compile", name)
    if getattr(bare, "_is_cached", False):
        yield Peer("cache", "cache-dit", name)
    for path, module in named_parts(denoiser).items():
        where = f"{name}.{path}".rstrip(".")
        theirs: Mapping[str, Any] = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
        for hook in theirs:
            if not hook.startswith(_HELPERS):
                kind: Kind = next((kind for word, kind in _KINDS.items() if word in hook), "other")
                yield Peer(kind, f"diffusers' {hook.partition('---')[0]}", where)
        if hasattr(module, "_hf_hook"):
            yield Peer("offload", f"accelerate's {type(module._hf_hook).__name__}", where)


def check_peers(denoisers: Mapping[str, torch.nn.Module], config: AttachConfig) -> list[Peer]:
    """What other libraries have attached, if all of it works with this config; refused by name if not."""
    peers = find_peers(denoisers)
    for peer in peers:
        there = f"{peer.name} is on {peer.where}"
        if peer.kind == "cache" and config.cache is not None:
            raise SettingError(
                f"{there}, and another cache was asked for: each would take what the other reused for computed. Take "
                "it off first (model.disable_cache(), or disable_cache of cache-dit), or leave out cache."
            )
        if peer.kind == "cache" and config.num_ranks > 1:
            raise SettingError(
                f"{there}, and {config.num_ranks} ranks were asked for: each would decide for itself what to skip, "
                "and wait for the others for ever. Take it off first (model.disable_cache()), and use "
                "cache='tea_cache', which asks all ranks."
            )
        if peer.kind == "parallel" and config.num_ranks > 1:
            raise SettingError(
                f"{there}, and {config.num_ranks} ranks of ours were asked for: the sequence would be split twice. "
                "Load the model anew without enable_parallelism, or leave out parallel and cfg_parallel."
            )
        if peer.kind == "compiled" and (config.num_ranks > 1 or config.compiles):
            wish = "several ranks" if config.num_ranks > 1 else "compile"
            raise SettingError(
                f"{peer.where} is compiled as a whole, and {wish} must reach its blocks, which are one graph now. "
                "Leave it as it was loaded and compile its blocks: attach(pipe, ..., compile=True)."
            )
    return peers
