"""The components and blocks of a pipeline, and their sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from ..arch import find_anatomy
from ..arch.modules import unwrapped
from ..arch.quantised import as_stored
from ..arch.skeleton import Parts, cast, loaded_parts, read_skeleton
from ..core.errors import ModelError
from ..core.files import check_names
from ..core.tensor_parts import take_apart
from .coding import expected_share
from .layout import Piece, held_by, lay_out, shared_tensors, spans_of, tensors_of


def format_least(num_bytes: int) -> str:
    """A size that is enough, as it is written in settings."""
    unit, size = next(
        ((unit, size) for unit, size in (("MiB", 2**20), ("KiB", 2**10)) if num_bytes >= 8 * size), ("B", 1)
    )
    return f"{-(-num_bytes // size)}{unit}"


Role = Literal["denoiser", "encoder", "vae", "companion", "resident"]
"""What a component is for. A companion, such as a ControlNet, is called in each step, beside a denoiser. What is
resident never leaves the device."""


def format_bytes(num_bytes: float, *, up: bool = False) -> str:
    """Bytes for people, to the nearest hundredth or rounded up."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size * 0.995:
            return f"{math.ceil(num_bytes / size * 100) / 100 if up else num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


@dataclass(frozen=True)
class BlockSize:
    """What one block needs on the device."""

    path: str
    pieces: tuple[int, ...]
    """Bytes of the pieces in which it is copied."""
    compute_s: float = 0.0
    coded: tuple[int, ...] = ()
    """Bytes of each piece in which it crosses the bus if it is compressed, as expected."""

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)

    @property
    def sent(self) -> tuple[int, ...]:
        """Bytes of each piece that cross the bus."""
        return self.coded or self.pieces


@dataclass(frozen=True)
class ComponentSize:
    """What one component of a pipeline needs on the device."""

    name: str
    role: Role
    class_name: str
    rest_bytes: int
    """Everything outside its blocks."""
    blocks: tuple[BlockSize, ...] = ()
    """In order of definition. A block that is used in two places is listed once."""
    ahead: ComponentSize | None = None
    """The same component with its time-only layers on the host, if it has any."""
    ahead_bytes: int = 0
    """Bytes of the time-only layers that are on the host."""
    ahead_room: int = 0
    """Device memory that it takes to compute these layers: one computes while the next is copied."""
    reads_text: bool = False
    """Whether these layers see more than the time, and so are computed anew for each prompt."""

    def uncoded(self) -> ComponentSize:
        """The same, with weights that cross the bus as they are."""
        return replace(self, blocks=tuple(replace(block, coded=()) for block in self.blocks))

    @property
    def num_bytes(self) -> int:
        return self.rest_bytes + sum(block.num_bytes for block in self.blocks)


class SharedWeights(torch.nn.Module):
    """Weights that several components or blocks share, and that therefore stay on the device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._buffers.update({str(index): tensor for index, tensor in enumerate(tensors)})


@dataclass(frozen=True)
class Component:
    """A component of a pipeline with the tensors that belong to it alone."""

    name: str
    role: Role
    module: torch.nn.Module
    blocks: Mapping[str, torch.nn.Module]
    """Its blocks by path, each once; empty for components that never stream."""
    skip: frozenset[int]
    """Ids of modules and tensors inside it that belong to others."""
    time_layers: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    """Layers that depend on time alone, by path."""
    reads_text: bool = False
    """Whether these also see what a prompt was pooled to."""

    @property
    def with_layers_ahead(self) -> Component:
        """The component without its time-only layers."""
        return self.without(self.time_layers.values())

    def without(self, parts: Iterable[torch.nn.Module | torch.Tensor]) -> Component:
        """The component less some of its layers or tensors, and less blocks that have no others."""
        skip = self.skip | frozenset(map(id, parts))
        blocks = {path: block for path, block in self.blocks.items() if tensors_of(block, skip)}
        return replace(self, skip=skip, blocks=blocks)

    @cached_property
    def skip_with_blocks(self) -> frozenset[int]:
        """The same with its blocks: what is left is outside of them."""
        return self.skip | {id(block) for block in self.blocks.values()}

    def tensors(self) -> list[torch.Tensor]:
        """The plain tensors that its weights are made of."""
        return tensors_of(self.module, self.skip)

    def rest(self) -> list[torch.Tensor]:
        """What it holds outside its blocks."""
        return held_by(self.module, self.skip_with_blocks)

    def block(self, path: str) -> list[torch.Tensor]:
        """What one block holds."""
        return held_by(self.blocks[path], self.skip)


def find_components(pipeline: object, exclude: Collection[str] = ()) -> list[Component]:
    """The components of a pipeline, and last the weights that several of them or their blocks share."""
    return split_parts(loaded_parts(pipeline), exclude, getattr(pipeline, "_resident_modules", None) or ())


def split_parts(parts: Parts, exclude: Collection[str] = (), resident: Collection[str] = ()) -> list[Component]:
    """The components among the parts of a model, and last the weights that several of them or their blocks share.

    `resident`: the names of those that are declared to stay on the device.
    """
    check_names(exclude, parts, "a component, so it cannot be in exclude", param="exclude")
    modules = frozenset(id(part.module) for part in parts.values())
    components = []
    for name, part in parts.items():
        if part.module is not None and name not in exclude:
            role: Role = "companion" if part.role == "resident" and name not in resident else part.role
            blocks = _blocks_of(part.module) if role in ("denoiser", "encoder", "companion") else {}
            components.append(Component(name, role, part.module, blocks, modules - {id(part.module)}))
    shared = shared_tensors([c.rest() for c in components] + [c.block(path) for c in components for path in c.blocks])
    if not shared:
        return components
    own = [component.without(shared) for component in components]
    return [*own, Component("shared weights", "resident", SharedWeights(shared), {}, frozenset())]


def _blocks_of(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for stack in find_anatomy(module).stacks:
        for path, block in zip(stack.block_paths, stack.modules(module), strict=True):
            found.setdefault(id(block), (path, block))
    return dict(found.values())


def measure_components(
    components: Sequence[Component], *, in_phase: bool = False, coded: bool = False
) -> tuple[ComponentSize, ...]:
    """The sizes of components on the device; `in_phase` as for `lay_out`. `coded`: whether weights may cross the bus
    compressed."""

    def block(path: str, tensors: Sequence[torch.Tensor]) -> BlockSize:
        pieces = lay_out(spans_of(take_apart(tensors).plain), in_phase=in_phase)
        sent = tuple(map(_expected_bytes, pieces)) if coded else ()
        return BlockSize(path, tuple(piece.num_bytes for piece in pieces), coded=sent)

    def measure(c: Component) -> ComponentSize:
        blocks = tuple(block(path, c.block(path)) for path in c.blocks)
        return ComponentSize(c.name, c.role, type(unwrapped(c.module)).__name__, block("", c.rest()).num_bytes, blocks)

    def with_ahead(c: Component) -> ComponentSize:
        layers = [block(path, held_by(layer)).num_bytes for path, layer in c.time_layers.items()]
        if not layers:
            return measure(c)
        ahead = measure(c.with_layers_ahead)
        ahead = replace(ahead, ahead_bytes=sum(layers), ahead_room=2 * max(layers), reads_text=c.reads_text)
        return replace(measure(c), ahead=ahead)

    return tuple(map(with_ahead, components))


def _expected_bytes(piece: Piece) -> int:
    """The bytes in which a piece is expected to cross the bus."""
    (span, _), *others = piece.spans
    if others or not piece.is_large:
        return piece.num_bytes
    return int(piece.num_bytes * expected_share(span.tensors[0]))


def read_parts(source: str, dtype: torch.dtype | None = None) -> Parts:
    """The components of a model folder or of a diffusers class, without weights; `dtype` as which they are loaded."""
    name, parts = read_skeleton(source)
    unbuilt = [part.cls.__name__ for part in parts.values() if part.module is None and part.role == "denoiser"]
    if unbuilt or not parts:
        raise ModelError(
            f"The size of {name} is unknown: {', '.join(unbuilt) or 'it'} depends on a checkpoint. Give a model folder "
            "instead: hf download NAME --local-dir FOLDER"
        )
    for part in parts.values():
        if part.module is not None and dtype is not None:
            cast(part.module, dtype)
    return parts


def read_sizes(source: str) -> tuple[ComponentSize, ...]:
    """The sizes of a model folder or of a diffusers class, without reading weights."""
    parts = read_parts(source)
    components = split_parts(parts)
    with as_stored(parts):
        return measure_components(components, coded=True)
