"""Memory of a recording's own for what a call is given: a replay reads its inputs where they were when it was recorded.

Two calls of one form differ in the contents of their tensors alone. What cannot be compared or copied in place has no
form, and runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from ..core import nested
from ..core.interop import copy_each
from ..core.tensor_parts import bits, is_plain, is_strided


class Unsuitable(Exception):
    """A call cannot be replayed, for this reason."""


class StaticInputs:
    """Where the tensors of a form are put."""

    def __init__(self, given: Any) -> None:
        tensors = {id(tensor): tensor for tensor in nested.tensors(given)}
        with torch.inference_mode(False):  # They are written to in whatever mode a call comes.
            places = {key: torch.empty_like(tensor) for key, tensor in tensors.items()}
            self._given = nested.map_tensors(lambda tensor: places[id(tensor)], given)
        self.tensors = list(places.values())
        self.fill(given)

    def fill(self, given: Any) -> None:
        """Copy the tensors of a call in."""
        copy_each(self.tensors, list({id(tensor): tensor for tensor in nested.tensors(given)}.values()))

    def given(self) -> Any:
        """What was given, with these places for its tensors; in new lists, which some models empty."""
        return nested.map_tensors(lambda tensor: tensor, self._given)


def form_of(given: Any) -> tuple[torch.device, Hashable]:
    """The device of a call, and what it shares with those that a replay can stand for. Unsuitable if that cannot be
    compared."""
    tensors = list(nested.tensors(given))
    if not tensors:
        raise Unsuitable("it takes no tensors")
    opaque = sorted({type(leaf).__name__ for _, leaf in nested.leaves(given) if not nested.is_transparent(leaf)})
    if opaque:
        raise Unsuitable(f"an argument is a {', '.join(opaque)}, which cannot be compared")
    if not all(is_plain(t) and is_strided(t) and not (t.is_meta or t.is_conj() or t.is_neg()) for t in tensors):
        raise Unsuitable("an argument is a tensor of a kind that cannot be copied in place")
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise Unsuitable(f"its arguments are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))})")
    same = list(map(id, tensors))
    return tensors[0].device, (nested.signature(given, exact=True), tuple(map(same.index, same)))


def has_same_bits(one: Any, other: Any) -> bool:
    """Whether two outputs are of one form and have the same bits."""
    try:
        is_same = form_of(one) == form_of(other)
    except Unsuitable:
        return False
    return is_same and all(
        torch.equal(bits(a), bits(b)) for a, b in zip(*map(nested.tensors, (one, other)), strict=True)
    )
