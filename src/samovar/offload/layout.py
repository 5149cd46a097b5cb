"""The tensors that a module holds, and their layout in memory.

Memory is what moves, so tensors that overlap (tied weights, views of one another) form one span and move once. Spans
are laid out in pieces: each large span is a piece, which can be copied from where it is; all small spans together are
one piece, because a copy has a fixed cost.

CPU matrix libraries choose kernels by where in a cache line a weight begins, and kernels round differently. So on a CPU
a weight keeps its phase, which is its address modulo the line. Weights read from a safetensors file may begin at any
multiple of eight bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import torch

from ..core.errors import ModelError
from ..core.interop import compute_dtype
from ..core.quantisers import is_packed_for_cpu, kept_beside_weights
from ..core.tensor_parts import is_bound_to_its_device, is_plain, problem_of, take_apart

ALIGNMENT = 512
"""Every tensor on the device starts at a multiple of this, as in torch's own allocator, so kernels are the same."""
LINE = 64
"""Bytes of a cache line."""
MIN_PIECE = 2**20
"""Spans of at least this many bytes are a piece each."""


# ------------------------------------------------------------------------------------------------ what a module holds


def held_by(module: torch.nn.Module, skip: Collection[int] = ()) -> list[torch.Tensor]:
    """All parameters and buffers of a module, each once; `skip` holds the ids of modules and tensors to leave out."""
    found: dict[int, torch.Tensor] = {}
    _collect(module, skip, found)
    return list(found.values())


def tensors_of(module: torch.nn.Module, skip: Collection[int] = ()) -> list[torch.Tensor]:
    """The plain tensors that these are made of."""
    return take_apart(held_by(module, skip)).plain


def _collect(module: torch.nn.Module, skip: Collection[int], found: dict[int, torch.Tensor]) -> None:
    # This runs for every block that is moved, and `parameters()` takes five times as long.
    if id(module) in skip:
        return
    for held in (module._parameters, module._buffers):
        for tensor in held.values():
            if tensor is not None and id(tensor) not in skip:
                found[id(tensor)] = tensor
    for tensor in kept_beside_weights(module):
        if id(tensor) not in skip:
            found[id(tensor)] = tensor
    for child in module._modules.values():
        if child is not None:
            _collect(child, skip, found)


def cast_for_calls(module: torch.nn.Module) -> frozenset[int]:
    """The ids of tensors that diffusers casts for each call and back (layerwise casting)."""
    cast = [part for part in module.modules() if compute_dtype(part) is not None]
    return frozenset(id(t) for part in cast for t in (*part._parameters.values(), *part._buffers.values()))


def owners_of(module: torch.nn.Module, skip: Collection[int] = ()) -> list[torch.nn.Module]:
    """The modules that directly hold any of `held_by(module, skip)`."""
    wanted = {id(tensor) for tensor in held_by(module, skip)}
    return [
        part
        for part in module.modules()
        if any(id(tensor) in wanted for tensor in (*part._parameters.values(), *part._buffers.values()))
    ]


# ------------------------------------------------------------------------------------------------ memory


@dataclass(frozen=True)
class Span:
    """Memory that one or several tensors cover."""

    start: int
    num_bytes: int
    tensors: tuple[torch.Tensor, ...]

    @property
    def phase(self) -> int:
        """Where in a cache line it begins; 0 if a tensor is not aligned to its elements, which layouts count."""
        return self.start % LINE if self._is_aligned(0) else 0

    @property
    def needs_phase(self) -> bool:
        """Whether some of its tensors would not be aligned to their elements if it began elsewhere in a line."""
        return not self._is_aligned(self.start)

    def _is_aligned(self, start: int) -> bool:
        return all((tensor.data_ptr() - start) % tensor.element_size() == 0 for tensor in self.tensors)


def extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + reach) * tensor.element_size()


def spans_of(tensors: Iterable[torch.Tensor]) -> list[Span]:
    """The memory of some tensors; overlapping ones share a span. On the meta device each tensor has its own."""
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


def flat_bytes(span: Span) -> torch.Tensor:
    """The bytes of a span, in place."""
    first = span.tensors[0].data
    flat = torch.empty(0, dtype=torch.uint8, device=first.device)
    if not span.num_bytes:
        return flat
    storage = first.untyped_storage()
    return flat.set_(storage, span.start - storage.data_ptr(), (span.num_bytes,), (1,))


def move(span: Span, target: torch.Tensor) -> None:
    """Move the tensors of a span into other memory, given as bytes, with the same distances between them."""
    target.copy_(flat_bytes(span))
    offsets = [tensor.data_ptr() - span.start if span.num_bytes else 0 for tensor in span.tensors]
    data = [view_of(target, tensor, offset) for tensor, offset in zip(span.tensors, offsets, strict=True)]
    set_data(span.tensors, data)


def move_to_host(span: Span, phase: int) -> None:
    """Move tensors from any device into their own host memory, which begins at `phase` in a cache line."""
    memory = torch.empty(span.num_bytes + 2 * LINE, dtype=torch.uint8, device="cpu")
    move(span, memory[-memory.data_ptr() % LINE + phase :][: span.num_bytes])


def view_of(memory: torch.Tensor, like: torch.Tensor, offset: int) -> torch.Tensor:
    """A tensor with the dtype, shape and strides of another, at a byte offset of some memory."""
    start, rest = divmod(int(memory.storage_offset()) + offset, like.element_size())
    assert not rest or not like.numel(), "tensors start where their dtype may"
    empty = torch.empty(0, dtype=like.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), start, like.shape, like.stride())


def set_data(tensors: Iterable[torch.Tensor], data: Iterable[torch.Tensor]) -> None:
    """Point tensors at other memory, all of them or, if an interrupt comes first, none: Python runs no line between."""
    deque(map(setattr, tensors, repeat("data"), data), maxlen=0)


# ------------------------------------------------------------------------------------------------ pieces


class Piece(NamedTuple):
    """Spans that are copied to the device as one."""

    num_bytes: int
    """Device memory that it takes."""
    start: int
    """Where in it the copied bytes begin."""
    spans: tuple[tuple[Span, int], ...]
    """Its spans, each with its offset. A large span is alone in its piece."""

    @property
    def is_large(self) -> bool:
        """Whether it is one large span."""
        return self.spans[0][0].num_bytes >= MIN_PIECE


def lay_out(spans: Iterable[Span], *, in_phase: bool) -> list[Piece]:
    """Arrange spans in pieces, all small ones in the first.

    Each span begins at a multiple of `ALIGNMENT`, as if it had been allocated there, plus its phase if `in_phase`.
    """
    large: list[Piece] = []
    small: list[tuple[Span, int]] = []
    used = 0
    for span in spans:
        phase = span.phase if in_phase or span.needs_phase else 0
        room = max(-(-(phase + span.num_bytes) // ALIGNMENT), 1) * ALIGNMENT
        if span.num_bytes < MIN_PIECE:
            small.append((span, used + phase))
            used += room
        else:
            large.append(Piece(room, phase, ((span, phase),)))
    return [Piece(used, 0, tuple(small)), *large] if small else large


def shared_tensors(groups: Iterable[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors whose memory belongs to several of the groups: they cannot come and go with one of them."""
    owners: dict[int, set[int]] = {}
    holders: dict[int, dict[int, torch.Tensor]] = {}
    plain: dict[int, torch.Tensor] = {}
    for index, group in enumerate(groups):
        for tensor in group:
            for part in take_apart([tensor]).plain:
                owners.setdefault(id(part), set()).add(index)
                holders.setdefault(id(part), {})[id(tensor)] = tensor
                plain[id(part)] = part
    shared: dict[int, torch.Tensor] = {}
    for span in spans_of(plain.values()):
        if len(set().union(*(owners[id(part)] for part in span.tensors))) > 1:
            for part in span.tensors:
                shared |= holders[id(part)]
    return list(shared.values())


def check_movable(name: str, module: torch.nn.Module, device: torch.device) -> None:
    """Refuse tensors that are not made of plain pieces of memory, which mean the same on the host and the device."""
    kinds: dict[Any, str | None] = {}
    for path, tensor in (*module.named_parameters(), *module.named_buffers()):
        problem = problem_of(tensor)
        if not problem and not is_plain(tensor):
            kind = type(tensor), *((type(part), part.dtype) for part in take_apart([tensor]).plain)
            if is_packed_for_cpu(tensor) or kind not in kinds:
                kinds[kind] = _problem_on(tensor, device)
            problem = kinds[kind]
        if problem:
            other = "load its weights first" if "has no weights" in problem else "quantise the model in another way"
            raise ModelError(
                f"{name}.{path} cannot be offloaded: it {problem}. Leave this component where it is, "
                f"exclude={name!r}, or {other}."
            )


def _problem_on(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Why the bytes of a quantised tensor cannot be used where they are moved to."""
    kind = f"is a {type(tensor).__module__}.{type(tensor).__name__}"
    wrappers = take_apart([tensor]).wrappers
    if is_packed_for_cpu(tensor) and device.type != "cpu":
        other_way = "quantise it on the GPU" if wrappers else "load it again, and offload it before it is called there"
        return f"{kind} that is packed for the CPU; {other_way}"
    other = device if tensor.device.type == "cpu" else torch.device("cpu")
    if wrappers and other.type != tensor.device.type and is_bound_to_its_device(tensor, other):
        return f"{kind}, which is packed otherwise on {other.type} than on {tensor.device.type}"
    return None
