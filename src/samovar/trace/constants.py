"""Which modules give the same at every step, so that they need not run again?

Those without weights, such as rotary embeddings, whose inputs depend on the conditioning alone: a rehearsal finds them
(`rehearsal`). A module that has parameters is never remembered, nor one whose inputs were made by any: adapters and
weights may change at any time, and nothing tells of that surely.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from .. import tree
from ..hooks import NOT_BYPASSED

Key = tuple[torch.nn.Module, int]
"""A module, and the number of its call in a forward."""
Versions = list[tuple[torch.Tensor, int]]


class _Kept(NamedTuple):
    output: Any
    made: Versions


class Constants:
    """What such modules returned, in one branch of one run."""

    def __init__(self) -> None:
        self._kept: dict[Key, _Kept] = {}
        self._allowed: dict[Key, bool] = {}
        self._given: Versions | None = None
        self._form: Hashable = None
        self._counts: dict[torch.nn.Module, int] = {}
        self._asked: dict[torch.nn.Module, Key] = {}

    def begin_step(self, allowed: dict[Key, bool], conditioning: list[torch.Tensor], form: Hashable) -> None:
        """Called before each forward: what may be remembered, with whether it was seen to give the same at two steps,
        and what it depends on."""
        given = versions(conditioning)
        if given is None or self._given is None or form != self._form or not _is_same(self._given, given):
            self._kept.clear()
        self._given, self._form, self._allowed = given, form, allowed if given is not None else {}
        self._counts.clear()
        self._asked.clear()

    def recall(self, module: torch.nn.Module) -> Any:
        """What the module gives at this step, or NOT_BYPASSED if it has to run."""
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        key = module, number
        if key not in self._allowed or _is_watched(module):
            return NOT_BYPASSED
        kept = self._kept.get(key)
        if kept is not None and any(tensor._version != version for tensor, version in kept.made):
            del self._kept[key]  # Somebody has written into it.
            kept = None
        if kept is not None and self._allowed[key]:
            return kept.output
        self._asked[module] = key
        return NOT_BYPASSED

    def keep(self, module: torch.nn.Module, output: Any) -> None:
        """Remember what a module returned when it had to run."""
        key = self._asked.pop(module, None)
        made = versions(tree.tensors(output))
        if key is None or made is None or not tree.is_transparent(output):
            return
        kept = self._kept.get(key)
        if kept is not None and tree.equal(kept.output, output):
            self._allowed[key] = True
        self._kept[key] = _Kept(output, made)

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
        self._asked.clear()
        self._given = None


def versions(tensors: Any) -> Versions | None:
    """Tensors, with how often each was changed; None where torch does not count that."""
    found = list(tensors)
    return None if any(tensor.is_inference() for tensor in found) else [(tensor, tensor._version) for tensor in found]


def _is_same(before: Versions, now: Versions) -> bool:
    return len(before) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(before, now, strict=True))


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether somebody's hook counts on the module's calls."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
