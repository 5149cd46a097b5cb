"""Features of other libraries on a pipeline, and which of ours conflict with them.

Their hooks replace `forward` and ours wrap `__call__`, so nearly everything works together. Conflicts are features that
decide the same thing twice: two caches, two compilers, two ways to split a model over ranks. (Two that move the same
weights are refused by offload itself.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from ..arch.modules import named_parts, unwrapped
from ..core.errors import SettingError
from ..core.interop import accelerate_hook, diffusers_hooks, has_cache_dit, is_compiled, is_helper

Kind = Literal["cache", "offload", "parallel", "compiled", "other"]
_KINDS: dict[str, Kind] = {
    "group_offload": "offload", "cache": "cache", "fbc_": "cache", "pyramid_attention": "cache", "cp_input": "parallel",
    "cp_output": "parallel",
}  # fmt: skip
"""The kind of a diffusers hook, by a word in its name."""
_CONFLICTS: Mapping[tuple[Kind, str], str] = {
    ("cache", "cache"): "a second cache was asked for: each would mistake the other's reused results for computed "
    "ones. Take it off (model.disable_cache(), or cache_dit.disable_cache), or leave out cache.",
    ("cache", "parallel"): "several ranks were asked for: each would decide for itself what to skip and wait for the "
    "others forever. Take it off first (model.disable_cache()) and use cache='tea_cache', which asks all ranks.",
    ("parallel", "parallel"): "several ranks were asked for: the sequence would be split twice. Load the model again "
    "without enable_parallelism, or leave out parallel.",
    ("compiled", "parallel"): "parallel needs its blocks, which are one graph now. Load it again without compiling it, "
    "and let attach(pipe, ..., compile=True) compile its blocks.",
    ("compiled", "compile"): "its blocks, which are one graph now, were asked to be compiled. Load it again without "
    "compiling it, and let attach(pipe, ..., compile=True) compile its blocks.",
}
"""By the kind of a feature and one of our settings: what does not go together, and what to do."""


class Peer(NamedTuple):
    """A feature of another library."""

    kind: Kind
    name: str
    where: str


def find_peers(denoisers: Mapping[str, torch.nn.Module]) -> list[Peer]:
    """Features of other libraries on the denoisers, each once, where it was found first."""
    found = [peer for name, denoiser in denoisers.items() for peer in _peers_on(name, denoiser)]
    return list({peer[:2]: peer for peer in reversed(found)}.values())[::-1]


def _peers_on(name: str, denoiser: torch.nn.Module) -> Iterator[Peer]:
    if is_compiled(denoiser):
        yield Peer("compiled", "torch.compile", name)
    if has_cache_dit(unwrapped(denoiser)):
        yield Peer("cache", "cache-dit", name)
    for path, module in named_parts(denoiser).items():
        where = f"{name}.{path}".rstrip(".")
        for hook in diffusers_hooks(module):
            if not is_helper(hook):
                kind: Kind = next((kind for word, kind in _KINDS.items() if word in hook), "other")
                yield Peer(kind, f"diffusers' {hook.partition('---')[0]}", where)
        if (theirs := accelerate_hook(module)) is not None:
            yield Peer("offload", f"accelerate's {type(theirs).__name__}", where)


def check_peers(denoisers: Mapping[str, torch.nn.Module], wanted: set[str]) -> list[Peer]:
    """What other libraries have attached, if all of it goes with the wanted settings; refused by name if not."""
    peers = find_peers(denoisers)
    for peer in peers:
        for (kind, param), why in _CONFLICTS.items():
            if peer.kind == kind and param in wanted:
                raise SettingError(f"{peer.name} is on {peer.where}, and {why}", param=param)
    return peers
