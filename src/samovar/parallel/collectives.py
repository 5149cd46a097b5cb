"""Exchanges of tensors between ranks. All communication of this room goes through here, and its bytes are counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import nested

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative difference that rounding explains, by precision; 1e-4 for any other."""


@dataclass
class Traffic:
    """What this rank has sent to others, by kind of exchange."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)

    def count(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] += num_bytes
        self.calls[kind] += 1

    def reset(self) -> None:
        self.sent_bytes.clear()
        self.calls.clear()


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors, seen from one of them."""

    ranks: tuple[int, ...]
    """Their ranks in the world, in the order in which they hold the parts of a sequence."""
    index: int
    """Position of this rank in the group."""
    handle: dist.ProcessGroup | None
    traffic: Traffic

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather_rows(self, tensors: Sequence[Tensor], counts: Sequence[int], dim: int) -> list[list[Tensor]]:
        """For each tensor the parts of all ranks along a dimension, in one exchange. `counts`: rows of each rank."""
        if self.size == 1:
            return [[tensor] for tensor in tensors]
        most = max(counts)
        rows = [tensor.movedim(dim, 0) for tensor in tensors]
        flat = torch.cat([_sendable(row).reshape(row.shape[0], -1) for row in rows], dim=1)
        if flat.shape[0] < most:
            flat = torch.cat([flat, flat.new_zeros(most - flat.shape[0], flat.shape[1])])
        gathered = flat.new_empty(self.size * most, flat.shape[1])
        _all_gather(gathered, flat.contiguous(), group=self.handle)
        self.traffic.count("all-gather", flat.numel() * flat.element_size() * (self.size - 1))
        parts = gathered.view(self.size, most, -1)
        widths = [row[0].numel() for row in rows]
        return [
            [
                part[:count].reshape(count, *row.shape[1:]).to(row.dtype).movedim(0, dim)
                for part, count in zip(columns, counts, strict=True)
            ]
            for row, columns in zip(rows, torch.split(parts, widths, dim=2), strict=True)
        ]

    def all_to_all(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors, and get tensors of known shapes from each, in one exchange."""
        outgoing = [torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in parts]
        sizes = [sum(map(math.prod, of_rank)) for of_rank in shapes]
        arriving = outgoing[0].new_empty(sum(sizes))
        sent = torch.cat(outgoing)
        dist.all_to_all_single(arriving, sent, sizes, [part.numel() for part in outgoing], group=self.handle)
        self.traffic.count("all-to-all", (sent.numel() - outgoing[self.index].numel()) * sent.element_size())
        return [unpacked(flat, of_rank) for flat, of_rank in zip(torch.split(arriving, sizes), shapes, strict=True)]

    def pass_on(self, tensor: Tensor, next_numel: int) -> Callable[[], Tensor]:
        """Start sending a flat tensor to the next rank of the ring and receiving one from the previous rank."""
        arriving = tensor.new_empty(next_numel)
        operations = [
            dist.P2POp(dist.isend, tensor, self.ranks[(self.index + 1) % self.size], group=self.handle),
            dist.P2POp(dist.irecv, arriving, self.ranks[(self.index - 1) % self.size], group=self.handle),
        ]
        if self.index % 2:  # The two ends of a link start with opposite operations, so that neither waits.
            operations.reverse()
        works = dist.batch_isend_irecv(operations)
        self.traffic.count("ring", tensor.numel() * tensor.element_size())

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return arriving

        return wait

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """The tensor of the rank at position `source`; the others pass one of the same shape, with any values."""
        if self.size == 1:
            return tensor
        sent = _sendable(tensor).contiguous()
        sent = sent if self.index == source else torch.empty_like(sent)
        dist.broadcast(sent, self.ranks[source], group=self.handle)
        if self.index == source:
            self.traffic.count("broadcast", sent.numel() * sent.element_size() * (self.size - 1))
        return sent.to(tensor.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, number: float, like: Any) -> float:
        """The largest number on any rank; NaN counts as infinite. Exchanged on the device of the tensors in `like`."""
        device = next((tensor.device for tensor in nested.tensors(like)), torch.device("cpu"))
        number = math.inf if math.isnan(number) else number
        return float(self._reduce(torch.tensor([number], device=device), dist.ReduceOp.MAX).item())

    def difference(self, output: Any, reference: Any) -> float:
        """The largest relative difference from a reference on any rank; 0 if rounding explains it on all of them."""
        allowed = max((_TOLERANCE.get(tensor.dtype, 1e-4) for tensor in nested.tensors(reference)), default=0.0)
        apart = nested.difference(output, reference)
        return self.max(0.0 if apart <= allowed else apart, reference)

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return tensor
        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, operation, group=self.handle)
        self.traffic.count("all-reduce", reduced.numel() * reduced.element_size())
        return reduced


def unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, from their elements in one flat tensor."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before."""


def _sendable(tensor: Tensor) -> Tensor:
    """Booleans travel as bytes: not every backend sends them."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
