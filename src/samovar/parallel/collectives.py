"""Exchanges of tensors between ranks. All communication of this room goes through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import nested

_TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative difference that rounding explains, by precision; 1e-4 for any other."""


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors, seen from one of them."""

    ranks: tuple[int, ...]
    """Their ranks in the world, in the order in which they hold the parts of a sequence."""
    index: int
    """Position of this rank in the group."""
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather(self, tensor: Tensor, counts: Sequence[int], dim: int) -> Tensor:
        """The parts of all ranks, one after the other along a dimension. `counts`: the rows of each rank."""
        if self.size == 1:
            return tensor
        rows, most = _sendable(tensor).movedim(dim, 0), max(counts)
        missing = rows.new_zeros(most - rows.shape[0], *rows.shape[1:])
        sent = torch.cat([rows, missing]) if len(missing) else rows.contiguous()
        gathered = sent.new_empty(self.size * most, *sent.shape[1:])
        _all_gather(gathered, sent, group=self.handle)
        parts = [part[:count] for part, count in zip(torch.split(gathered, most), counts, strict=True)]
        return torch.cat(parts).to(tensor.dtype).movedim(0, dim)

    def all_to_all(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Sequence[int]]]
    ) -> list[tuple[Tensor, ...]]:
        """For each tensor, send every rank its part, and get parts of known shapes from all, in one exchange."""
        outgoing = [torch.cat([part.reshape(-1) for part in to_rank]) for to_rank in zip(*parts, strict=True)]
        by_rank = list(zip(*shapes, strict=True))
        sizes = [sum(map(math.prod, of_rank)) for of_rank in by_rank]
        arriving = outgoing[0].new_empty(sum(sizes))
        sent_sizes = [part.numel() for part in outgoing]
        dist.all_to_all_single(arriving, torch.cat(outgoing), sizes, sent_sizes, group=self.handle)
        arrived = map(unpacked, arriving.split_with_sizes(sizes), by_rank)
        return list(zip(*arrived, strict=True))

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
        return reduced


def unpacked(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes, from their elements in one flat tensor."""
    parts = flat.split_with_sizes([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name from torch 2.13 on, and before."""


def _sendable(tensor: Tensor) -> Tensor:
    """Booleans travel as bytes: not every backend sends them."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
