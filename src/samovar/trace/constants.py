"""Which modules give the same at every step, so that they need not run again?

Those without weights, such as rotary embeddings: what they give depends on their inputs alone. A module that has
parameters is never remembered, since adapters and weights may change at any time, and nothing tells of that surely.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import tree
from ..hooks import NOT_BYPASSED

_Key = tuple[torch.nn.Module, int]
"""A module, and the number of its call in a forward."""
_Versions = list[tuple[torch.Tensor, int]]


class _Kept(NamedTuple):
    form: Any
    given: _Versions
    output: Any
    made: _Versions


class Constants:
    """What modules without weights returned, in one branch of one run."""

    def __init__(self) -> None:
        self._kept: dict[_Key, _Kept] = {}
        self._trusted: set[_Key] = set()
        """Calls that were seen to give the same for the same."""
        self._varying: set[_Key] = set()
        """Calls whose arguments are others at each step."""
        self._counts: dict[torch.nn.Module, int] = {}
        self._asked: dict[torch.nn.Module, tuple[_Key, Any, _Versions]] = {}

    def begin_step(self) -> None:
        """Called before each forward."""
        self._counts.clear()
        self._asked.clear()

    def recall(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """What the module gives for these arguments, or NOT_BYPASSED if it has to run."""
        number = self._counts.get(module, 0)
        self._counts[module] = number + 1
        key = module, number
        if key in self._varying:
            return NOT_BYPASSED
        given = _versions((args, kwargs, list(module.buffers())))
        kept = self._kept.pop(key, None)
        if given is None or _is_watched(module):
            return NOT_BYPASSED
        form = tree.signature((args, kwargs)), _numbers((args, kwargs)), torch.is_autocast_enabled()
        if kept is not None and (kept.form != form or not _is_same(kept.given, given)):
            self._varying.add(key)
            return NOT_BYPASSED
        if kept is not None and all(tensor._version == version for tensor, version in kept.made):
            self._kept[key] = kept
            if key in self._trusted:
                return kept.output
        self._asked[module] = key, form, given
        return NOT_BYPASSED

    def keep(self, module: torch.nn.Module, output: Any) -> None:
        """Remember what a module returned when it had to run."""
        if module not in self._asked:
            return
        key, form, given = self._asked.pop(module)
        made, kept = _versions(output), self._kept.get(key)
        if made is not None and tree.is_transparent(output):
            if kept is not None and tree.equal(kept.output, output):
                self._trusted.add(key)
            self._kept[key] = _Kept(form, given, output, made)

    def clear(self) -> None:
        """Forget everything."""
        for held in (self._kept, self._trusted, self._varying, self._counts, self._asked):
            held.clear()


def _versions(value: Any) -> _Versions | None:
    """All tensors of a value, with how often each was changed; None where torch does not count that."""
    found = list(tree.tensors(value))
    return None if any(tensor.is_inference() for tensor in found) else [(tensor, tensor._version) for tensor in found]


def _is_same(before: _Versions, now: _Versions) -> bool:
    return len(before) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(before, now, strict=True))


def _numbers(value: Any) -> list[float]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, float)]


def _is_watched(module: torch.nn.Module) -> bool:
    """Whether somebody's hook counts on the module's calls."""
    return any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
