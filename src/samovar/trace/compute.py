"""How much does a call compute? Counted without weights, in linear layers and attention, where nearly all of it is."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .rehearse import CallForm
from .shadow import TrialFailed, trial
from .weightless import running_weightless, weightless_twin


def operations_of(module: torch.nn.Module, call: CallForm) -> int | None:
    """Multiplications and additions of one call of a module; None if it cannot be called so."""
    counter = _Counter()
    try:
        with trial(()), running_weightless(), counter:
            weightless_twin(module)(*call.args, **call.kwargs)
    except TrialFailed:
        return None
    return counter.operations


class _Counter(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is functional.linear:
            self.operations += 2 * output.numel() * args[0].shape[-1]
        elif func is functional.scaled_dot_product_attention:
            query, key = (*args, *(kwargs or {}).values())[:2]
            self.operations += 2 * (query.numel() + output.numel()) * key.shape[-2]
        return output
