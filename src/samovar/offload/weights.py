"""Which tensors does a module hold, and how do they lie in memory?

What is moved is memory, so tensors that overlap in it (tied weights, views of one another) are one span
and move once. Spans are laid out in pieces: each large span is a piece of its own, which can be copied from
where it lies; all small ones together are one piece, because a copy costs the same however short it is.

On a CPU the libraries that multiply matrices choose their kernels by where in a cache line a weight begins, and kernels
round differently. So what is moved there keeps its phase, its address modulo a line: weights that were read from a
safetensors file begin at any multiple of eight bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import ModelError

ALIGNMENT = 512
"""Bytes at which every tensor starts on the device: what torch's own allocator gives, so that kernels are the same."""
LINE = 64
"""Bytes of a cache line, within which a weight keeps its place on a CPU; torch's own allocator begins at one there."""
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


def phase_of(tensor: torch.Tensor) -> int:
    """Where in a cache line a tensor begins; 0 where that is no place for its type, for we lay out by elements."""
    return tensor.data_ptr() % LINE if _is_at_an_element(tensor) else 0


def _is_at_an_element(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % tensor.element_size() == 0


@dataclass(frozen=True)
class Span:
    """Memory that one or several tensors cover."""

    start: int
    num_bytes: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def phase(self) -> int:
        """Where in a cache line it begins, as `phase_of` says."""
        return self.start % LINE if all(map(_is_at_an_element, self.tensors)) else 0

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
    starts: tuple[int, ...]
    """For each piece, where in it the bytes begin that are copied to it."""

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)


def lay_out(spans: Sequence[Span], *, in_phase: bool) -> Layout:
    """Spans in pieces, the small ones in the first. They begin at a multiple of `ALIGNMENT`, as if allocated there, or
    in the phase that they have."""
    phases = [span.phase if in_phase else 0 for span in spans]
    rooms = [room_for(span.num_bytes, phase) for span, phase in zip(spans, phases, strict=True)]
    small = sum(room for span, room in zip(spans, rooms, strict=True) if span.num_bytes < LEAST_PIECE)
    pieces, starts = ([small], [0]) if small else ([], [])
    places: list[tuple[int, int]] = []
    used = 0
    for span, phase, room in zip(spans, phases, rooms, strict=True):
        if span.num_bytes < LEAST_PIECE:
            places.append((0, used + phase))
            used += room
        else:
            places.append((len(pieces), phase))
            pieces.append(room)
            starts.append(phase)
    return Layout(tuple(pieces), tuple(places), tuple(starts))


def room_for(num_bytes: int, phase: int) -> int:
    """What a span takes of memory that is given by multiples of `ALIGNMENT`."""
    return max(-(-(phase + num_bytes) // ALIGNMENT), 1) * ALIGNMENT


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
