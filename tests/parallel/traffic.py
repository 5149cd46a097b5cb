"""What this rank sends to others, by kind of exchange."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Inside, exchanges among all ranks are counted, and the bytes that this rank sends in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func._opname.strip("_") if func.namespace == "c10d" else ""
        if kind:
            self.calls[kind] += 1
        if kind == "send":
            self.sent_bytes += sum(map(num_bytes, args[0]))
        elif kind == "allgather_base":
            self.sent_bytes += num_bytes(args[1]) * (dist.get_world_size() - 1)
        elif kind == "alltoall_base":  # All parts but its own.
            self.sent_bytes += num_bytes(args[1]) - args[4][dist.get_rank()] * args[1].element_size()
        return func(*args, **(kwargs or {}))


def num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
