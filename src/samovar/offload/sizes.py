"""How much is it? Bytes as people write them, and what the parts of a model weigh."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..arch import find_anatomy
from ..arch.components import ModuleDiscovery, Role, is_denoiser_itself
from ..arch.modules import unwrapped
from ..arch.skeleton import Part, Parts, lone_part, read_skeleton
from ..errors import ModelError, SettingError
from .weights import lay_out, shared_tensors, spans_of, tensors_of

_UNITS = {"b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
          "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}  # fmt: skip


def parse_bytes(value: str | int, what: str) -> int:
    """Bytes from a number of them, or from text such as "12GiB" or "11.5 GB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*", value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise SettingError(f"{what} is {value!r}; bytes were expected, as a number or as text such as '12GiB'.")
    return int(float(match[1]) * unit)


def format_bytes(num_bytes: float) -> str:
    """Bytes for people."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size * 0.995:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} B"


@dataclass(frozen=True)
class BlockSize:
    """What one block needs on the device."""

    path: str
    pieces: tuple[int, ...]
    """Bytes of the parts in which it is copied."""

    @property
    def num_bytes(self) -> int:
        return sum(self.pieces)


@dataclass(frozen=True)
class ComponentSize:
    """What one component of a pipeline needs on the device."""

    name: str
    role: Role
    class_name: str
    rest_bytes: int
    """All that is in no block."""
    blocks: tuple[BlockSize, ...] = ()
    """In the order of definition; one that runs at two places comes once."""

    @property
    def num_bytes(self) -> int:
        return self.rest_bytes + sum(block.num_bytes for block in self.blocks)


SHARED = "shared weights"
"""The name of what belongs to several parts, and therefore stays on the device."""


@dataclass(frozen=True)
class Component:
    """A component of a pipeline as offload sees it."""

    name: str
    role: Role
    module: torch.nn.Module
    blocks: Mapping[str, torch.nn.Module]
    """Its blocks by path, each once; empty for what never streams."""
    skip: frozenset[int]
    """Ids of modules and tensors inside it that belong to somebody else."""

    def rest(self) -> list[torch.Tensor]:
        """The tensors that are in no block."""
        return tensors_of(self.module, self.skip | {id(block) for block in self.blocks.values()})

    def everything(self) -> list[torch.Tensor]:
        """All its tensors."""
        return tensors_of(self.module, self.skip)

    def block(self, path: str) -> list[torch.Tensor]:
        """The tensors of one block."""
        return tensors_of(self.blocks[path], self.skip)


def find_components(pipeline: object, exclude: Collection[str] = ()) -> tuple[list[Component], list[torch.Tensor]]:
    """A pipeline's components, and the tensors that several of their parts share."""
    return split_components(_loaded_parts(pipeline), exclude)


def split_components(parts: Parts, exclude: Collection[str] = ()) -> tuple[list[Component], list[torch.Tensor]]:
    """The same of a pipeline's modules, which may be on the meta device."""
    everyone = frozenset(id(part.module) for part in parts.values())
    modules = {name: part.module for name, part in parts.items() if part.module is not None and name not in exclude}
    unknown = [name for name in exclude if name not in parts]
    if unknown:
        raise SettingError(f"exclude names {unknown[0]!r}; the components are {', '.join(map(repr, parts))}.")
    blocks = {name: _blocks_of(module, parts[name].role) for name, module in modules.items()}
    components = [
        Component(name, parts[name].role, module, blocks[name], everyone - {id(module)})
        for name, module in modules.items()
    ]
    groups = [c.rest() for c in components] + [c.block(path) for c in components for path in c.blocks]
    shared = shared_tensors(groups)
    taken = frozenset(map(id, shared))
    return [_without(component, taken) for component in components], shared


def _without(component: Component, taken: frozenset[int]) -> Component:
    """A component less what it shares; a block of which nothing is left is none that could come and go."""
    skip = component.skip | taken
    blocks = {path: block for path, block in component.blocks.items() if tensors_of(block, skip)}
    return replace(component, blocks=blocks, skip=skip)


def _blocks_of(module: torch.nn.Module, role: Role) -> dict[str, torch.nn.Module]:
    if role not in ("denoiser", "encoder"):
        return {}
    found: dict[int, tuple[str, torch.nn.Module]] = {}
    for stack in find_anatomy(module).stacks:
        for path, block in zip(stack.block_paths, stack.modules(module), strict=True):
            found.setdefault(id(block), (path, block))
    return dict(found.values())


def measure_components(
    components: Sequence[Component], shared: Sequence[torch.Tensor], *, in_phase: bool = False
) -> tuple[ComponentSize, ...]:
    """What components need on the device, and as a last one what they share; `in_phase` as for `lay_out`."""
    sizes = [
        ComponentSize(
            c.name,
            c.role,
            type(unwrapped(c.module)).__name__,
            sum(_pieces(c.rest(), in_phase)),
            tuple(BlockSize(path, _pieces(c.block(path), in_phase)) for path in c.blocks),
        )
        for c in components
    ]
    if shared:
        sizes.append(ComponentSize(SHARED, "resident", "", sum(_pieces(shared, in_phase))))
    return tuple(sizes)


def _pieces(tensors: Sequence[torch.Tensor], in_phase: bool) -> tuple[int, ...]:
    return lay_out(spans_of(tensors), in_phase=in_phase).pieces


def read_sizes(source: str) -> tuple[ComponentSize, ...]:
    """The sizes of a model folder, or of a class of diffusers by its name; no weights are read."""
    name, parts = read_skeleton(source)
    unbuilt = [part.cls.__name__ for part in parts.values() if part.module is None and part.role == "denoiser"]
    if unbuilt or not parts:
        raise ModelError(
            f"The size of {name} is not known: {', '.join(unbuilt) or 'it'} depends on a checkpoint. Give the folder "
            "of a model instead: hf download NAME --local-dir FOLDER"
        )
    return measure_components(*split_components(parts))


def _loaded_parts(pipeline: object) -> Parts:
    if is_denoiser_itself(pipeline):
        return lone_part(type(unwrapped(pipeline)), pipeline)
    return {
        name: Part(role, type(unwrapped(module)), module)
        for role, (names, modules) in ModuleDiscovery.discover(pipeline).roles().items()
        for name, module in zip(names, modules, strict=True)
    }
