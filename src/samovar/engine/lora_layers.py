"""How does a layer compute an adapter? As peft does, to the bit, without what changes nothing.

To the layer's output peft adds two products, times a scale, which is 1 for most adapters. On a GPU the multiplication
takes a third of all that an adapter costs: it reads and writes the whole output. Here a scale of 1 costs nothing, and a
power of two is applied between the products, where the tensor is as narrow as the adapter's rank; neither changes how
anything is rounded. All else is left to peft.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

_WIDE = (torch.bfloat16, torch.float32)
"""Types whose exponents have so much room that a few doublings never cost a bit."""
_MOST_DOUBLINGS = 16


def quicken(layers: Iterable[Any]) -> None:
    """Let peft's layers compute in this way, where they are linear and of the usual kind, not quantised."""
    from peft.tuners.lora.layer import Linear

    for layer in layers:
        if type(layer) is Linear and type(layer.base_layer) is torch.nn.Linear:
            layer.__class__ = _quick_class()


@functools.cache
def _quick_class() -> type:
    """The class of such layers, made when peft is needed."""
    from peft.tuners.lora.layer import Linear

    class QuickLinear(Linear):  # type: ignore[misc, unused-ignore]
        """peft's layer with fewer operations."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            used = [] if args or kwargs or self.training or self.merged else self._used(x)
            if not used:
                output: torch.Tensor = super().forward(x, *args, **kwargs)
                return output
            output = self.base_layer(x)
            for narrow, widen, scale in used:
                inner = narrow(x)
                if scale == 1.0:
                    added = widen(inner)
                elif widen.bias is None and _is_exact(scale, inner.dtype):
                    added = widen(inner * scale)
                else:
                    added = widen(inner) * scale
                output = output + added
            return output

        def _used(self, x: torch.Tensor) -> list[tuple[Any, Any, float]]:
            """The products and the scale of each adapter that is switched on; none if one of them is more than that."""
            used: list[tuple[Any, Any, float]] = []
            narrow, widen = self.lora_A, self.lora_B
            for name in () if self.disable_adapters else self.active_adapters:
                if name in narrow:
                    if name in self.lora_variant or narrow[name].weight.dtype != x.dtype:
                        return []
                    used.append((narrow[name], widen[name], self.scaling[name]))
            return used

    return QuickLinear


def _is_exact(scale: float, dtype: torch.dtype) -> bool:
    """Whether a product can be scaled by scaling what goes into it, with the same bits."""
    fraction, doublings = math.frexp(abs(scale))
    return dtype in _WIDE and fraction == 0.5 and abs(doublings) <= _MOST_DOUBLINGS
