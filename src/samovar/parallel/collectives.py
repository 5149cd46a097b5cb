"""How do ranks exchange tensors? All communication of this room goes through here, and its bytes are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass
class Traffic:
    """What this rank has sent to others, by kind of exchange."""

    sent_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, kind: str, num_bytes: int) -> None:
        self.sent_bytes[kind] = self.sent_bytes.get(kind, 0) + num_bytes
        self.calls[kind] = self.calls.get(kind, 0) + 1

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def reset(self) -> None:
        self.sent_bytes.clear()
        self.calls.clear()


@dataclass(frozen=True)
class Group:
    """Ranks that exchange tensors, seen from one of them."""

    ranks: tuple[int, ...]
    """Their ranks in the world, in the order in which they hold the parts of a sequence."""
    index: int
    """The place of this rank among them."""
    handle: dist.ProcessGroup | None
    traffic: Traffic

    @property
    def size(self) -> int:
        return len(self.ranks)

    def gather_rows(self, tensors: Sequence[torch.Tensor], counts: Sequence[int], dim: int) -> list[list[torch.Tensor]]:
        """For each tensor the parts of all ranks along a dimension, in one exchange. `counts`: rows of each rank."""
        if self.size == 1:
            return [[tensor] for tensor in tensors]
        most = max(counts)
        rows = [tensor.movedim(dim, 0) for tensor in tensors]
        flat = torch.cat([_plain(row).reshape(row.shape[0], -1) for row in rows], dim=1)
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

    def all_to_all(self, parts: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Send each rank its part, and get one of a known shape from each."""
        sizes = [torch.Size(shape) for shape in shapes]
        outgoing = torch.cat([part.reshape(-1) for part in parts])
        arriving = outgoing.new_empty(sum(size.numel() for size in sizes))
        dist.all_to_all_single(
            arriving,
            outgoing,
            output_split_sizes=[size.numel() for size in sizes],
            input_split_sizes=[part.numel() for part in parts],
            group=self.handle,
        )
        stays = parts[self.index].numel()
        self.traffic.count("all-to-all", (outgoing.numel() - stays) * outgoing.element_size())
        arrived = torch.split(arriving, [size.numel() for size in sizes])
        return [part.view(size) for part, size in zip(arrived, sizes, strict=True)]

    def pass_on(self, tensor: torch.Tensor, next_numel: int) -> Callable[[], torch.Tensor]:
        """Start sending a flat tensor to the next rank of the ring and getting one from the rank before."""
        arriving = tensor.new_empty(next_numel)
        operations = [
            dist.P2POp(dist.isend, tensor, self.ranks[(self.index + 1) % self.size], group=self.handle),
            dist.P2POp(dist.irecv, arriving, self.ranks[(self.index - 1) % self.size], group=self.handle),
        ]
        if self.index % 2:  # Both ends of a link begin with opposite operations, so that none waits for the other.
            operations.reverse()
        works = dist.batch_isend_irecv(operations)
        self.traffic.count("ring", tensor.numel() * tensor.element_size())

        def wait() -> torch.Tensor:
            for work in works:
                work.wait()
            return arriving

        return wait

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        return self._reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: torch.Tensor) -> torch.Tensor:
        """The maximum over all ranks."""
        return self._reduce(tensor, dist.ReduceOp.MAX)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of the rank at a place of the group; others give one of the same shape, whose values do not
        matter."""
        if self.size == 1:
            return tensor
        sent = _plain(tensor).contiguous()
        sent = sent if self.index == source else torch.empty_like(sent)
        dist.broadcast(sent, self.ranks[source], group=self.handle)
        if self.index == source:
            self.traffic.count("broadcast", sent.numel() * sent.element_size() * (self.size - 1))
        return sent.to(tensor.dtype)

    def _reduce(self, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if self.size == 1:
            return tensor
        reduced = tensor.detach().clone()
        dist.all_reduce(reduced, operation, group=self.handle)
        self.traffic.count("all-reduce", reduced.numel() * reduced.element_size())
        return reduced


_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Its name in torch from 2.13 on, and before."""


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Truth values travel as bytes: not every backend sends them."""
    return tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
