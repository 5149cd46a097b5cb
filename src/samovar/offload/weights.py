"""Which tensors does a module hold, and how do they lie in memory?

What is moved is memory, so tensors that overlap in it (tied weights, views of one another) are one span
and move once. Spans are laid out in pieces: each large span is a piece of its own, which can be copied from
where it lies; all small ones together are one piece, because a copy costs the same however short it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import ModelError

ALIGNMENT = 512
"""Bytes at which every tensor starts on the device: what torch's own allocator gives, so that kernels are the same."""
LEAST_PIECE = 2**20
"""Bytes from which on a span is a piece of its own."""


def tensors_of(module: torch.nn.Module, skip: Collection[int] = ()) -> list[torch.Tensor]:
    """All parameters and buffers in a module, each once; `skip` has the ids of modules and tensors to leave out."""
    found: dict[int, torch.Tensor] = {}
    _walk(module, skip, found)
    return list(found.values())


def _walk(module: torch.nn.Module, skip: Collection[int], found: dict[int, torch.Tensor]) -> None:
    # By hand, because this is done for each block that is moved: `parameters()` takes five times as long.
    if id(module) in skip:
        return
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if tensor is not None and id(tensor) not in skip:
                found[id(tensor)] = tensor
    for child in module._modules.values():
        if child is not None:
            _walk(child, skip, found)


def owners_of(module: torch.nn.Module, skip: Collection[int] = ()) -> list[torch.nn.Module]:
    """The modules within a module that hold tensors themselves, each once; `skip` as for `tensors_of`."""
    found: dict[int, torch.nn.Module] = {}
    for part in _parts(module, skip):
        own = (tensor for held in (part._parameters, part._buffers) for tensor in held.values())
        if any(tensor is not None and id(tensor) not in skip for tensor in own):
            found[id(part)] = part
    return list(found.values())


def _parts(module: torch.nn.Module, skip: Collection[int]) -> Iterator[torch.nn.Module]:
    if id(module) not in skip:
        yield module
        for child in module._modules.values():
            if child is not None:
                yield from _parts(child, skip)


@dataclass(frozen=True)
class Span:
    """Memory that one or several tensors cover."""

    start: int
    num_bytes: int
    tensors: tuple[torch.Tensor, ...]

    def offset(self, tensor: torch.Tensor) -> int:
        """Where in the span a tensor begins."""
        return tensor.data_ptr() - self.start if self.num_bytes and not tensor.is_meta else 0


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()


def spans_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The memory of some tensors; those that overlap share a span. Tensors on the meta device are each their own."""
    ranges = sorted(((tensor.data_ptr(), extent(tensor), tensor) for tensor in tensors), key=lambda item: item[:2])
    spans: list[Span] = []
    for start, num_bytes, tensor in ranges:
        last = spans[-1] if spans else None
        if last is not None and num_bytes and not tensor.is_meta and start < last.start + last.num_bytes:
            end = max(last.start + last.num_bytes, start + num_bytes)
            spans[-1] = Span(last.start, end - last.start, (*last.tensors, tensor))
        else:
            spans.append(Span(start, num_bytes, (tensor,)))
    return spans


@dataclass(frozen=True)
class Layout:
    """How spans lie on the device."""

    pieces: tuple[int, ...]
    """Bytes of each piece."""
    places: tuple[tuple[int, int], ...]
    """For each span, its piece and where it begins in it."""

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)


def lay_out(sizes: Sequence[int]) -> Layout:
    """Spans of these sizes in pieces, the small ones in the first."""
    small = sum(_aligned(size) for size in sizes if size < LEAST_PIECE)
    pieces = [small] if small else []
    places: list[tuple[int, int]] = []
    used = 0
    for size in sizes:
        if size < LEAST_PIECE:
            places.append((0, used))
            used += _aligned(size)
        else:
            places.append((len(pieces), 0))
            pieces.append(_aligned(size))
    return Layout(tuple(pieces), tuple(places))


def _aligned(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def shared_tensors(groups: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors whose memory belongs to more than one of some groups: they cannot come and go with one of them."""
    owner: dict[int, set[int]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for index, group in enumerate(groups):
        for tensor in group:
            owner.setdefault(id(tensor), set()).add(index)
            tensors[id(tensor)] = tensor
    return [
        tensor
        for span in spans_of(tensors.values())
        if len(set().union(*(owner[id(tensor)] for tensor in span.tensors))) > 1
        for tensor in span.tensors
    ]


def check_movable(name: str, module: torch.nn.Module, skip: Collection[int] = ()) -> None:
    """Refuse tensors that are more than their memory: what is swapped is `tensor.data` and nothing else."""
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        if id(tensor) in skip:
            continue
        problem = _problem(tensor)
        if problem:
            raise ModelError(
                f"{name}.{path} cannot be offloaded: it {problem}, and a plain tensor in memory was expected. "
                "Leave this component where it is (exclude=...), or load the model unquantised."
            )


def _problem(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "is on the meta device and has no weights"
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
        return f"is a {type(tensor).__module__}.{type(tensor).__name__}"
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return f"is {'quantised' if tensor.is_quantized else tensor.layout}"
    return None


Find = Callable[[], list[torch.Tensor]]
"""Looks up the tensors that move together, as the model holds them now."""
